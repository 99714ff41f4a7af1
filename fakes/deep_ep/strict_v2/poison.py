"""Fill memory that the package leaves unwritten, so that reading it is noticed."""

from collections.abc import Sequence

import torch
from torch import Tensor

# One byte of what was in memory: NaN as float8_e4m3fn, a number far beyond any index in integers.
GARBAGE_BYTE = 0x7F


def fill_with_poison(tensor: Tensor) -> None:
    """Write NaN to floating elements, and 0x7F to every byte of others and of one-byte elements."""
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        tensor.fill_(float("nan"))
    elif tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(GARBAGE_BYTE)
    else:
        tensor.fill_(int.from_bytes(bytes([GARBAGE_BYTE] * tensor.element_size())))


def garbage_integers(
    shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Return integers as found in used memory: some far out of range, some that look valid.

    Recorded garbage shows both, so that a filter by range must not pass for a count.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype)
    fill_with_poison(tensor)
    looks_valid = torch.rand(tuple(shape), generator=generator) < 0.5
    return tensor.masked_fill_(looks_valid, 0)
