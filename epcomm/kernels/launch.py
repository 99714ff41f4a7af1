"""What every launcher of this folder checks and asks of the compiler."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton import knobs

from epcomm.errors import ShapeError

# Kernels of this process run on the host, one program after another, to be tested without a GPU.
IS_INTERPRETED: bool = knobs.runtime.interpret

# A product and a sum rounded once would be other bits than those of plain torch.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}

# 32 elements a thread, in groups that make 16 bytes of codes, keep enough loads under way.
ELEMENTS_PER_WARP = 1024
_MAX_WARPS = 32


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`, which is at least 1."""
    return 1 << (value - 1).bit_length()


def warps_for(num_elements: int) -> int:
    """Warps of a program that holds so many elements, both powers of two."""
    return min(_MAX_WARPS, max(1, num_elements // ELEMENTS_PER_WARP))


def check_rows(caller: str, **tensors: Tensor) -> None:
    """Refuse what the kernels cannot address: no GPU tensor, no matrix, columns apart.

    Raises:
        ShapeError: names the tensor.
    """
    for name, tensor in tensors.items():
        if not (tensor.is_cuda or IS_INTERPRETED):
            raise ShapeError(f"{caller}: {name} is on {tensor.device}, expected cuda; move it")
        columns_are_adjacent = tensor.ndim == 2 and (tensor.shape[1] <= 1 or tensor.stride(1) == 1)
        if not columns_are_adjacent:
            raise ShapeError(
                f"{caller}: {name} has shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())}, expected two dimensions with adjacent columns; "
                "flatten it or make it contiguous"
            )
