"""The numbers of epcomm/protocol.py as constants of kernels, and how kernels note faults."""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm import protocol
from epcomm.protocol import FaultCode, Wait

FLAGS_SHIFT = tl.constexpr(protocol.FLAGS_SHIFT)
FAULT_MASK = tl.constexpr(protocol.FAULT_MASK)
FAULT_IDS = tl.constexpr(int(FaultCode.IDS))
FAULT_REPEATED_IDS = tl.constexpr(int(FaultCode.REPEATED_IDS))
FAULT_HANDLE = tl.constexpr(int(FaultCode.HANDLE))
FAULT_OVERFLOW = tl.constexpr(int(FaultCode.OVERFLOW))
_FAULT_GRAD_MODE = tl.constexpr(int(FaultCode.GRAD_MODE))
_FAULT_FROZEN = tl.constexpr(int(FaultCode.FROZEN))
_COMPARED_FLAGS = tl.constexpr(protocol.COMPARED_FLAGS)

WAIT_CREDIT = tl.constexpr(int(Wait.CREDIT))
WAIT_DISPATCH = tl.constexpr(int(Wait.DISPATCH))
WAIT_COMBINE = tl.constexpr(int(Wait.COMBINE))

REPORT_WAIT = tl.constexpr(protocol.REPORT_WAIT)
REPORT_EPOCH = tl.constexpr(protocol.REPORT_EPOCH)
REPORT_ABORTED = tl.constexpr(protocol.REPORT_ABORTED)
REPORT_MISSING = tl.constexpr(protocol.REPORT_MISSING)
MISSING_SHIFT = tl.constexpr(protocol.MISSING_SHIFT)
MAX_MISSING = tl.constexpr(protocol.MAX_MISSING)


@triton.jit
def codes_of_one_mode(statuses: tl.tensor, is_source: tl.tensor) -> tl.tensor:
    """Return the fault of each rank, [ranks]; if some train, it is one not to train the same."""
    codes = statuses & FAULT_MASK
    compared = tl.where(is_source, (statuses >> FLAGS_SHIFT) & _COMPARED_FLAGS, 0)
    is_mixed = is_source & (compared != tl.max(compared)) & (codes == 0)
    mixed = tl.where(compared == 0, _FAULT_GRAD_MODE, _FAULT_FROZEN)
    return tl.where(is_mixed, mixed, codes)


@triton.jit
def note_faults(
    faults_ptr: tl.tensor,
    codes: tl.tensor,
    is_source: tl.tensor,
    LANES: tl.constexpr,
    needed: tl.tensor | None = None,
) -> None:
    """Keep the first fault of each rank, and the slots it needs, until its host looks.

    faults_ptr: [W, 2], int64.   codes: [LANES], 0 for none.   needed: [LANES], int32.
    """
    fault_ptr = faults_ptr + 2 * tl.arange(0, LANES)
    earlier = tl.load(fault_ptr, mask=is_source, other=0)
    # A fault code of 0 is not stored: a kernel of another receive buffer may store one meanwhile.
    is_news = is_source & (earlier == 0) & (codes != 0)
    tl.store(fault_ptr, codes.to(tl.int64), mask=is_news)
    if needed is not None:
        tl.store(fault_ptr + 1, needed.to(tl.int64), mask=is_news)
