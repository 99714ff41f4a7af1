"""Local checks of the arguments of a call, before any communication."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from epcomm import records
from epcomm.errors import CapacityError, EPError, HandleError, ShapeError
from epcomm.ops.precision import FLOAT_DTYPES
from epcomm.quantization.scale_layout import SCALES_PER_WORD
from epcomm.spec import BufferSpec
from epcomm.types import ROW_MAJOR, Layout, RowsPer, WireFormat, WireTensor, data_of

# Whether the expert weights of a rank will receive gradients: one answer, or one for each name.
NeedGrad = bool | Mapping[str, bool]


@dataclass(frozen=True, kw_only=True)
class CallChecks:
    """Checks the arguments of calls that use one buffer. Host sync: none; only metadata is read.

    dtype: the dtype of the hidden states.
    where: this rank for messages, such as `rank 3 of 8`.
    backend_limit: BufferCaps.max_tokens_per_rank.
    """

    spec: BufferSpec
    dtype: torch.dtype
    device: torch.device
    where: str
    backend_limit: int | None = None

    def _is_plain(self, tensor: Tensor | WireTensor, dtype: torch.dtype) -> TypeGuard[Tensor]:
        """Return whether `tensor` is a plain strided tensor of this dtype on the device."""
        return (
            type(tensor) is Tensor
            and tensor.dtype is dtype
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.device == self.device
        )

    def find_call_error(
        self, hidden_states: Tensor | WireTensor, topk: records.TopKOutput
    ) -> EPError | None:
        """Return the first fault of a dispatch call, or None.

        Any floating dtype is accepted where a floating one is expected, because the caller casts.
        Quantised rows must have the dispatch format of the buffer.
        """
        if self._is_usual(hidden_states, topk):
            return None
        if not isinstance(topk, records.TopKOutput):
            return ShapeError(
                f"dispatch: topk is {_kind_of(topk)}, expected a TopKOutput ({self.where}); pass "
                "TopKOutput(topk_ids=..., topk_weights=...)"
            )
        num_tokens = num_tokens_of(hidden_states)
        # If x is not 2-D, its first dimension is not T.
        data = data_of(hidden_states)
        is_flat = isinstance(data, Tensor) and data.dim() == 2
        tokens = [num_tokens if is_flat else "T", self.spec.hidden_size]
        pair = [num_tokens, self.spec.top_k]
        expected = (
            ("hidden_states", hidden_states, tokens, self.dtype),
            ("topk_ids", topk.topk_ids, pair, torch.int64),
            ("topk_weights", topk.topk_weights, pair, torch.float32),
        )
        if self.spec.sums_at_source:
            expected += (("topk_groups", topk.topk_groups, pair, torch.int64),)
        for name, tensor, shape, wanted in expected:
            if isinstance(tensor, WireTensor):
                fault = self._row_mismatch(tensor, shape)
            else:
                fault = self._mismatch(name, tensor, shape, wanted)
            if fault is not None:
                return ShapeError(f"dispatch: {fault[0]} ({self.where}); {fault[1]}")
        limit = self.spec.max_tokens_per_rank
        if limit is not None and num_tokens > limit:
            return CapacityError(
                f"dispatch: hidden_states has {num_tokens} tokens, expected at most "
                f"max_tokens_per_rank = {limit} ({self.where}); raise the limit or split the batch"
            )
        if self.backend_limit is not None and num_tokens > self.backend_limit:
            return CapacityError(
                f"dispatch: hidden_states has {num_tokens} tokens, expected at most "
                f"{self.backend_limit}, the limit of the backend ({self.where}); split the batch"
            )
        return None

    def _is_usual(self, hidden_states: Tensor | WireTensor, topk: records.TopKOutput) -> bool:
        """Return whether a call has no fault and needs no cast, like most calls.

        A fast path: the rest of find_call_error() costs host time in decoding.
        """
        if type(topk) is not records.TopKOutput or not self._is_plain(hidden_states, self.dtype):
            return False
        ids, weights, shape = topk.topk_ids, topk.topk_weights, hidden_states.shape
        if not (self._is_plain(ids, torch.int64) and self._is_plain(weights, torch.float32)):
            return False
        if self.spec.sums_at_source:
            # The check of all tensors includes the groups.
            return False
        limit = self.spec.max_tokens_per_rank
        return (
            len(shape) == 2
            and shape[1] == self.spec.hidden_size
            and ids.shape == weights.shape == (shape[0], self.spec.top_k)
            and (limit is None or shape[0] <= limit)
            and (self.backend_limit is None or shape[0] <= self.backend_limit)
        )

    def find_combine_error(
        self, combine_input: records.CombineInput, owner: object, layout: Layout
    ) -> EPError | None:
        """Return the first fault of a combine call, or None: type, handle or rows.

        owner: the dispatcher that was called.   layout: the layout of its buffer.
        """
        expected = records.RowsCombineInput if layout is Layout.ROWS else records.MaskedCombineInput
        if not isinstance(combine_input, expected):
            return ShapeError(
                f"combine: the input is a {_kind_of(combine_input)}, expected {expected.__name__} "
                f"({self.where}); make it with combine_input() of the record that dispatch returned"
            )
        handle = combine_input.handle
        if not isinstance(handle, records.Handle):
            return HandleError(
                f"combine: the handle is {_kind_of(handle)}, expected a Handle ({self.where}); "
                "make the input with combine_input() of the record that dispatch returned"
            )
        if (error := handle.find_error(owner)) is not None:
            return error
        rows, slot_weights = combine_input.hidden_states, combine_input.slot_weights
        shape = self._rows_expected(combine_input)
        whole = [*shape, self.spec.hidden_size]
        if slot_weights is None or self._is_plain(slot_weights, torch.float32):
            # Fast path: one row per slot. The checks below take longer.
            is_of_slots = layout is Layout.MASKED or combine_input.rows_per is RowsPer.SLOT  # type: ignore[union-attr]
            is_fit = self._is_plain(rows, self.dtype) and rows.shape == (*whole,)
            if is_of_slots and is_fit and (slot_weights is None or slot_weights.shape == (*shape,)):
                return None
        if isinstance(combine_input, records.RowsCombineInput):
            rows_per = combine_input.rows_per
            if not isinstance(rows_per, RowsPer):
                return ShapeError(
                    f"combine: rows_per is {rows_per!r}, expected RowsPer.SLOT or RowsPer.ROW "
                    f"({self.where}); pass one of them"
                )
            use = "sums slots by group" if self.spec.sum_groups is not None else None
            use = use if slot_weights is None else "applies the weights of each slot"
            if rows_per is RowsPer.ROW and use is not None:
                return ShapeError(
                    f"combine: rows_per is ROW but combine {use} ({self.where}); pass one row per "
                    "slot"
                )
        fault = self._mismatch("hidden_states", rows, whole, self.dtype)
        if fault is None and slot_weights is not None:
            fault = self._mismatch("slot_weights", slot_weights, shape, torch.float32)
        if fault is None:
            return None
        return ShapeError(f"combine: {fault[0]} ({self.where}); {fault[1]}")

    def _rows_expected(self, combine_input: records.CombineInput) -> list[int]:
        """Return the expected shape of the expert results without H."""
        exchange_plan, num_local = combine_input.handle.exchange_plan, self.spec.num_local_experts
        if isinstance(combine_input, records.MaskedCombineInput):
            return [num_local, exchange_plan.num_rows // num_local]
        row_of_slot = exchange_plan.index.row_of_slot
        if row_of_slot is not None and combine_input.rows_per is RowsPer.SLOT:
            return [row_of_slot.shape[0]]
        return [exchange_plan.num_rows]

    def _mismatch(
        self, name: str, tensor: Tensor | None, shape: Sequence[int | str], dtype: torch.dtype
    ) -> tuple[str, str] | None:
        """Return what is wrong with a tensor, and the remedy; None if nothing is wrong.

        shape: the expected shape; "T" stands for an unknown length and never matches.
        """
        if not isinstance(tensor, Tensor):
            return (
                f"{name} is {_kind_of(tensor)}, expected a tensor {_shape_text(shape)}",
                "pass one",
            )
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
        if tensor.device != self.device:
            return (
                f"{name} is on {tensor.device}, expected {self.device}",
                f"call {name}.to({str(self.device)!r})",
            )
        return None

    def _row_mismatch(self, wire: WireTensor, shape: Sequence[int | str]) -> tuple[str, str] | None:
        """Return what is wrong with quantised rows, and the remedy; None if nothing is wrong."""
        wanted = self.spec.dispatch_format
        if wire.format != wanted:
            return (
                f"hidden_states are {_format_text(wire.format)}, expected {_format_text(wanted)}",
                "quantise them to the dispatch format of the plan, or pass them unquantised",
            )
        layout = wire.scale_layout or ROW_MAJOR
        assert isinstance(shape[1], int), "H is known"
        items = [shape[0], wanted.num_items(shape[1])]
        parts: list[tuple[str, Tensor | None, Sequence[int | str], torch.dtype]] = [
            ("data", wire.data, items, wanted.dtype.torch_dtype)
        ]
        if wanted.scale_dtype is not None:
            num_scales = wanted.num_scales(shape[1])
            if layout.packed:
                num_scales = -(-num_scales // SCALES_PER_WORD)
            dtype = torch.int32 if layout.packed else wanted.scale_dtype
            parts.append(("scales", wire.scales, [shape[0], num_scales], dtype))
        for name, tensor, size, dtype in parts:
            name = f"hidden_states.{name}"
            fault = self._mismatch(name, tensor, size, dtype)
            if fault is None and tensor is not None and tensor.dtype is not dtype:
                fault = f"{name} is {tensor.dtype}, expected {dtype}", "use the dtype of the format"
            if fault is not None:
                return fault
        return None


def needs_gradients(
    hidden_states: Tensor | WireTensor, topk: records.TopKOutput, experts_need_grad: NeedGrad
) -> bool:
    """Return whether a call in grad mode needs gradients; its arguments may be invalid."""
    if isinstance(experts_need_grad, Mapping):
        experts_need_grad = any(experts_need_grad.values())
    inputs = (hidden_states, getattr(topk, "topk_weights", None))
    return experts_need_grad or any(getattr(each, "requires_grad", False) for each in inputs)


def open_exchange_plan_of(combine_input: object, owner: object) -> records.ExchangePlan | None:
    """Return the exchange plan of a combine input, or None if its handle is invalid."""
    handle = getattr(combine_input, "handle", None)
    if isinstance(handle, records.Handle) and handle.find_error(owner) is None:
        return handle.exchange_plan
    return None


def unready_error(problem: Exception, where: str, *, function: str = "dispatch") -> EPError:
    """Return the error that reports `problem`, which occurred on a rank before it sent rows.

    An EPError is wrapped too: its class and fault word describe a call that may be of another layer
    or group.
    """
    return EPError(
        f"{function}: {type(problem).__name__} before any rows were sent ({where}): {problem}"
    )


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


def _format_text(wire_format: WireFormat) -> str:
    dtype = wire_format.scale_dtype
    return f"{wire_format}" if dtype is None else f"{wire_format} with scales of {dtype}"


def _shape_text(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
