"""Quantise hidden states and back: FP8 by block, INT8 by token, and scales as GEMMs read them.

quantize() is plain torch and runs on any device; quantizer_for() gives the implementation that a
device has, which returns the same bits.
"""

from collections.abc import Mapping
from types import MappingProxyType

from epcomm.quantization.convert import Quantizer, dequantize, quantize, quantizer_for
from epcomm.quantization.fp8 import FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES
from epcomm.quantization.int8 import INT8_PER_TOKEN
from epcomm.quantization.scale_layout import arrange_scales, check_scales, row_major
from epcomm.types import Int8Profile, WireDtype, WireFormat

# The wire format of a wire dtype alone: the scales that FP8 checkpoints and W8A8 experts need.
QUANTIZED_FORMATS: Mapping[WireDtype, WireFormat] = MappingProxyType(
    {WireDtype.FP8_E4M3: FP8_FLOAT32_SCALES, WireDtype.INT8: INT8_PER_TOKEN}
)
# Every format that quantize() makes and dequantize() reads at the blocks of checkpoints.
KNOWN_FORMATS = (FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES, INT8_PER_TOKEN)

__all__ = [
    "FP8_FLOAT32_SCALES",
    "FP8_POWER_OF_TWO_SCALES",
    "INT8_PER_TOKEN",
    "KNOWN_FORMATS",
    "QUANTIZED_FORMATS",
    "Int8Profile",
    "Quantizer",
    "arrange_scales",
    "check_scales",
    "dequantize",
    "quantize",
    "quantizer_for",
    "row_major",
]
