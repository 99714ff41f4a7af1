"""Add to normal.py what V1 alone has: dispatch without ids, and rows that nobody sent."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from epcomm.errors import CapacityError
from epcomm.integrations.deep_ep.normal import Received, Rows, Sizes, dispatch_rows, spec_of
from epcomm.integrations.deep_ep.ranks import Options, Ranks
from epcomm.integrations.deep_ep.v1.checks import rows_fault
from epcomm.spec import BufferSpec


def dispatch_v1(
    ranks: Ranks,
    rows: Rows,
    topk: tuple[Tensor | None, Tensor | None],
    is_in_rank: Tensor,
    per_expert: Tensor,
    *,
    num_sms: int | None,
    num_worst_tokens: int = 0,
) -> Received:
    """Dispatch rows [T, H] by topk_idx, or by is_in_rank [T, W] where there are no ids.

    per_expert: [E], int32, tokens of this rank for each expert.   num_sms: see Sizes.
    num_worst_tokens: see is_static(); where it is, T is at most as much.

    Raises:
        CapacityError: some rank received more than num_worst_tokens rows; on every rank. With
            static sizes on a GPU sums are NaN instead, on every rank.
    """
    (ids, weights), sizes = topk, _sizes(num_sms)
    options = _options(num_worst_tokens, has_ids=ids is not None)
    if is_static(ranks, ids, num_worst_tokens):
        assert ids is not None, "just checked"
        assert weights is not None, "ids have weights"
        sizes = _sizes(num_sms, num_worst_tokens)
        received = dispatch_rows(
            ranks, rows, ids.long(), weights, per_expert.shape[0], sizes=sizes, options=options
        )
        if ranks.reads_faults:
            received.way.buffer.check()
        return received
    received = _dispatch_exactly(ranks, rows, topk, is_in_rank, per_expert, (sizes, options))
    return _with_worst_rows(ranks, received, num_worst_tokens)


def is_static(ranks: Ranks, topk_ids: Tensor | None, num_worst_tokens: int) -> bool:
    """Tell whether a dispatch has static sizes: num_worst_tokens rows, and no host sync.

    Without ids V1 has no such dispatch.
    """
    return num_worst_tokens > 0 and topk_ids is not None and ranks.has_static_sizes


def shape_of(
    ranks: Ranks,
    rows: Rows,
    topk_ids: Tensor | None,
    per_expert: Tensor | None,
    *,
    num_sms: int | None,
    num_worst_tokens: int,
) -> BufferSpec | None:
    """Return the shape of a call that cannot be; None where its tensors do not tell. Local.

    num_sms, num_worst_tokens: as of dispatch_v1().
    """
    if rows_fault(rows, ranks.device) is not None:
        return None
    top_k = num_experts = ranks.size
    if topk_ids is not None:
        if not isinstance(topk_ids, Tensor) or not isinstance(per_expert, Tensor):
            return None
        if (topk_ids.dim(), per_expert.dim()) != (2, 1):
            return None
        top_k, num_experts = topk_ids.shape[1], per_expert.shape[0]
    if num_experts < 1 or num_experts % ranks.size:
        return None
    most = num_worst_tokens if is_static(ranks, topk_ids, num_worst_tokens) else None
    return spec_of(rows, top_k, num_experts, ranks.size, _sizes(num_sms, most))


def _dispatch_exactly(
    ranks: Ranks,
    rows: Rows,
    topk: tuple[Tensor | None, Tensor | None],
    is_in_rank: Tensor,
    per_expert: Tensor,
    asked: tuple[Sizes, Options],
) -> Received:
    (ids, weights), (sizes, options) = topk, asked
    if ids is not None and weights is not None:
        num_experts = per_expert.shape[0]
        ids = ids if ids.dtype is torch.int64 else ids.long()
        return dispatch_rows(ranks, rows, ids, weights, num_experts, sizes=sizes, options=options)
    # One expert a rank: a token goes to those of the ranks that get it.
    everyone = torch.arange(ranks.size, device=is_in_rank.device)
    ids = torch.where(is_in_rank, everyone, -1)
    weights = torch.ones_like(ids, dtype=torch.float32)
    received = dispatch_rows(ranks, rows, ids, weights, ranks.size, sizes=sizes, options=options)
    return replace(received, num_tokens_per_expert=ranks.sum_of_counts(per_expert))


def _with_worst_rows(ranks: Ranks, received: Received, num_worst_tokens: int) -> Received:
    """Lengthen what came to num_worst_tokens rows, unless that is 0.

    Collective: with num_worst_tokens.
    Raises:
        CapacityError: some rank received more; on every rank.
    """
    if not num_worst_tokens:
        return received
    most = ranks.largest(received.rows.x.shape[0])
    if most > num_worst_tokens:
        raise CapacityError(
            f"dispatch: some rank received {most} rows, expected at most num_worst_tokens = "
            f"{num_worst_tokens} ({ranks.where}); pass as many as all ranks can send to one"
        )

    ids, weights = (
        _lengthened(each, num_worst_tokens) for each in (received.topk_ids, received.topk_weights)
    )
    ids[received.topk_ids.shape[0] :] = -1
    rows = with_length(received.rows, num_worst_tokens)
    return replace(received, rows=rows, topk_ids=ids, topk_weights=weights)


def with_length(rows: Rows, length: int) -> Rows:
    """Return rows with undefined ones behind them, as many as a handle says. Local."""
    if rows.x.shape[0] == length:
        return rows
    scales = rows.scales
    return Rows(
        x=_lengthened(rows.x, length),
        scales=None if scales is None else _lengthened(scales, length),
    )


def _lengthened(tensor: Tensor, length: int) -> Tensor:
    out = tensor.new_empty(length, tensor.shape[1])
    out[: tensor.shape[0]] = tensor
    return out


@lru_cache(maxsize=64)
def _sizes(num_sms: int | None, max_tokens: int | None = None) -> Sizes:
    return Sizes(num_sms=num_sms, max_tokens=max_tokens)


@lru_cache(maxsize=64)
def _options(num_worst_tokens: int, *, has_ids: bool) -> Options:
    return Options(num_worst_tokens=num_worst_tokens, has_topk_weights=has_ids)
