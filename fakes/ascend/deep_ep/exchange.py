"""Send rows from tokens to experts and back, over ranks that are processes on CPUs.

One row is sent for each (token, k) whose id is not -1. Received rows are ordered by (local expert,
source rank, token), which is part of the contract, because GEMMs read them in place.

Ranks agree before anything is sent: if one refuses its arguments, or they differ where they may
not, all raise. On the device only that rank raises, and the others wait for it.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fakes.ascend.deep_ep.transport import exchange, gather, pack, unpack
from fakes.ascend.limits import require
from fakes.ascend.undefined import undefined

# Limit of the numbers that agree() compares.
_MAX_SHARED = 8


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The slots that a rank sends, by expert, then token.

    tokens, choices: int64 [number of slots].   per_expert: [E], number of slots of each expert.
    """

    tokens: Tensor
    choices: Tensor
    per_expert: Tensor


@dataclass(frozen=True, kw_only=True)
class Received:
    """rows [N, H]; scales float32 [N]; triples int32 [N, 3] (rank, token, k); counts [L, W]."""

    rows: Tensor
    scales: Tensor | None
    triples: Tensor
    counts: Tensor

    def per_expert(self) -> Tensor:
        """Return the received rows of each expert, int64 [L]."""
        return self.counts.sum(1)

    def prefix(self) -> Tensor:
        """Return the inclusive sums of rows by (expert, source), int32 [L * W]."""
        return self.counts.flatten().cumsum(0).to(torch.int32)


def pairs_of(ids: Tensor, num_experts: int) -> Pairs:
    """Return the pairs of ids [T, K], int64, -1 for none.

    Worked example: ids [[2, 0], [0, -1]] give the pairs (0, 1) and (1, 0) for expert 0, and (0, 0)
    for expert 2.
    """
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    order = order[flat[order] >= 0]
    return Pairs(
        tokens=order // max(ids.shape[1], 1),
        choices=order % max(ids.shape[1], 1),
        per_expert=torch.bincount(flat[order], minlength=num_experts),
    )


def require_ids(operator: str, ids: Tensor, num_experts: int, *, allow_none: bool) -> None:
    """Require valid ids; with others the device would write to wrong memory."""
    require(operator, bool((ids < num_experts).all()), f"ids are below {num_experts}")
    lowest = -1 if allow_none else 0
    rule = "ids are at least 0 (-1 needs MOE_ENABLE_TOPK_NEG_ONE=1, and an operator that reads it)"
    require(operator, bool((ids >= lowest).all()), rule)
    ordered = ids.sort(dim=1).values
    is_twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    require(operator, not bool(is_twice.any()), "the ids of a row differ: a slot is written once")


def agree(group: dist.ProcessGroup, operator: str, check: Callable[[], Sequence[int]]) -> None:
    """Check this rank's arguments and compare `check`'s numbers, such as H, with all ranks'.

    Raises:
        RuntimeError: on all ranks or on none.
    """
    refusal: RuntimeError | None = None
    shared: Sequence[int] = ()
    try:
        shared = check()
    except RuntimeError as error:
        refusal = error
    assert len(shared) <= _MAX_SHARED, "more numbers than agree() sends"
    # The name distinguishes ranks in different calls.
    numbers = [int(refusal is None), zlib.crc32(operator.encode()), *shared]
    row = torch.zeros(2 + _MAX_SHARED, dtype=torch.int64)
    row[: len(numbers)] = torch.tensor(numbers)
    rows = gather(group, row)
    if refusal is not None:
        raise refusal
    refused = [rank for rank, is_fine in enumerate(rows[:, 0].tolist()) if not is_fine]
    require(operator, not refused, f"ranks {refused} refuse their arguments, so all do")
    require(operator, bool((rows[:, 1] == row[1]).all()), "all ranks are in the same call")
    rule = f"all ranks pass the same sizes, got {rows[:, 2:].tolist()}"
    require(operator, bool((rows == row).all()), rule)


