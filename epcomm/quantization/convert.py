"""Convert rows to a wire format and back, by plain torch or by kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from epcomm.errors import ConfigError, ShapeError
from epcomm.platforms.cuda import importing_triton
from epcomm.quantization.floats import restore, write_floats
from epcomm.quantization.int8 import INT8_PER_TOKEN, write_int8
from epcomm.quantization.scale_layout import row_major
from epcomm.types import (
    QUANTIZABLE_DTYPES,
    ROW_DTYPES,
    Int8Profile,
    WireDtype,
    WireFormat,
    WireTensor,
)

# These dtypes are exact in float32, in which all arithmetic is done.
_INPUT_DTYPES = frozenset(dtype.torch_dtype for dtype in QUANTIZABLE_DTYPES)


class Quantizer(Protocol):
    """The signature of quantize(); all implementations return the same bits."""

    def __call__(
        self,
        hidden_states: Tensor,
        wire_format: WireFormat,
        *,
        profile: Int8Profile = Int8Profile.RINT127,
        out: WireTensor | None = None,
    ) -> WireTensor: ...


@dataclass(frozen=True, kw_only=True)
class Codecs:
    """Functions that write codes and scales into a checked wire tensor, and that restore one."""

    floats: Callable[[Tensor, WireTensor], None]
    int8: Callable[[Tensor, WireTensor, Int8Profile], None]
    restore: Callable[[WireTensor, torch.dtype], Tensor]


_PLAIN = Codecs(floats=write_floats, int8=write_int8, restore=restore)


def quantize(
    hidden_states: Tensor,
    wire_format: WireFormat,
    *,
    profile: Int8Profile = Int8Profile.RINT127,
    out: WireTensor | None = None,
    codecs: Codecs = _PLAIN,
) -> WireTensor:
    """Convert hidden states to a wire format.

    Args:
        hidden_states: [..., T, H], bfloat16, float16 or float32, any strides.
        wire_format: the format of the result; an unquantised format casts.
        profile: the arithmetic of INT8, ignored otherwise.
        out: memory for the result, with rows of any stride; None: new tensors.
        codecs: plain torch, or the kernels of quantizer_for().

    Returns:
        Data and row-major scales; scale_layout.arrange_scales() lays scales out for a GEMM.

    Host sync: none.   Graph capture: yes.   Deterministic: yes.
    Lifetime: an unquantised result may share memory with hidden_states.
    Raises:
        ConfigError: a format that the arithmetic does not know.
        ShapeError: hidden_states or `out` do not fit.
    """
    _check_format("quantize", wire_format)
    if wire_format.dtype.is_quantized:
        _check_hidden_states(hidden_states, wire_format)
        # Codes and scales have no gradients.
        hidden_states = hidden_states.detach()
        wire = _output(hidden_states, wire_format, out)
        if wire_format.dtype is WireDtype.INT8:
            codecs.int8(hidden_states, wire, profile)
        else:
            codecs.floats(hidden_states, wire)
        return wire
    data = hidden_states.to(wire_format.dtype.torch_dtype)
    if out is None:
        return WireTensor(data=data, format=wire_format)
    out.data.copy_(data)
    return out


def quantizer_for(device: torch.device) -> Quantizer:
    """Return the fastest quantiser for tensors on `device`; call this once, at construction.

    On CUDA it reads each element once, hidden_states are [T, H] with adjacent columns, and a graph
    may capture it after one call with the same dtype, H and strides.

    Raises:
        BackendUnavailable: Triton is missing, which the quantiser for CUDA needs.
    """
    return partial(quantize, codecs=_load_triton()) if device.type == "cuda" else quantize


@cache
def _load_triton() -> Codecs:
    with importing_triton("quantizer_for"):
        from epcomm.kernels.quantize.fp8 import quantize_floats_triton, restore_triton
        from epcomm.kernels.quantize.int8 import quantize_int8_triton
    return Codecs(floats=quantize_floats_triton, int8=quantize_int8_triton, restore=restore_triton)


def dequantizer_for(device: torch.device) -> Callable[[WireTensor, torch.dtype], Tensor]:
    """Return the fastest dequantize() for tensors on `device`; on CUDA its rows are [R, H].

    Raises:
        BackendUnavailable: Triton is missing, which the kernel for CUDA needs.
    """
    return partial(dequantize, codecs=_load_triton()) if device.type == "cuda" else dequantize


def dequantize(wire: WireTensor, dtype: torch.dtype, *, codecs: Codecs = _PLAIN) -> Tensor:
    """Convert a wire tensor to hidden states [..., R, H] in `dtype`; scales have any layout.

    codecs: plain torch, or the kernels of dequantizer_for().

    Host sync: none.   Graph capture: yes.   Deterministic: yes.
    Lifetime: an unquantised result may share memory with the wire.
    """
    _check_format("dequantize", wire.format)
    if not wire.format.dtype.is_quantized:
        return wire.data.to(dtype)
    return codecs.restore(row_major(wire), dtype)


def _check_format(caller: str, wire_format: WireFormat) -> None:
    if wire_format.dtype is WireDtype.INT8 and wire_format != INT8_PER_TOKEN:
        raise ConfigError(
            f"{caller}: format is {wire_format}, expected {INT8_PER_TOKEN} (one scale a row); "
            "choose another wire format"
        )
    if wire_format.dtype not in ROW_DTYPES:
        raise ConfigError(
            f"{caller}: format is {wire_format}, which only a package reads and writes; choose "
            "another wire format"
        )


def _check_hidden_states(hidden_states: Tensor, wire_format: WireFormat) -> None:
    if hidden_states.dtype not in _INPUT_DTYPES:
        raise ShapeError(
            f"quantize: hidden_states are {hidden_states.dtype}, expected bfloat16, float16 or "
            "float32; cast them"
        )
    shape, multiple = list(hidden_states.shape), wire_format.dtype.per_item
    if len(shape) < 2 or shape[-1] == 0 or shape[-1] % multiple:
        raise ShapeError(
            f"quantize: hidden_states have shape {shape}, expected [..., T, H] "
            f"with H a multiple of {multiple} and at least 1; add what is missing"
        )


def _output(hidden_states: Tensor, wire_format: WireFormat, out: WireTensor | None) -> WireTensor:
    """Return `out` after checking it, or new contiguous memory where it is None."""
    data_dtype, scale_dtype = wire_format.dtype.torch_dtype, wire_format.scale_dtype
    *rows, hidden_size = hidden_states.shape
    shape, device = [*rows, wire_format.num_items(hidden_size)], hidden_states.device
    scale_shape = [*rows, wire_format.num_scales(hidden_size)]
    if out is None:
        # Items have one byte; torch cannot fill 4-bit floats, as its deterministic mode does.
        return WireTensor(
            data=hidden_states.new_empty(shape, dtype=torch.uint8).view(data_dtype),
            format=wire_format,
            scales=hidden_states.new_empty(scale_shape, dtype=scale_dtype),
        )
    came = (out.format, *_form_of(out.data), *_form_of(out.scales))
    wanted = (wire_format, shape, data_dtype, device, scale_shape, scale_dtype, device)
    if came != wanted:
        texts = [", ".join(map(str, each)) for each in (came, wanted)]
        raise ShapeError(f"quantize: out is {texts[0]}, expected {texts[1]}; make it for this call")
    return out


def _form_of(tensor: Tensor | None) -> tuple[object, ...]:
    return () if tensor is None else (list(tensor.shape), tensor.dtype, tensor.device)
