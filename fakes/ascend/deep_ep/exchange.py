"""Move rows from tokens to experts and back, over ranks that are processes on CPUs.

One row travels for each (token, k) whose id is no -1. Those that a rank receives lie by (local
expert, source rank, token), which is part of the contract: GEMMs read them as they lie.

Ranks agree before anything is sent: if one refuses its arguments, or they differ where they may
not, all raise. On the device only the one rank does, and the others wait for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fakes.ascend.deep_ep.transport import exchange, gather, pack, unpack
from fakes.ascend.limits import require
from fakes.ascend.undefined import undefined

# Numbers that agree() compares at most.
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
        """int32 [L * W]: rows up to and with each (expert, source), source by source."""
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
    """Ids that the kernels can follow; with others the device writes where it should not.

    Raises:
        RuntimeError: one is not below num_experts, -1 where it means nothing, or twice in a row.
    """
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
    # Ranks that are in different calls are told apart by the name.
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
    """Rows [P, H] and scales [P] of the pairs to the ranks of their experts; collective."""
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
    """Rows [N, H] home, and the sum over k, in float32, of row times weight; collective.

    Args:
        rows: those that send() gave, processed.
        counts: [L, W], of the dispatch, as the handle tells.
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
    """int32 [N]: the source rank of each row that lies as counts [L, W] say."""
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
    """int64 [L, W]: what this rank receives for each of its experts from each source."""
    everywhere = gather(group, per_expert)
    num_local = per_expert.shape[0] // group.size()
    return everywhere[:, group.rank() * num_local :][:, :num_local].T.contiguous()


def _order(counts: Tensor) -> Tensor:
    """Places of rows as they arrive, by (source, expert), in the order (expert, source)."""
    num_local, num_ranks = counts.shape
    experts = torch.arange(num_local).repeat(num_ranks).repeat_interleave(counts.T.flatten())
    return experts.argsort(stable=True)
