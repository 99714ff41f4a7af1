"""Exchange one row for each (token, expert) pair over all_to_all_single of torch.

This is what an engineer would write with torch.distributed. Worked example, 2 ranks with one expert
each, on rank 0:

    topk_ids [[1, 0], [0, 1]]     pairs by expert: (0, 1), (1, 0), (0, 0), (1, 1)
    rows that are sent            tokens 0, 1 to rank 0 and tokens 0, 1 to rank 1

Rows are grouped by expert, by source rank and token within an expert. Every entry of topk_ids is an
expert: -1 is not supported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.bench.contenders.base import INT_BYTES, Contender, Grouped
from epcomm.buffers.traffic import BufferTraffic
from epcomm.ops.slots import as_members, count_experts, reduce_rows
from epcomm.testing.data import RankBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertRowsBatch:
    """One dispatch of ExpertRows on this rank.

    rows: [R, H], received rows, by source rank, then expert.
    order: [R], puts `rows` in expert order.
    token_of_row, weight_of_row: [T * K], of each row that is sent, and returned.
    row_of_pair: [T, K], int32, the row of (t, k) among them.
    send_splits, recv_splits: [W] rows to and from each rank.
    """

    rows: Tensor
    num_rows_per_expert: Tensor
    order: Tensor
    token_of_row: Tensor
    row_of_pair: Tensor
    weight_of_row: Tensor
    send_splits: Sequence[int]
    recv_splits: Sequence[int]


class ExpertRows(Contender[ExpertRowsBatch]):
    """The usual alternative to epcomm: a row for each (token, expert) over all_to_all_single."""

    name = backend = "expert_rows"
    num_roundings = 1

    def __init__(self, num_experts: int) -> None:
        """Divide the experts of all ranks among them, in order."""
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._num_local = num_experts // self._world_size

    def dispatch(self, batch: RankBatch) -> ExpertRowsBatch:
        """Send the rows. Collective: yes; T may differ and be 0.   Host sync: once, for counts."""
        world_size, num_local = self._world_size, self._num_local
        flat_ids = batch.topk_ids.flatten()
        pairs_by_expert = flat_ids.argsort(stable=True)
        sent_counts = count_experts(flat_ids, world_size * num_local).view(world_size, num_local)
        received_counts = torch.empty_like(sent_counts)
        dist.all_to_all_single(received_counts, sent_counts)
        send_splits, recv_splits = torch.stack([sent_counts, received_counts]).sum(dim=2).tolist()

        token_of_row = pairs_by_expert // batch.topk_ids.shape[1]
        rows = batch.x.new_empty(sum(recv_splits), batch.x.shape[1])
        sent = batch.x.index_select(0, token_of_row)
        dist.all_to_all_single(rows, sent, recv_splits, send_splits)

        expert_of_block = torch.arange(num_local, device=rows.device).repeat(world_size)
        expert_of_row = expert_of_block.repeat_interleave(
            received_counts.flatten(), output_size=rows.shape[0]
        )
        return ExpertRowsBatch(
            rows=rows,
            num_rows_per_expert=received_counts.sum(0),
            order=expert_of_row.argsort(stable=True),
            token_of_row=token_of_row,
            row_of_pair=pairs_by_expert.argsort().view(batch.topk_ids.shape).int(),
            weight_of_row=batch.topk_weights.flatten()[pairs_by_expert],
            send_splits=send_splits,
            recv_splits=recv_splits,
        )

    def group(self, dispatched: ExpertRowsBatch) -> Grouped:
        counts = dispatched.num_rows_per_expert
        return Grouped(
            rows=dispatched.rows.index_select(0, dispatched.order),
            num_rows_per_expert=counts,
            first_row=counts.cumsum(0) - counts,
        )

    def combine(self, results: Tensor, dispatched: ExpertRowsBatch) -> Tensor:
        """Return the results and sum them by weight, in float32. Collective: yes.

        Host sync: none.
        """
        sent = torch.empty_like(results)
        sent[dispatched.order] = results
        table = dispatched.row_of_pair
        returned = results.new_empty(table.numel(), results.shape[1])
        dist.all_to_all_single(
            returned, sent, list(dispatched.send_splits), list(dispatched.recv_splits)
        )
        return reduce_rows(returned, as_members(table, table.numel()), dispatched.weight_of_row)

    def sent_bytes(self, batch: RankBatch) -> BufferTraffic:
        """Count rows without headers in both directions, and a count for each expert."""
        dispatched, rank = self.dispatch(batch), self._rank
        row_bytes = batch.x.shape[1] * batch.x.element_size()
        return BufferTraffic(
            dispatch_bytes=(sum(dispatched.send_splits) - dispatched.send_splits[rank]) * row_bytes,
            combine_bytes=(sum(dispatched.recv_splits) - dispatched.recv_splits[rank]) * row_bytes,
            control_bytes=(self._world_size - 1) * self._num_local * INT_BYTES,
        )
