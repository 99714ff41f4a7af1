"""Local checks of the arguments of a call, before any communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from epcomm.dispatchers.base import NeedGrad
from epcomm.errors import CapacityError, EPError, HandleError, ShapeError
from epcomm.ops.precision import FLOAT_DTYPES
from epcomm.quantization.scale_layout import SCALES_PER_WORD
from epcomm.records import (
    CombineInput,
    ExchangePlan,
    Handle,
    MaskedCombineInput,
    RowsCombineInput,
    TopKOutput,
)
from epcomm.spec import BufferSpec
from epcomm.types import ROW_MAJOR, Layout, RowsPer, WireFormat, WireTensor, data_of


def is_plain(
    tensor: Tensor | WireTensor, dtype: torch.dtype, device: torch.device
) -> TypeGuard[Tensor]:
    """Return whether `tensor` is a plain strided tensor of this dtype on this device."""
    return (
        type(tensor) is Tensor
        and tensor.dtype is dtype
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.device == device
    )


def find_call_error(
    hidden_states: Tensor | WireTensor,
    topk: TopKOutput,
    spec: BufferSpec,
    dtype: torch.dtype,
    device: torch.device,
    where: str,
    *,
    backend_limit: int | None = None,
) -> EPError | None:
    """Return the first fault of a dispatch call, or None. Host sync: none; only metadata is read.

    Any floating dtype is accepted where a floating one is expected, because the caller casts.
    Quantised rows must have the dispatch format of the buffer.

    where: this rank for the message, such as `rank 3 of 8`.
    backend_limit: BufferCaps.max_tokens_per_rank.
    """
    if _is_usual(hidden_states, topk, spec, dtype, device, backend_limit):
        return None
    if not isinstance(topk, TopKOutput):
        return ShapeError(
            f"dispatch: topk is {_kind_of(topk)}, expected a TopKOutput ({where}); pass "
            "TopKOutput(topk_ids=..., topk_weights=...)"
        )
    num_tokens = num_tokens_of(hidden_states)
    # If x is not 2-D, its first dimension is not T.
    data = data_of(hidden_states)
    is_flat = isinstance(data, Tensor) and data.dim() == 2
    tokens, pair = [num_tokens if is_flat else "T", spec.hidden_size], [num_tokens, spec.top_k]
    expected = (
        ("hidden_states", hidden_states, tokens, dtype),
        ("topk_ids", topk.topk_ids, pair, torch.int64),
        ("topk_weights", topk.topk_weights, pair, torch.float32),
    )
    for name, tensor, shape, wanted in expected:
        if isinstance(tensor, WireTensor):
            fault = _wire_mismatch(tensor, shape, spec.dispatch_format, device)
        else:
            fault = _mismatch(name, tensor, shape, wanted, device)
        if fault is not None:
            return ShapeError(f"dispatch: {fault[0]} ({where}); {fault[1]}")
    limit = spec.max_tokens_per_rank
    if limit is not None and num_tokens > limit:
        return CapacityError(
            f"dispatch: hidden_states has {num_tokens} tokens, expected at most "
            f"max_tokens_per_rank = {limit} ({where}); raise the limit or split the batch"
        )
    if backend_limit is not None and num_tokens > backend_limit:
        return CapacityError(
            f"dispatch: hidden_states has {num_tokens} tokens, expected at most {backend_limit}, "
            f"the limit of the backend ({where}); split the batch"
        )
    return None


def _is_usual(
    hidden_states: Tensor | WireTensor,
    topk: TopKOutput,
    spec: BufferSpec,
    dtype: torch.dtype,
    device: torch.device,
    backend_limit: int | None,
) -> bool:
    """Return whether a call has no fault and needs no cast, like most calls.

    A fast path: the rest of find_call_error() costs host time in decoding.
    """
    if type(topk) is not TopKOutput or not is_plain(hidden_states, dtype, device):
        return False
    ids, weights, shape = topk.topk_ids, topk.topk_weights, hidden_states.shape
    if not (is_plain(ids, torch.int64, device) and is_plain(weights, torch.float32, device)):
        return False
    limit = spec.max_tokens_per_rank
    return (
        len(shape) == 2
        and shape[1] == spec.hidden_size
        and ids.shape == weights.shape == (shape[0], spec.top_k)
        and (limit is None or shape[0] <= limit)
        and (backend_limit is None or shape[0] <= backend_limit)
    )


def find_combine_error(
    combine_input: CombineInput,
    owner: object,
    spec: BufferSpec,
    dtype: torch.dtype,
    device: torch.device,
    where: str,
    *,
    layout: Layout = Layout.ROWS,
) -> EPError | None:
    """Return the first fault of a combine call, or None: type, handle or rows. Host sync: none.

    owner: the dispatcher that was called.
    """
    expected = RowsCombineInput if layout is Layout.ROWS else MaskedCombineInput
    if not isinstance(combine_input, expected):
        return ShapeError(
            f"combine: the input is a {type(combine_input).__name__}, expected "
            f"{expected.__name__} ({where}); make it with combine_input() of the record that "
            "dispatch returned"
        )
    handle = combine_input.handle
    if not isinstance(handle, Handle):
        return HandleError(
            f"combine: the handle is {_kind_of(handle)}, expected a Handle ({where}); "
            "make the input with combine_input() of the record that dispatch returned"
        )
    try:
        handle.check(owner)
    except HandleError as error:
        return error
    rows, slot_weights = combine_input.hidden_states, combine_input.slot_weights
    shape = _rows_expected(combine_input, spec)
    if slot_weights is None or is_plain(slot_weights, torch.float32, device):
        # Fast path: one row per slot. The checks below take longer.
        is_of_slots = layout is Layout.MASKED or combine_input.rows_per is RowsPer.SLOT  # type: ignore[union-attr]
        is_fit = is_plain(rows, dtype, device) and rows.shape == (*shape, spec.hidden_size)
        if is_of_slots and is_fit and (slot_weights is None or slot_weights.shape == (*shape,)):
            return None
    if isinstance(combine_input, RowsCombineInput):
        rows_per = combine_input.rows_per
        if not isinstance(rows_per, RowsPer):
            return ShapeError(
                f"combine: rows_per is {rows_per!r}, expected RowsPer.SLOT or RowsPer.ROW "
                f"({where}); pass one of them"
            )
        if rows_per is RowsPer.ROW and slot_weights is not None:
            return ShapeError(
                "combine: rows_per is ROW but combine applies the weights of each slot "
                f"({where}); pass one row per slot"
            )
    fault = _mismatch("hidden_states", rows, [*shape, spec.hidden_size], dtype, device)
    if fault is None and slot_weights is not None:
        fault = _mismatch("slot_weights", slot_weights, shape, torch.float32, device)
    return None if fault is None else ShapeError(f"combine: {fault[0]} ({where}); {fault[1]}")


def needs_gradients(
    hidden_states: Tensor | WireTensor, topk: TopKOutput, experts_need_grad: NeedGrad
) -> bool:
    """Return whether a call in grad mode needs gradients; its arguments may be invalid."""
    if isinstance(experts_need_grad, Mapping):
        experts_need_grad = any(experts_need_grad.values())
    inputs = (hidden_states, getattr(topk, "topk_weights", None))
    return experts_need_grad or any(getattr(each, "requires_grad", False) for each in inputs)


def open_exchange_plan_of(combine_input: object, owner: object) -> ExchangePlan | None:
    """Return the exchange plan of a combine input, or None if its handle is invalid."""
    handle = getattr(combine_input, "handle", None)
    if not isinstance(handle, Handle):
        return None
    try:
        handle.check(owner)
    except HandleError:
        return None
    return handle.exchange_plan


def unready_error(problem: Exception, where: str, *, function: str = "dispatch") -> EPError:
    """Return the error that reports `problem`, which a rank met before it could send rows.

    An EPError is wrapped too: its class and fault word describe a call that may be of another layer
    or group.
    """
    return EPError(
        f"{function}: {type(problem).__name__} before any rows were sent ({where}): {problem}"
    )


def _rows_expected(combine_input: CombineInput, spec: BufferSpec) -> list[int]:
    """Return the expected shape of the expert results without H."""
    exchange_plan = combine_input.handle.exchange_plan
    if isinstance(combine_input, MaskedCombineInput):
        return [spec.num_local_experts, exchange_plan.num_rows // spec.num_local_experts]
    row_of_slot = exchange_plan.index.row_of_slot
    is_of_slots = combine_input.rows_per is RowsPer.SLOT and row_of_slot is not None
    return [
        row_of_slot.shape[0] if is_of_slots and row_of_slot is not None else exchange_plan.num_rows
    ]


def num_tokens_of(hidden_states: Tensor | WireTensor) -> int:
    """Return T, or 0 if the argument is not a plain tensor with rows."""
    hidden_states = data_of(hidden_states)
    is_plain = isinstance(hidden_states, Tensor) and _unusual(hidden_states) is None
    return hidden_states.shape[0] if is_plain and hidden_states.dim() > 0 else 0


def _kind_of(value: object) -> str:
    return type(value).__name__


def _unusual(tensor: Tensor) -> tuple[str, str] | None:
    """Return the kind of a tensor that is not plain and strided, and the remedy; else None."""
    if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested:
        return None
    if tensor.is_nested:
        return "nested", "to_padded_tensor(0)"
    if tensor.layout is not torch.strided:
        return f"{tensor.layout}", "to_dense()"
    if hasattr(tensor, "to_local"):
        return f"a {_kind_of(tensor)}", "to_local()"
    return None


def _mismatch(
    name: str,
    tensor: Tensor | None,
    shape: Sequence[int | str],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[str, str] | None:
    """Return what is wrong with a tensor, and the remedy; None if nothing is wrong.

    shape: the expected shape; "T" stands for an unknown length and never matches.
    """
    if not isinstance(tensor, Tensor):
        return f"{name} is {_kind_of(tensor)}, expected a tensor {_shape_text(shape)}", "pass one"
    unusual = _unusual(tensor)
    if unusual is not None:
        kind, remedy = unusual
        return f"{name} is {kind}, expected a plain strided tensor", f"call {name}.{remedy}"
    if list(tensor.shape) != shape:
        remedy = "pass tensors of one batch"
        if shape[0] == "T":
            remedy = f"flatten it by reshape(-1, {shape[-1]})"
        return f"{name} is {list(tensor.shape)}, expected {_shape_text(shape)}", remedy
    if tensor.dtype != dtype and not {tensor.dtype, dtype} <= FLOAT_DTYPES:
        return f"{name} is {tensor.dtype}, expected {dtype}", f"call {name}.to({dtype})"
    if tensor.device != device:
        return (
            f"{name} is on {tensor.device}, expected {device}",
            f"call {name}.to({str(device)!r})",
        )
    return None


def _wire_mismatch(
    wire: WireTensor, shape: Sequence[int | str], wanted: WireFormat, device: torch.device
) -> tuple[str, str] | None:
    """Return what is wrong with quantised rows, and the remedy; None if nothing is wrong."""
    if wire.format != wanted:
        return (
            f"hidden_states are {_format_text(wire.format)}, expected {_format_text(wanted)}",
            "quantise them to the dispatch format of the plan, or pass them unquantised",
        )
    layout = wire.scale_layout or ROW_MAJOR
    parts: list[tuple[str, Tensor | None, Sequence[int | str], torch.dtype]] = [
        ("data", wire.data, shape, wanted.dtype.torch_dtype)
    ]
    if wanted.scale_dtype is not None:
        assert isinstance(shape[1], int), "H is known"
        num_scales = wanted.num_scales(shape[1])
        if layout.packed:
            num_scales = -(-num_scales // SCALES_PER_WORD)
        dtype = torch.int32 if layout.packed else wanted.scale_dtype
        parts.append(("scales", wire.scales, [shape[0], num_scales], dtype))
    for name, tensor, size, dtype in parts:
        name = f"hidden_states.{name}"
        fault = _mismatch(name, tensor, size, dtype, device)
        if fault is None and tensor is not None and tensor.dtype is not dtype:
            fault = f"{name} is {tensor.dtype}, expected {dtype}", "use the dtype of the format"
        if fault is not None:
            return fault
    return None


def _format_text(wire_format: WireFormat) -> str:
    dtype = wire_format.scale_dtype
    return f"{wire_format}" if dtype is None else f"{wire_format} with scales of {dtype}"


def _shape_text(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
