"""Exchange one row for each (token, expert) pair, over all_to_all_single of torch alone.

What an engineer would write with torch.distributed, without code of epcomm. Worked example, 2 ranks
with one expert each, on rank 0:

    topk_ids [[1, 0], [0, 1]]     pairs by expert: (0, 1), (1, 0), (0, 0), (1, 1)
    rows that leave               tokens 0, 1 to rank 0 and tokens 0, 1 to rank 1

Rows are grouped by expert, by source rank and token within an expert. Every entry of topk_ids is an
expert: -1 is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.bench.contenders.base import Contender, Experts, Grouped
from epcomm.bench.contenders.local_ops import inverse_of, sum_weighted
from epcomm.bench.contenders.sent_bytes import SentBytes, expert_rows_bytes
from epcomm.testing.data import RankBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertRowsBatch:
    """One dispatch of ExpertRows on this rank.

    rows: [R, H], received rows, by source rank, then expert.
    order: [R], places `rows` by expert.
    row_of_pair: [T * K], where the result of (t, k) lies among the rows that come back.
    send_splits, recv_splits: [W] rows to and from each rank.
    """

    rows: Tensor
    num_rows_per_expert: Tensor
    order: Tensor
    row_of_pair: Tensor
    topk_weights: Tensor
    send_splits: Sequence[int]
    recv_splits: Sequence[int]


def dispatch_expert_rows(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts
) -> ExpertRowsBatch:
    """Send a row for each (token, expert) pair to the rank that owns the expert.

    Args:
        x: [T, H].   topk_ids: [T, K], int64, no -1.   topk_weights: [T, K], float32.
        experts: who owns them.

    Collective: yes; T may differ and be 0.   Host sync: once, for the counts.
    """
    world_size, num_local, device = experts.world_size, experts.num_local, x.device
    flat_ids = topk_ids.flatten()
    pairs_by_expert = flat_ids.argsort(stable=True)
    sent_counts = flat_ids.bincount(minlength=world_size * num_local).view(world_size, num_local)
    received_counts = torch.empty_like(sent_counts)
    dist.all_to_all_single(received_counts, sent_counts)
    send_splits, recv_splits = torch.stack([sent_counts, received_counts]).sum(dim=2).tolist()

    sent = x.index_select(0, pairs_by_expert // topk_ids.shape[1])
    rows = x.new_empty(sum(recv_splits), x.shape[1])
    dist.all_to_all_single(rows, sent, recv_splits, send_splits)

    expert_of_block = torch.arange(num_local, device=device).repeat(world_size)
    expert_of_row = expert_of_block.repeat_interleave(
        received_counts.flatten(), output_size=rows.shape[0]
    )
    return ExpertRowsBatch(
        rows=rows,
        num_rows_per_expert=received_counts.sum(0),
        order=expert_of_row.argsort(stable=True),
        row_of_pair=inverse_of(pairs_by_expert),
        topk_weights=topk_weights,
        send_splits=send_splits,
        recv_splits=recv_splits,
    )


def group_expert_rows(batch: ExpertRowsBatch) -> Tensor:
    """Return the received rows by expert, as a grouped GEMM reads them: [R, H]. Local."""
    return batch.rows.index_select(0, batch.order)


def combine_expert_rows(results: Tensor, batch: ExpertRowsBatch) -> Tensor:
    """Bring a result for each pair home and sum them by weight, in float32: [T, H].

    Args:
        results: [R, H], one for each row of group_expert_rows().
        batch: of the dispatch.

    Collective: yes.   Host sync: none.
    """
    sent = results.index_select(0, inverse_of(batch.order))
    home = results.new_empty(batch.row_of_pair.shape[0], results.shape[1])
    dist.all_to_all_single(home, sent, batch.send_splits, batch.recv_splits)
    num_tokens, top_k = batch.topk_weights.shape
    offsets = torch.arange(num_tokens + 1, device=home.device) * top_k
    return sum_weighted(home, batch.row_of_pair, batch.topk_weights.flatten(), offsets)


class ExpertRows(Contender[ExpertRowsBatch]):
    """The usual alternative: a row for each (token, expert) over all_to_all_single."""

    name = "expert_rows"

    def __init__(self, experts: Experts) -> None:
        """Keep who owns the experts."""
        self._experts = experts

    @property
    def num_roundings(self) -> int:
        return 1

    def dispatch(self, batch: RankBatch) -> ExpertRowsBatch:
        return dispatch_expert_rows(batch.x, batch.topk_ids, batch.topk_weights, self._experts)

    def group(self, dispatched: ExpertRowsBatch) -> Grouped:
        return Grouped(
            rows=group_expert_rows(dispatched),
            num_rows_per_expert=dispatched.num_rows_per_expert,
        )

    def combine(self, results: Tensor, dispatched: ExpertRowsBatch) -> Tensor:
        return combine_expert_rows(results, dispatched)

    def sent_bytes(self, batch: RankBatch) -> SentBytes:
        dispatched = self.dispatch(batch)
        return expert_rows_bytes(
            self._experts.rank,
            send_splits=dispatched.send_splits,
            recv_splits=dispatched.recv_splits,
            num_local=self._experts.num_local,
            row_bytes=batch.x.shape[1] * batch.x.element_size(),
        )
