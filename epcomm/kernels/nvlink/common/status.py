"""The status of a rank, its fault code and flags in one int32, for kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm import protocol
from epcomm.protocol import FaultCode

FLAGS_SHIFT = tl.constexpr(protocol.FLAGS_SHIFT)
FAULT_MASK = tl.constexpr((1 << protocol.FLAGS_SHIFT) - 1)
FAULT_IDS = tl.constexpr(int(FaultCode.IDS))
FAULT_OVERFLOW = tl.constexpr(int(FaultCode.OVERFLOW))
_FAULT_GRAD_MODE = tl.constexpr(int(FaultCode.GRAD_MODE))
_FAULT_FROZEN = tl.constexpr(int(FaultCode.FROZEN))
_COMPARED_FLAGS = tl.constexpr(protocol.COMPARED_FLAGS)


@triton.jit
def codes_of_one_mode(statuses: tl.tensor, is_source: tl.tensor) -> tl.tensor:
    """[ranks]: the fault of each rank; if some train, it is one not to train the same."""
    codes = statuses & FAULT_MASK
    compared = tl.where(is_source, (statuses >> FLAGS_SHIFT) & _COMPARED_FLAGS, 0)
    is_mixed = is_source & (compared != tl.max(compared)) & (codes == 0)
    mixed = tl.where(compared == 0, _FAULT_GRAD_MODE, _FAULT_FROZEN)
    return tl.where(is_mixed, mixed, codes)
