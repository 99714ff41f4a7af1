"""Run quantize() through the Triton kernels; import this only where triton is installed."""

from __future__ import annotations

from torch import Tensor

from epcomm.kernels.quantize.fp8 import quantize_fp8_triton
from epcomm.kernels.quantize.int8 import quantize_int8_triton
from epcomm.quantization.fp8 import check_fp8_format
from epcomm.quantization.int8 import check_int8_format
from epcomm.quantization.outputs import check_hidden_states, output_for
from epcomm.quantization.plain import quantize
from epcomm.types import Int8Profile, WireDtype, WireFormat, WireTensor

_NAME = "quantize_with_triton"


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
    if wire_format.dtype is WireDtype.FP8_E4M3:
        check_fp8_format(_NAME, wire_format)
    elif wire_format.dtype is WireDtype.INT8:
        check_int8_format(_NAME, wire_format)
    else:
        return quantize(hidden_states, wire_format, out=out)
    check_hidden_states(_NAME, hidden_states)
    wire = output_for(_NAME, hidden_states, wire_format, out)
    assert wire.scales is not None, "quantised formats have scales"
    if wire_format.dtype is WireDtype.FP8_E4M3:
        block = wire_format.scale_block or hidden_states.shape[-1]
        quantize_fp8_triton(hidden_states, wire.data, wire.scales, scale_block=block)
    else:
        quantize_int8_triton(hidden_states, wire.data, wire.scales, profile=profile.value)
    return wire
