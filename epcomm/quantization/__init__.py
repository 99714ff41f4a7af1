"""Quantise hidden states and back: floats by block, INT8 by token, and scales as GEMMs read them.

quantize() is plain torch and runs on any device; quantizer_for() gives the implementation that a
device has, which returns the same bits.
"""

from epcomm.quantization.convert import Quantizer, dequantize, quantize, quantizer_for
from epcomm.quantization.floats import (
    FP8_FLOAT32_SCALES,
    FP8_POWER_OF_TWO_SCALES,
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

__all__ = [
    "FP8_FLOAT32_SCALES",
    "FP8_POWER_OF_TWO_SCALES",
    "INT8_PER_TOKEN",
    "KNOWN_FORMATS",
    "Int8Profile",
    "Quantizer",
    "arrange_scales",
    "check_scales",
    "dequantize",
    "quantize",
    "quantizer_for",
    "row_major",
    "split_scales",
]
