"""Check the calls of V2, so that every rank hears of a dispatch that cannot be.

A fault that leaves the sizes of rows known is told to the other ranks, for this one takes part
without tokens. Others are raised before anything is sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.errors import CapacityError, ConfigError, EPError, HandleError, ShapeError
from epcomm.integrations.deep_ep.normal import Rows, RowWay, scale_block
from epcomm.integrations.deep_ep.v2.exchange import DispatchRequest
from epcomm.integrations.deep_ep.v2.handle import EPHandle

_SCALE_BYTES = 4


def check_sizes(rows: Rows, topk_idx: object, num_experts: int | None, num_ranks: int) -> int:
    """Refuse a dispatch of which no rank could say how large its rows are; return K.

    Raises:
        ShapeError, ConfigError: it has no such sizes.
    """
    if not isinstance(topk_idx, Tensor) or topk_idx.dim() != 2 or topk_idx.shape[1] == 0:
        found = list(topk_idx.shape) if isinstance(topk_idx, Tensor) else topk_idx
        raise ShapeError(f"dispatch: topk_idx is {found}, expected [T, K]; or pass a handle")
    if rows.x.dim() != 2:
        raise ShapeError(f"dispatch: x is {list(rows.x.shape)}, expected [T, H]; reshape it")
    wanted = torch.bfloat16 if rows.scales is None else torch.float8_e4m3fn
    if rows.x.dtype != wanted:
        raise ShapeError(
            f"dispatch: x is {rows.x.dtype}, expected bfloat16, or float8_e4m3fn with scales as "
            "(x, scales); cast it"
        )
    scales = rows.scales
    if scales is not None and (scales.dim() != 2 or scales.element_size() != _SCALE_BYTES):
        raise ShapeError(
            f"dispatch: scales are {list(scales.shape)} {scales.dtype}, expected [T, S] of four "
            "bytes; pack four UE8M0 exponents to an int32"
        )
    if scales is not None and scale_block(rows.x.shape[1], scales.shape[1]) is None:
        raise ShapeError(
            f"dispatch: x has {scales.shape[1]} scales for {rows.x.shape[1]} columns, expected "
            "blocks of one length; pass a scale for each 128 columns"
        )
    if not num_experts or num_experts % num_ranks:
        raise ConfigError(
            f"dispatch: num_experts is {num_experts}, expected a multiple of {num_ranks} ranks; "
            "pass the experts of all ranks"
        )
    return topk_idx.shape[1]


def fault_of(request: DispatchRequest, num_ranks: int, where: str) -> EPError | None:
    """Return why this rank must take part without its tokens, None where it need not."""
    x, scales, stats = request.rows.x, request.rows.scales, request.recv_stats
    topk_idx, weights = request.topk_idx, request.topk_weights
    num_tokens, num_local = x.shape[0], request.num_experts // num_ranks
    if num_tokens > request.max_tokens:
        return CapacityError(
            f"dispatch: x has {num_tokens} tokens, expected at most num_max_tokens_per_rank = "
            f"{request.max_tokens} ({where}); make it larger on all ranks"
        )
    if scales is not None and scales.shape[0] != num_tokens:
        return ShapeError(
            f"dispatch: scales have {scales.shape[0]} rows, expected the {num_tokens} of x "
            f"({where}); pass the scales of x"
        )
    if topk_idx.shape[0] != num_tokens or topk_idx.dtype != torch.int64:
        return ShapeError(
            f"dispatch: topk_idx is {list(topk_idx.shape)} {topk_idx.dtype}, expected "
            f"{num_tokens} rows of torch.int64 ({where}); call topk_idx.long()"
        )
    if weights is not None and (weights.shape != topk_idx.shape or weights.dtype != torch.float32):
        return ShapeError(
            f"dispatch: topk_weights is {list(weights.shape)} {weights.dtype}, expected "
            f"{list(topk_idx.shape)} torch.float32 ({where}); call topk_weights.float()"
        )
    if stats is not None and (stats.shape != (num_local,) or stats.dtype != torch.int32):
        return ShapeError(
            f"dispatch: cumulative_local_expert_recv_stats is {list(stats.shape)} {stats.dtype}, "
            f"expected [{num_local}] torch.int32 ({where}); pass one count for each local expert"
        )
    return None


def check_handle(
    handle: EPHandle, given: dict[str, object], forbidden: dict[str, object], where: str
) -> None:
    """Refuse a dispatch along a handle that asks for something else than the handle has.

    Args:
        handle: of the earlier dispatch.
        given: arguments by name, which are None or as the handle has them.
        forbidden: arguments by name, which are None or False.
        where: the place of this rank.

    Raises:
        HandleError: they differ.
    """
    for name, value in given.items():
        kept = getattr(handle, name)
        if value is not None and value != kept:
            raise HandleError(
                f"dispatch: {name} is {value}, expected {kept} as in the dispatch that made the "
                f"handle ({where}); pass the same"
            )
    for name, value in forbidden.items():
        if value is not None and value is not False:
            raise HandleError(
                f"dispatch: {name} came with a handle, which has routes of its own and waits for "
                f"no counts ({where}); leave it out"
            )


def check_along(rows: Rows, way: RowWay, where: str) -> None:
    """Refuse rows that are not those of the tokens of a handle.

    Raises:
        ShapeError: there are more or fewer, or they are on another device, or too wide.
    """
    num_tokens = way.num_tokens
    if rows.x.dim() != 2 or rows.x.shape[0] != num_tokens:
        raise ShapeError(
            f"dispatch: x is {list(rows.x.shape)}, expected {num_tokens} rows, one for each token "
            f"of the handle ({where}); pass rows of the same tokens"
        )
    fault = way.fault(rows)
    if rows.x.device != way.device:
        fault = f"x is on {rows.x.device}, expected {way.device}"
    if fault is not None:
        raise ShapeError(f"dispatch: {fault} ({where}); convert it with .to()")


def check_combine(
    x: Tensor,
    handle: EPHandle,
    weights: Tensor | None,
    biases: tuple[Tensor, ...],
    where: str,
) -> None:
    """Refuse a combine before anything is sent.

    Raises:
        ShapeError: x, weights or biases are not what the handle asks for.
    """
    num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
    if x.dim() != 2 or x.shape[0] != num_rows or x.dtype != torch.bfloat16:
        raise ShapeError(
            f"combine: x is {list(x.shape)} {x.dtype}, expected {num_rows} rows of torch.bfloat16, "
            f"as many as dispatch returned ({where}); pass a result for each of them"
        )
    if weights is not None:
        if handle.do_expand:
            raise ShapeError(
                "combine: topk_weights came with a handle of do_expand=True, whose rows have one "
                f"weight each ({where}); multiply by it before combine"
            )
        shape = (num_rows, handle.topk_idx.shape[1])
        if weights.shape != shape or weights.dtype != torch.float32:
            raise ShapeError(
                f"combine: topk_weights is {list(weights.shape)} {weights.dtype}, expected "
                f"{list(shape)} torch.float32 ({where}); call topk_weights.float()"
            )
    for bias in biases:
        shape = (handle.topk_idx.shape[0], x.shape[1])
        if bias.shape != shape or bias.dtype != x.dtype:
            raise ShapeError(
                f"combine: bias is {list(bias.shape)} {bias.dtype}, expected {list(shape)} "
                f"{x.dtype} ({where}); pass one row for each token"
            )
