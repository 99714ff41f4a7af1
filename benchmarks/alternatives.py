"""Exchange rows as an engineer would with torch.distributed alone, without code of epcomm.

ExpertRows: one row on the wire for each (token, expert) pair, over all_to_all_single. Worked
example, 2 ranks with one expert each, on rank 0:

    topk_ids [[1, 0], [0, 1]]     pairs by expert: (0, 1), (1, 0), (0, 0), (1, 1)
    rows that leave               tokens 0, 1 to rank 0 and tokens 0, 1 to rank 1

AllGather: every rank gets all tokens, and the results are summed by a reduce-scatter.

Both hand out rows grouped by expert, by source rank and token within an expert, and both take every
entry of topk_ids as an expert: -1 is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring.local_ops import inverse_of, sum_weighted

# torch 2.13 renamed these; 2.11 knows the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The owners of the experts.

    num_local: L, the experts of each rank; ranks own experts in rank order.
    """

    rank: int
    world_size: int
    num_local: int


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
    _reduce_scatter(y, partial)
    return y[: batch.num_tokens]


def _gathered(tensor: Tensor, world_size: int) -> Tensor:
    """Gather the tensors [N, ...] of all ranks into [W * N, ...]."""
    gathered = tensor.new_empty(world_size * tensor.shape[0], *tensor.shape[1:])
    _all_gather(gathered, tensor)
    return gathered
