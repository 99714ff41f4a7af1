"""Convert scales to the form of DispatchFFNCombine: the bits of float32 in int64, in one dimension.

The device reads the upper 19 of the lower 32 bits, with relative errors of 2**-10 at most. The
conversion keeps all 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epcomm.errors import ShapeError


def bits_of_scales(scales: Tensor) -> Tensor:
    """Convert float32 [...] to int64 [number of elements], row-major, in new memory.

    A negative scale has its sign in the upper 32 bits too, which the device does not read.

    Raises:
        ShapeError: scales are not float32.
    """
    if scales.dtype != torch.float32:
        raise ShapeError(
            f"bits_of_scales: scales are {scales.dtype}, expected torch.float32; call .float()"
        )
    return scales.view(torch.int32).flatten().to(torch.int64)


def scales_of_bits(bits: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo bits_of_scales(): convert int64 [number of elements] to float32 of this shape.

    Raises:
        ShapeError: bits are not int64.
    """
    if bits.dtype != torch.int64:
        raise ShapeError(
            f"scales_of_bits: bits are {bits.dtype}, expected torch.int64 from bits_of_scales()"
        )
    return bits.to(torch.int32).view(torch.float32).view(list(shape))
