"""Send all tokens to every rank, and sum the results by a reduce-scatter, in plain torch.

Rows are grouped by expert, by source rank and token within an expert. Every entry of topk_ids is an
expert: -1 is not supported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from epcomm.bench.contenders.base import INT_BYTES, Contender, Experts, Grouped, SentBytes
from epcomm.bench.contenders.local_ops import inverse_of, sum_weighted
from epcomm.testing.data import RankBatch

# torch 2.13 renamed these; 2.11 has only the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Router weights are float32.
_WEIGHT_BYTES = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class AllGatherBatch:
    """One dispatch of AllGather on this rank; M is the largest T.

    rows: [W * M, H], the tokens of all ranks, each rank padded to M.
    row_of_slot: [C], the row of each pair of this rank's experts, by expert.
    slots_by_row: [C], the same pairs by row; offsets: [W * M + 1], which of them a row owns.
    slot_weights: [C], float32, in the order of slots_by_row.
    num_tokens: T of this rank.
    """

    rows: Tensor
    num_rows_per_expert: Tensor
    row_of_slot: Tensor
    slots_by_row: Tensor
    offsets: Tensor
    slot_weights: Tensor
    num_tokens: int


class AllGather(Contender[AllGatherBatch]):
    """The contender that gathers all tokens on all ranks, and reduce-scatters their sums."""

    name = backend = "all_gather"

    def __init__(self, experts: Experts) -> None:
        """Keep the owners of the experts."""
        self._experts = experts
        self.source_order = range(experts.world_size)
        # One rounding on this rank, and one for each addition of the reduce-scatter.
        self.num_roundings = experts.world_size

    def dispatch(self, batch: RankBatch) -> AllGatherBatch:
        """Gather tokens and routing, and find the pairs of this rank's experts.

        Collective: yes; T may differ and be 0.   Host sync: twice, for the sizes.
        """
        num_tokens, num_local = batch.x.shape[0], self._experts.num_local
        max_tokens = int(self._gathered(torch.tensor([num_tokens], device=batch.x.device)).max())
        padding = (0, 0, 0, max_tokens - num_tokens)
        ids = self._gathered(F.pad(batch.topk_ids, padding, value=-1))
        weights = self._gathered(F.pad(batch.topk_weights, padding))

        local_ids = ids - self._experts.rank * num_local
        is_mine = (local_ids >= 0) & (local_ids < num_local)
        pairs = is_mine.flatten().nonzero().flatten()
        expert_of_pair = local_ids.flatten()[pairs]
        order = expert_of_pair.argsort(stable=True)
        return AllGatherBatch(
            rows=self._gathered(F.pad(batch.x, padding)),
            num_rows_per_expert=expert_of_pair.bincount(minlength=num_local),
            row_of_slot=pairs[order] // ids.shape[1],
            slots_by_row=inverse_of(order),
            offsets=F.pad(is_mine.sum(dim=1).cumsum(0), (1, 0)),
            slot_weights=weights.flatten()[pairs],
            num_tokens=num_tokens,
        )

    def group(self, dispatched: AllGatherBatch) -> Grouped:
        return Grouped(
            rows=dispatched.rows.index_select(0, dispatched.row_of_slot),
            num_rows_per_expert=dispatched.num_rows_per_expert,
        )

    def combine(self, results: Tensor, dispatched: AllGatherBatch) -> Tensor:
        """Sum this rank's results for each token, then those of all ranks.

        The sums of a rank are float32 and cast once; the sum over ranks is made in the dtype of the
        results, because the bytes that it sends limit this alternative.

        Collective: yes.   Host sync: none.
        """
        partial = sum_weighted(
            results, dispatched.slots_by_row, dispatched.slot_weights, dispatched.offsets
        )
        y = partial.new_empty(partial.shape[0] // self._experts.world_size, partial.shape[1])
        reduce_scatter(y, partial)
        return y[: dispatched.num_tokens]

    def sent_bytes(self, batch: RankBatch) -> SentBytes:
        """Count W - 1 blocks per rank, as a ring or a direct exchange sends them."""
        num_blocks = self._experts.world_size - 1
        num_tokens = num_blocks * self.dispatch(batch).rows.shape[0] // self._experts.world_size
        row_bytes = batch.x.shape[1] * batch.x.element_size()
        routing_bytes = batch.topk_ids.shape[1] * (INT_BYTES + _WEIGHT_BYTES)
        return SentBytes(
            dispatch=num_tokens * (row_bytes + routing_bytes),
            combine=num_tokens * row_bytes,
            control=num_blocks * INT_BYTES,
        )

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Gather the tensors [N, ...] of all ranks into [W * N, ...]."""
        gathered = tensor.new_empty(self._experts.world_size * tensor.shape[0], *tensor.shape[1:])
        all_gather(gathered, tensor)
        return gathered
