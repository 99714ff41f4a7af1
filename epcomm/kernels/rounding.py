"""Casts that round in an interpreter as they do on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.kernels.launch import IS_INTERPRETED

_IS_INTERPRETED = tl.constexpr(IS_INTERPRETED)


@triton.jit
def cast(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """float32 to DTYPE, ties to even; the interpreter would truncate to bfloat16."""
    if _IS_INTERPRETED and tl.bfloat16 == DTYPE:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        # A carry would make some NaN numbers.
        values = tl.where(values == values, rounded, 0x7FC00000).to(tl.float32, bitcast=True)
    return values.to(DTYPE)  # pyright: ignore[reportArgumentType]