def send(group: dist.ProcessGroup, pairs: Pairs, rows: Tensor, scales: Tensor | None) -> Received:
    """Send rows [P, H] and scales [P] of the pairs to the ranks of their experts; collective."""
    counts = _counts(group, pairs.per_expert)
    places = torch.stack([pairs.tokens, pairs.choices], dim=1).to(torch.int32)
    columns = [rows, places] if scales is None else [rows, places, scales[:, None]]
    send_splits = pairs.per_expert.view(group.size(), -1).sum(1).tolist()
    arrived = exchange(group, pack(columns), send_splits, counts.sum(0).tolist())
    ordered = unpack(arrived[_order(counts)], columns)
    triples = torch.cat([sources_of(counts)[:, None], ordered[1]], dim=1)
    received_scales = None if scales is None else ordered[2].squeeze(1)
    return Received(rows=ordered[0], scales=received_scales, triples=triples, counts=counts)


def combine(
    group: dist.ProcessGroup,
    operator: str,
    rows: Tensor,
    counts: Tensor,
    ids: Tensor,
    weights: Tensor,
) -> Tensor:
    """Return rows [N, H] to their sources, and sum row times weight over k in float32; collective.

    Args:
        rows: those that send() gave, processed.
        counts: [L, W], of the dispatch, from the handle.
        ids: [T, K], those of the dispatch; -1 is skipped.
        weights: [T, K], float32.

    Returns:
        [T, H], the dtype of rows; zeros for a token without experts.

    Raises:
        RuntimeError: on all ranks, if ids and counts are not of one dispatch.
    """
    pairs = pairs_of(ids, counts.shape[0] * group.size())
    expected = _counts(group, pairs.per_expert)

    def check() -> Sequence[int]:
        is_same = torch.equal(expected, counts)
        require(operator, is_same, "the handle and topk_idx are of one dispatch")
        return []

    agree(group, operator, check)
    by_source = torch.empty_like(rows)
    by_source[_order(counts)] = rows
    send_splits = pairs.per_expert.view(group.size(), -1).sum(1).tolist()
    arrived = exchange(group, pack([by_source]), counts.sum(0).tolist(), send_splits)
    (returned,) = unpack(arrived, [by_source])
    total = torch.zeros(ids.shape[0], rows.shape[1])
    for choice in range(ids.shape[1]):
        chosen = pairs.choices == choice
        tokens = pairs.tokens[chosen]
        total[tokens] += returned[chosen].float() * weights[tokens, choice, None]
    return total.to(rows.dtype)


def counts_of(prefix: Tensor, num_ranks: int) -> Tensor:
    """Return the counts [L, W] whose inclusive sums Received.prefix() gives."""
    return prefix.to(torch.int64).diff(prepend=torch.zeros(1).long()).view(-1, num_ranks)


def sources_of(counts: Tensor) -> Tensor:
    """Return the source rank of each row in the order of counts [L, W], int32 [N]."""
    num_local, num_ranks = counts.shape
    ranks = torch.arange(num_ranks, dtype=torch.int32).repeat(num_local)
    return ranks.repeat_interleave(counts.flatten())


def require_written(operator: str, prefix: Tensor, triples: Tensor, num_ranks: int) -> None:
    """Check that prefix and triples [N, 3] of a handle belong together, and were written."""
    grows = bool((prefix >= 0).all()) and bool((prefix[1:] >= prefix[:-1]).all())
    require(operator, grows, "the handle was written by a dispatch")
    sources = sources_of(counts_of(prefix, num_ranks))
    is_same = triples.shape[0] >= sources.shape[0]
    is_same = is_same and torch.equal(triples[: sources.shape[0], 0], sources)
    require(operator, is_same, "the parts of the handle are of one dispatch")


def rows_then_undefined(rows: Tensor, num_rows: int) -> Tensor:
    """Pad rows [N, ...] to [num_rows, ...] with undefined memory."""
    padded = undefined([num_rows, *rows.shape[1:]], rows.dtype)
    padded[: rows.shape[0]] = rows
    return padded


def _counts(group: dist.ProcessGroup, per_expert: Tensor) -> Tensor:
    """Return the rows received for each expert of this rank from each source, int64 [L, W]."""
    everywhere = gather(group, per_expert)
    num_local = per_expert.shape[0] // group.size()
    return everywhere[:, group.rank() * num_local :][:, :num_local].T.contiguous()


def _order(counts: Tensor) -> Tensor:
    """Return the arrival positions, by (source, expert), of rows by (expert, source)."""
    num_local, num_ranks = counts.shape
    experts = torch.arange(num_local).repeat(num_ranks).repeat_interleave(counts.T.flatten())
    return experts.argsort(stable=True)
