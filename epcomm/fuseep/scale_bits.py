"""Convert scales to the form of DispatchFFNCombine: the bits of float32 in int64, in one dimension.

The conversion keeps all 32 bits. The device reads the upper 19 of them, with a relative error of at
most 2**-10.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.errors import ShapeError


def bits_of_scales(scales: Tensor) -> Tensor:
    """Convert float32 [...] to int64 [number of elements], row-major, in new memory.

    The upper 32 bits of a negative scale are set; the device does not read them.

    Raises:
        ShapeError: scales are not float32.
    """
    if scales.dtype != torch.float32:
        raise ShapeError(
            f"bits_of_scales: scales are {scales.dtype}, expected torch.float32; call .float()"
        )
    return scales.view(torch.int32).flatten().to(torch.int64)
