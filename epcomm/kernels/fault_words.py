"""Faults and flags of a rank in one word, as epcomm.buffers.faults packs them, for kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.buffers import faults
from epcomm.buffers.faults import BatchFlags, FaultCode

FLAGS_SHIFT = tl.constexpr(faults.FLAGS_SHIFT)
FAULT_MASK = tl.constexpr((1 << faults.FLAGS_SHIFT) - 1)
FAULT_IDS = tl.constexpr(int(FaultCode.IDS))
FAULT_OVERFLOW = tl.constexpr(int(FaultCode.OVERFLOW))
_FAULT_GRAD_MODE = tl.constexpr(int(FaultCode.GRAD_MODE))
_GRAD_ENABLED = tl.constexpr(int(BatchFlags.GRAD_ENABLED))


@triton.jit
def codes_of_one_mode(words: tl.tensor, is_source: tl.tensor) -> tl.tensor:
    """[ranks]: the fault of each rank; if some are in grad mode, it is one not to be."""
    codes = words & FAULT_MASK
    has_grad = is_source & (((words >> FLAGS_SHIFT) & _GRAD_ENABLED) != 0)
    is_mixed = is_source & (has_grad == 0) & (tl.max(has_grad.to(tl.int32)) > 0)
    return tl.where(is_mixed & (codes == 0), _FAULT_GRAD_MODE, codes)
