"""quantize() and dequantize(): the arithmetic of a wire format, in plain torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from epcomm.quantization.fp8 import restore_fp8, write_fp8
from epcomm.quantization.int8 import restore_int8, write_int8
from epcomm.quantization.outputs import check_format, output_for
from epcomm.quantization.scale_layout import unpack_scales
from epcomm.types import Int8Profile, WireDtype, WireFormat, WireTensor


def quantize(
    hidden_states: Tensor,
    wire_format: WireFormat,
    *,
    profile: Int8Profile = Int8Profile.RINT127,
    out: WireTensor | None = None,
) -> WireTensor:
    """Convert hidden states to a wire format.

    Args:
        hidden_states: [..., T, H], bfloat16, float16 or float32, any strides.
        wire_format: the format of the result; an unquantised format casts.
        profile: the arithmetic of INT8, ignored otherwise.
        out: memory for the result, with rows of any stride; None: new tensors.

    Returns:
        Data and row-major scales; scale_layout.arrange_scales() lays scales out for a GEMM.

    Host sync: none.   Graph capture: yes.   Deterministic: yes.
    Lifetime: an unquantised result may share memory with hidden_states.
    Raises:
        ConfigError: a format that the arithmetic does not know.
        ShapeError: hidden_states or `out` do not fit.
    """
    if wire_format.dtype.is_quantized:
        wire = output_for("quantize", hidden_states, wire_format, out)
        if wire_format.dtype is WireDtype.INT8:
            write_int8(hidden_states, wire, profile)
        else:
            write_fp8(hidden_states, wire)
        return wire
    data = hidden_states.to(wire_format.dtype.torch_dtype)
    if out is None:
        return WireTensor(data=data, format=wire_format)
    out.data.copy_(data)
    return out


def dequantize(wire: WireTensor, dtype: torch.dtype) -> Tensor:
    """Convert a wire tensor to hidden states [..., R, H] in `dtype`; scales have any layout.

    Host sync: none.   Graph capture: yes.   Deterministic: yes.
    Lifetime: an unquantised result may share memory with the wire.
    """
    if not wire.format.dtype.is_quantized:
        return wire.data.to(dtype)
    check_format("dequantize", wire.format)
    restore = restore_int8 if wire.format.dtype is WireDtype.INT8 else restore_fp8
    return restore(_with_plain_scales(wire)).to(dtype)


def _with_plain_scales(wire: WireTensor) -> WireTensor:
    """Return the wire tensor with unpacked scales, of any strides."""
    if wire.scales is None or wire.scale_layout is None or not wire.scale_layout.packed:
        return wire
    num_scales = wire.format.num_scales(wire.data.shape[-1])
    return replace(wire, scales=unpack_scales(wire.scales, num_scales), scale_layout=None)
