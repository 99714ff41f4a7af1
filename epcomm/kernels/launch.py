"""Checks and compiler options that launchers share."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from epcomm.errors import ShapeError
from epcomm.platforms.cuda import compute_capability, shared_bytes_of

# Whether kernels of this process run in Triton's interpreter, one program after another, for tests
# without a GPU.
IS_INTERPRETED: bool = knobs.runtime.interpret

# Fused multiplication and addition rounds once, and would give other bits than plain torch.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}

# 32 elements a thread, in groups that make 16 bytes of codes, keep enough loads in flight.
ELEMENTS_PER_WARP = 1024
_MAX_WARPS = 32

# Bytes of shared memory that are kept for the barriers of stages, which need less.
_BARRIER_BYTES = 1024
# Tensor cores of GPUs with these major compute capabilities read shared memory while the next stage
# arrives; on other GPUs, sm_120 too, one stage is in registers.
_READ_SHARED = (9, 10, 11)


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """The limits of a GPU that tiles of products depend on, by default those of an H200.

    shared_bytes: most bytes of shared memory of a block.   major: major compute capability.
    """

    shared_bytes: int = 227 * 1024
    major: int = 9

    def stages(self, stage_bytes: int, *, most: int) -> int:
        """Return the stages of a loop over K that fit into shared memory, from 1 to `most`.

        An H200 holds four stages of 48 KB. sm_120 has 99 KB and can run three stages of 48 KB: two
        in shared memory and one in registers.
        """
        capacity = (self.shared_bytes - _BARRIER_BYTES) // stage_bytes
        return max(1, min(most, capacity if self.major in _READ_SHARED else capacity + 1))


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Return the limits of a GPU, or the default limits where kernels are interpreted."""
    capability, usual = compute_capability(device), DeviceLimits()
    if capability is None:
        return usual
    shared_bytes = shared_bytes_of(device) or usual.shared_bytes
    return DeviceLimits(shared_bytes=shared_bytes, major=capability[0])


def next_power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least `value`, which is at least 1."""
    return 1 << (value - 1).bit_length()


def warps_for(num_elements: int) -> int:
    """Return the warps of a program that holds num_elements; both are powers of two."""
    return min(_MAX_WARPS, max(1, num_elements // ELEMENTS_PER_WARP))


def check_rows(caller: str, **tensors: Tensor) -> None:
    """Refuse tensors that kernels cannot address.

    Raises:
        ShapeError: a tensor is not on a GPU, is not a matrix, or its columns are not adjacent.
    """
    for name, tensor in tensors.items():
        if not (tensor.is_cuda or IS_INTERPRETED):
            raise ShapeError(f"{caller}: {name} is on {tensor.device}, expected cuda; move it")
        # contiguous() keeps the strides of a matrix without elements: 0 in the gradient of sum().
        columns_are_adjacent = tensor.ndim == 2 and (
            tensor.shape[1] <= 1 or tensor.stride(1) == 1 or tensor.numel() == 0
        )
        if not columns_are_adjacent:
            raise ShapeError(
                f"{caller}: {name} has shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())}, expected two dimensions with adjacent columns; "
                "flatten it or make it contiguous"
            )
