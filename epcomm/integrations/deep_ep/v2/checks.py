"""Check the calls of V2, so that every rank learns of a call that cannot be made.

A dispatch whose fault leaves the sizes of rows known (fault_of) takes part without tokens. Other
faults are raised here, and the caller refuses the call (Ranks.refuse, ElasticCalls.refuse_along).
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral

import torch
from torch import Tensor

from epcomm.errors import CapacityError, ConfigError, EPError, HandleError, ShapeError
from epcomm.integrations.deep_ep.checks import Check
from epcomm.integrations.deep_ep.events import EventHandle
from epcomm.integrations.deep_ep.normal import Rows, scale_block
from epcomm.integrations.deep_ep.ranks import Ranks
from epcomm.integrations.deep_ep.v2.exchange import DispatchRequest
from epcomm.integrations.deep_ep.v2.handle import EPHandle
from epcomm.types import is_size

_SCALE_BYTES = 4
_MATRIX = 2
_MOST_BIASES = 2


def rows_of(x: object, where: str) -> Rows:
    """Return the rows that dispatch was given as x, of any shape and dtype.

    Raises:
        ShapeError: x is neither a tensor nor two of them.
    """
    if isinstance(x, Tensor):
        return Rows(x=x)
    if isinstance(x, tuple) and len(x) == 2 and all(isinstance(each, Tensor) for each in x):
        return Rows.of(x)
    found = type(x).__name__
    if isinstance(x, tuple):
        found = f"a tuple of {', '.join(type(each).__name__ for each in x)}"
    raise ShapeError(
        f"dispatch: x is {found}, expected a tensor [T, H] or (tensor, scales) ({where}); pass "
        "one row for each token"
    )


def check_rows(rows: Rows, ranks: Ranks) -> None:
    """Refuse rows of which no rank could say how wide they are.

    Raises:
        ShapeError: they are neither [T, H] bfloat16 nor [T, H] float8_e4m3fn with [T, S] of 4 B.
    """
    x, scales = rows.x, rows.scales
    dtype = torch.bfloat16 if scales is None else torch.float8_e4m3fn
    _check(ranks, "dispatch", "x", x, (None, None), dtype)
    if scales is None:
        return
    if scales.element_size() != _SCALE_BYTES:
        raise ShapeError(
            f"dispatch: scales are {list(scales.shape)} {scales.dtype}, expected [T, S] of four "
            f"bytes ({ranks.where}); pack four UE8M0 exponents to an int32"
        )
    _check(ranks, "dispatch", "scales", scales, (None, None), scales.dtype)
    if scale_block(x.shape[1], scales.shape[1]) is None:
        raise ShapeError(
            f"dispatch: x has {scales.shape[1]} scales for {x.shape[1]} columns, expected "
            f"blocks of one length ({ranks.where}); pass a scale for each 128 columns"
        )


def check_sizes(
    topk_idx: object, num_experts: object, sizes: Mapping[str, object], ranks: Ranks
) -> int:
    """Refuse a dispatch of which no rank could say how large its rows are; return K.

    sizes: arguments by name, which are positive integers.

    Raises:
        ShapeError, ConfigError: it has no such sizes.
    """
    if not isinstance(topk_idx, Tensor) or topk_idx.dim() != _MATRIX or topk_idx.shape[1] == 0:
        is_tensor = isinstance(topk_idx, Tensor)
        found = list(topk_idx.shape) if is_tensor else type(topk_idx).__name__
        raise ShapeError(
            f"dispatch: topk_idx is {found}, expected [T, K] ({ranks.where}); or pass a handle"
        )
    _check(ranks, "dispatch", "topk_idx", topk_idx, (None, None), topk_idx.dtype)
    if not isinstance(num_experts, int) or num_experts < 1 or num_experts % ranks.size:
        raise ConfigError(
            f"dispatch: num_experts is {num_experts}, expected a multiple of {ranks.size} ranks "
            f"({ranks.where}); pass the number of experts of all ranks"
        )
    for name, size in sizes.items():
        if not is_size(size):
            raise ConfigError(
                f"dispatch: {name} is {size}, expected a positive integer ({ranks.where}); pass "
                "the same on all ranks"
            )
    return topk_idx.shape[1]


def check_options(
    function: str, numbers: Mapping[str, object], events: Mapping[str, object], ranks: Ranks
) -> None:
    """Refuse options of any call.

    numbers: arguments by name, which are integers of at least 0.
    events: arguments by name, which are events or None.

    Raises:
        ConfigError: they are something else.
    """
    for name, number in numbers.items():
        if not isinstance(number, Integral) or number < 0:
            raise ConfigError(
                f"{function}: {name} is {number!r}, expected an integer of at least 0 "
                f"({ranks.where}); pass 0 for the default"
            )
    for name, event in events.items():
        if event is not None and not isinstance(event, EventHandle):
            raise ConfigError(
                f"{function}: {name} is {type(event).__name__}, expected EventHandle or None "
                f"({ranks.where}); pass ElasticBuffer.capture()"
            )


def fault_of(request: DispatchRequest, ranks: Ranks) -> EPError | None:
    """Return why this rank must take part without its tokens, None where it need not."""
    x, scales, stats = request.rows.x, request.rows.scales, request.recv_stats
    topk_idx, weights = request.topk_idx, request.topk_weights
    num_tokens, where = x.shape[0], ranks.where
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
    if ranks.reads_faults and topk_idx.numel():
        lowest, highest = (int(each) for each in topk_idx.aminmax())
        if lowest < -1 or highest >= request.num_experts:
            return ShapeError(
                f"dispatch: topk_idx holds {lowest if lowest < -1 else highest}, expected -1 or 0 "
                f"to {request.num_experts - 1} ({where}); pass ids of num_experts experts"
            )
    try:
        if weights is not None:
            shape = tuple(topk_idx.shape)
            _check(ranks, "dispatch", "topk_weights", weights, shape, torch.float32)
        if stats is not None:
            name, shape = "cumulative_local_expert_recv_stats", (request.num_experts // ranks.size,)
            _check(ranks, "dispatch", name, stats, shape, torch.int32)
    except ShapeError as error:
        return error
    return None


def check_handle(
    handle: object,
    given: Mapping[str, object],
    forbidden: Mapping[str, object],
    ranks: Ranks,
    *,
    do_expand: bool,
) -> EPHandle:
    """Refuse a dispatch along a handle that asks for something else than the handle has.

    Args:
        handle: of the earlier dispatch.
        given: arguments by name, which are None or as the handle has them.
        forbidden: arguments by name, which are None or False.
        ranks: of the buffer.
        do_expand: whether the rows are to be returned by expert.

    Raises:
        HandleError: they differ, or the handle is of no dispatch of this buffer.
    """
    handle = known_handle("dispatch", handle, ranks)
    for name, value in given.items():
        kept = getattr(handle, name)
        if value is not None and value != kept:
            raise HandleError(
                f"dispatch: {name} is {value}, expected {kept} as in the dispatch that made the "
                f"handle ({ranks.where}); pass the same"
            )
    if do_expand and not handle.do_expand:
        raise HandleError(
            "dispatch: do_expand is True, expected False as in the dispatch that made the handle "
            f"({ranks.where}); pass a handle of a dispatch with do_expand=True"
        )
    for name, value in forbidden.items():
        if value is not None and value is not False:
            raise HandleError(
                f"dispatch: {name} came with a handle, expected {name}=None: the handle has routes "
                f"and waits for no counts ({ranks.where}); leave it out"
            )
    return handle


def known_handle(function: str, handle: object, ranks: Ranks) -> EPHandle:
    """Return a handle of this drop-in.

    Raises:
        HandleError: it is something else.
    """
    if not isinstance(handle, EPHandle):
        raise HandleError(
            f"{function}: handle is {type(handle).__name__}, expected the EPHandle that dispatch() "
            f"returned ({ranks.where}); pass it as it is"
        )
    return handle


def check_along(rows: Rows, weights: object, handle: EPHandle, ranks: Ranks) -> None:
    """Refuse rows and weights that are not those of the tokens of a handle.

    Raises:
        ShapeError: there are more or fewer, or they are too wide.
    """
    way = handle.arrived.way
    _check(ranks, "dispatch", "x", rows.x, (way.num_tokens, way.spec.hidden_size), rows.x.dtype)
    if rows.scales is not None:
        shape = (way.num_tokens, None)
        _check(ranks, "dispatch", "scales", rows.scales, shape, rows.scales.dtype)
    fault = way.fault(rows)
    if fault is not None:
        raise ShapeError(f"dispatch: {fault} ({ranks.where}); convert it with .to()")
    if weights is not None:
        shape = (way.num_tokens, way.spec.top_k)
        _check(ranks, "dispatch", "topk_weights", weights, shape, torch.float32)


def check_combine(
    x: object,
    handle: EPHandle,
    weights: object,
    biases: tuple[object, ...],
    ranks: Ranks,
) -> None:
    """Refuse a combine before anything is sent.

    Raises:
        ShapeError: x, weights, biases or recv_src_metadata are not what the handle asks for.
    """
    hidden_size, top_k = handle.arrived.way.spec.hidden_size, handle.topk_idx.shape[1]
    num_rows: int | None = handle.num_recv_tokens
    if handle.do_expand:
        # A program that names the rows by recv_src_metadata may have any number of them.
        num_rows = handle.num_expanded_tokens if handle.known_metadata is None else None
    _check(ranks, "combine", "x", x, (num_rows, hidden_size), torch.bfloat16)
    assert isinstance(x, Tensor), "just checked"
    if num_rows is None:
        _check_metadata(handle, x.shape[0], ranks)
    if weights is not None:
        shape = (x.shape[0],) if handle.do_expand else (x.shape[0], top_k)
        _check(ranks, "combine", "topk_weights", weights, shape, torch.float32)
    if len(biases) > _MOST_BIASES:
        raise ShapeError(
            f"combine: bias is a tuple of {len(biases)}, expected two tensors at most "
            f"({ranks.where}); add them up"
        )
    for bias in biases:
        shape = (handle.topk_idx.shape[0], hidden_size)
        _check(ranks, "combine", "bias", bias, shape, torch.bfloat16)


def _check_metadata(handle: EPHandle, num_rows: int, ranks: Ranks) -> None:
    """Refuse recv_src_metadata that does not name rows of an x with `num_rows` rows.

    Raises:
        ShapeError: it has another shape, or, where hosts read faults, names rows that x lacks.
    """
    table, most = handle.known_metadata, handle.num_recv_tokens
    lines = min(table.shape[0], most) if isinstance(table, Tensor) and table.dim() else most
    shape = (lines, handle.topk_idx.shape[1] + 2)
    _check(ranks, "combine", "handle.recv_src_metadata", table, shape, torch.int32)
    named = handle.named_slots()
    if named is not None and ranks.reads_faults and named.numel():
        last = int(named.max())
        if last >= num_rows:
            raise ShapeError(
                f"combine: x has {num_rows} rows, expected at least {last + 1}, as "
                f"handle.recv_src_metadata names row {last} ({ranks.where}); pass a result for "
                "each row that it names"
            )


def _check(
    ranks: Ranks,
    function: str,
    name: str,
    tensor: object,
    shape: tuple[int | None, ...],
    dtype: torch.dtype,
) -> None:
    """Refuse what is no tensor of this shape (None for any size) and dtype on this device.

    Raises:
        ShapeError: it is none.
    """
    Check(function, ranks).tensor(name, tensor, shape, dtype)
