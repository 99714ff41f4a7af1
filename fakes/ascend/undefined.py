"""Fill memory that an operator leaves unwritten: NaN, and integers that no operator computes."""

import torch
from torch import Tensor

# Far from all ids, counts and positions of tests; adding one does not overflow int32.
UNDEFINED_INT = -0x5EAD_5EAD
# A value in the middle of the range, which clamping and rounding do not return.
UNDEFINED_INT8 = 77


def undefined(
    shape: list[int] | torch.Size, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Return a tensor that no kernel has written yet."""
    return torch.full(shape, undefined_value(dtype), dtype=dtype, device=device)


def has_values(tensor: Tensor) -> bool:
    """Return whether the tensor has memory; without memory operators return only shapes."""
    return tensor.device.type != "meta"


def undefined_value(dtype: torch.dtype) -> float | int:
    """Return the value of an unwritten element of the dtype."""
    if dtype.is_floating_point:
        return float("nan")
    if dtype in (torch.int8, torch.uint8):
        return UNDEFINED_INT8
    return UNDEFINED_INT
