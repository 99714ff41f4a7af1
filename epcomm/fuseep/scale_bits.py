"""Convert scales to the form of DispatchFFNCombine: the bits of float32 in int64, in one dimension.

The device reads the upper 19 of the lower 32 bits, with relative errors of 2**-10 at most. The
conversion keeps all 32 bits.
"""

from __future__ import annotations

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
