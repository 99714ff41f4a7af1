"""Fill memory that the real package leaves unwritten: NaN, or a number that no index can be."""

import torch
from torch import Tensor

# As an integer of any width, this is no count, index or id of a test; as e4m3 it is NaN.
UNDEFINED_BYTE = 0x7F


def poison(tensor: Tensor) -> Tensor:
    """Fill `tensor`, of any strides, with values that cannot pass for a result; return it."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if tensor.dtype in (torch.float8_e4m3fn, torch.uint8):
        tensor.view(torch.uint8).fill_(UNDEFINED_BYTE)
        return tensor
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(undefined_integer(tensor.dtype))


def undefined_integer(dtype: torch.dtype) -> int:
    """Return the value that poison() fills integers with."""
    return int.from_bytes(bytes([UNDEFINED_BYTE]) * dtype.itemsize, "little")


def undefined(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new tensor of undefined values."""
    return poison(torch.empty(shape, dtype=dtype, device=device))
