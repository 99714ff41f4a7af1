"""Give all tokens to every rank, and sum the results by a reduce-scatter, with torch alone.

Rows are grouped by expert, by source rank and token within an expert. Every entry of topk_ids is an
expert: -1 is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from epcomm.bench.contenders.base import Contender, Experts, Grouped
from epcomm.bench.contenders.local_ops import inverse_of, sum_weighted
from epcomm.bench.contenders.sent_bytes import SentBytes, all_gather_bytes
from epcomm.testing.data import RankBatch

# torch 2.13 renamed these; 2.11 knows the old names only.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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


def dispatch_all_gather(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts
) -> AllGatherBatch:
    """Give all tokens and their routing to every rank, and find the pairs of its own experts.

    Args: as for dispatch_expert_rows.
    Collective: yes; T may differ and be 0.   Host sync: twice, for the sizes.
    """
    num_tokens, num_local = x.shape[0], experts.num_local
    mine = torch.tensor([num_tokens], device=x.device)
    max_tokens = int(_gathered(mine, experts.world_size).max())
    padding = (0, 0, 0, max_tokens - num_tokens)
    rows = _gathered(F.pad(x, padding), experts.world_size)
    ids = _gathered(F.pad(topk_ids, padding, value=-1), experts.world_size)
    weights = _gathered(F.pad(topk_weights, padding), experts.world_size)

    local_ids = ids - experts.rank * num_local
    is_mine = (local_ids >= 0) & (local_ids < num_local)
    pairs = is_mine.flatten().nonzero().flatten()
    expert_of_pair = local_ids.flatten()[pairs]
    order = expert_of_pair.argsort(stable=True)
    return AllGatherBatch(
        rows=rows,
        num_rows_per_expert=expert_of_pair.bincount(minlength=num_local),
        row_of_slot=pairs[order] // ids.shape[1],
        slots_by_row=inverse_of(order),
        offsets=F.pad(is_mine.sum(dim=1).cumsum(0), (1, 0)),
        slot_weights=weights.flatten()[pairs],
        num_tokens=num_tokens,
    )


def group_all_gather(batch: AllGatherBatch) -> Tensor:
    """Return the rows of this rank's experts, by expert: [C, H]. Local."""
    return batch.rows.index_select(0, batch.row_of_slot)


def combine_all_gather(results: Tensor, batch: AllGatherBatch, experts: Experts) -> Tensor:
    """Sum this rank's results for each token, then those of all ranks: [T, H].

    The sums of a rank are float32 and cast once; the sum over ranks is made in the dtype of the
    results, because the bytes on the wire are what this alternative suffers from.

    Collective: yes.   Host sync: none.
    """
    partial = sum_weighted(results, batch.slots_by_row, batch.slot_weights, batch.offsets)
    y = partial.new_empty(partial.shape[0] // experts.world_size, partial.shape[1])
    reduce_scatter(y, partial)
    return y[: batch.num_tokens]


def _gathered(tensor: Tensor, world_size: int) -> Tensor:
    """Gather the tensors [N, ...] of all ranks into [W * N, ...]."""
    gathered = tensor.new_empty(world_size * tensor.shape[0], *tensor.shape[1:])
    all_gather(gathered, tensor)
    return gathered


class AllGather(Contender[AllGatherBatch]):
    """All tokens to all ranks, and a reduce-scatter home."""

    name = "all_gather"

    def __init__(self, experts: Experts) -> None:
        """Keep who owns the experts."""
        self._experts = experts

    @property
    def num_roundings(self) -> int:
        # One a rank, and one for each addition of the reduce-scatter.
        return self._experts.world_size

    def dispatch(self, batch: RankBatch) -> AllGatherBatch:
        return dispatch_all_gather(batch.x, batch.topk_ids, batch.topk_weights, self._experts)

    def group(self, dispatched: AllGatherBatch) -> Grouped:
        return Grouped(
            rows=group_all_gather(dispatched),
            num_rows_per_expert=dispatched.num_rows_per_expert,
        )

    def combine(self, results: Tensor, dispatched: AllGatherBatch) -> Tensor:
        return combine_all_gather(results, dispatched, self._experts)

    def sent_bytes(self, batch: RankBatch) -> SentBytes:
        world_size = self._experts.world_size
        return all_gather_bytes(
            world_size,
            max_tokens=self.dispatch(batch).rows.shape[0] // world_size,
            top_k=batch.topk_ids.shape[1],
            row_bytes=batch.x.shape[1] * batch.x.element_size(),
        )
