"""Quantise rows to INT8 as an operator does, with poison where its arithmetic is undefined."""

from torch import Tensor

from epcomm.quantization import INT8_PER_TOKEN, quantize
from epcomm.types import Int8Profile
from fakes.ascend.undefined import UNDEFINED_INT8


def quantize_rows(rows: Tensor, profile: Int8Profile) -> tuple[Tensor, Tensor]:
    """Return codes and scales of rows, by the profile of the operator.

    A row of zeros has the scale 0 and undefined codes, because the device casts 0 / 0 to an
    integer. Such a row dequantises to 0 whatever its codes.

    Args:
        rows: [..., H], floating point.
        profile: the arithmetic.

    Returns:
        codes [..., H], int8; scales [...], float32, NaN for a row with a NaN or an infinity.
    """
    wire = quantize(rows, INT8_PER_TOKEN, profile=profile)
    assert wire.scales is not None, "int8 has scales"
    # This includes a scale of NaN, which is not above 0.
    is_undefined = ~(wire.scales > 0)
    return wire.data.masked_fill(is_undefined, UNDEFINED_INT8), wire.scales.squeeze(-1)
