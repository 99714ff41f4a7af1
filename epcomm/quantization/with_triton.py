"""Run quantize() through the Triton kernels; import this only where triton is installed."""

from __future__ import annotations

from torch import Tensor

from epcomm.kernels.quantize.fp8 import quantize_fp8_triton
from epcomm.kernels.quantize.int8 import quantize_int8_triton
from epcomm.quantization.outputs import output_for
from epcomm.quantization.plain import quantize
from epcomm.types import Int8Profile, WireDtype, WireFormat, WireTensor


def quantize_with_triton(
    hidden_states: Tensor,
    wire_format: WireFormat,
    *,
    profile: Int8Profile = Int8Profile.RINT127,
    out: WireTensor | None = None,
) -> WireTensor:
    """Return the result of quantize(), bit for bit, by one kernel that reads each element once.

    Args and Returns: see quantize(); hidden_states are [T, H] with adjacent columns.

    Host sync: none.   Graph capture: after one call with the same dtype, H and strides.
    Deterministic: yes.   Lifetime: as quantize().
    Raises:
        ConfigError: a format that the arithmetic does not know.
        ShapeError: hidden_states or `out` do not fit.
    """
    if not wire_format.dtype.is_quantized:
        return quantize(hidden_states, wire_format, out=out)
    wire = output_for("quantize_with_triton", hidden_states, wire_format, out)
    assert wire.scales is not None, "quantised formats have scales"
    if wire_format.dtype is WireDtype.INT8:
        quantize_int8_triton(hidden_states, wire.data, wire.scales, profile=profile)
    else:
        block = wire_format.scale_block or hidden_states.shape[-1]
        quantize_fp8_triton(hidden_states, wire.data, wire.scales, scale_block=block)
    return wire
