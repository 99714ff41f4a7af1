"""Cast values so that the interpreter rounds as a GPU does."""

import triton
import triton.language as tl

from epcomm.kernels.launch import IS_INTERPRETED

_IS_INTERPRETED = tl.constexpr(IS_INTERPRETED)


@triton.jit
def cast(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Cast float32 to DTYPE, ties to even; the interpreter's own cast truncates to bfloat16."""
    if _IS_INTERPRETED and tl.bfloat16 == DTYPE:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        # NaN is set apart, because a carry would turn some NaN into numbers.
        values = tl.where(values == values, rounded, 0x7FC00000).to(tl.float32, bitcast=True)
    return values.to(DTYPE)  # pyright: ignore[reportArgumentType]
