"""Quantise hidden states and back: floats by block, INT8 by token, and scales as GEMMs read them.

quantize() is plain torch and runs on any device; quantizer_for() gives the implementation that a
device has, which returns the same bits.
"""

from collections.abc import Mapping
from types import MappingProxyType

from epcomm.quantization.convert import (
    Quantizer,
    dequantize,
    dequantizer_for,
    quantize,
    quantizer_for,
)
from epcomm.quantization.floats import (
    FP8_FLOAT32_SCALES,
    FP8_POWER_OF_TWO_SCALES,
    join_scales,
    split_scales,
)
from epcomm.quantization.int8 import INT8_PER_TOKEN
from epcomm.quantization.scale_layout import arrange_scales, check_scales, row_major
from epcomm.types import Int8Profile, WireDtype, WireFormat

# Every format that quantize() makes and dequantize() reads at the blocks of checkpoints.
KNOWN_FORMATS = (
    FP8_POWER_OF_TWO_SCALES,
    *(WireFormat(dtype=dtype) for dtype in WireDtype if dtype.is_quantized),
)

# The largest error of an element as a share of the largest of its row: half a step of E4M3 at 448,
# where steps are 32, and half a step of INT8 at 127. With powers of two, the largest is above 256
# or 4, or the step is half as large; the scale of NVFP4 is up to a sixteenth too large.
ROW_ERRORS: Mapping[WireDtype, float] = MappingProxyType(
    {
        WireDtype.FP8_E4M3: 16 / 448,
        WireDtype.INT8: 0.5 / 127,
        WireDtype.MXFP8: 16 / 256,
        WireDtype.MXFP4: 1 / 4,
        WireDtype.NVFP4: 1 / 6 * (1 + 1 / 16),
    }
)

__all__ = ["Quantizer", "dequantize", "dequantizer_for", "quantize", "quantizer_for"]
__all__ += ["FP8_FLOAT32_SCALES", "FP8_POWER_OF_TWO_SCALES", "INT8_PER_TOKEN", "KNOWN_FORMATS"]
__all__ += ["ROW_ERRORS", "Int8Profile"]
__all__ += ["arrange_scales", "check_scales", "join_scales", "row_major", "split_scales"]
