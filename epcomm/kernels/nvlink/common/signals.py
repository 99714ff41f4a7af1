"""Signals by which the kernels of the ranks of one host wait for one another.

A signal is a counter of one source rank in the memory of the rank that waits. It grows by one for
each program of the source that has sent; in low latency the last program to arrive sets it to the
epoch. Each of these operations releases, so everything that the programs stored is visible to the
rank that acquires the full count. Signals that are written in each epoch never shrink, and are
compared by the sign of a difference, because a fast rank may be one epoch ahead. Signals that are
not written in each epoch are compared for equality: no rank can be ahead, because that needs a
signal of the next epoch from the rank that waits, and a signal of an epoch 2**31 before would
appear to be ahead.

Waits end after a number of polls. A poll of a GPU lasts a millisecond by its clock, with as many
looks as fit, because the time of a look depends on everything else that the GPU does. A rank that
times out writes a report that its host reads, and sets the abort flag of every rank, so that all
later kernels return without waiting. The flag contains the rank that timed out and the ranks that
it missed.

Kernels do not wait for excluded ranks, which are dead, and send nothing to them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from epcomm.kernels.launch import IS_INTERPRETED
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.nvlink.common.exchange import LOOKS_PER_TICK, POLL_BITS, Peers
from epcomm.kernels.nvlink.common.status import (
    MAX_MISSING,
    MISSING_SHIFT,
    REPORT_ABORTED,
    REPORT_EPOCH,
    REPORT_MISSING,
    REPORT_WAIT,
)

_IS_TIMED, _POLL_BITS = tl.constexpr(not IS_INTERPRETED), tl.constexpr(POLL_BITS)
_POLL_NS = tl.constexpr(2**POLL_BITS)
_LOOKS_PER_TICK = tl.constexpr(LOOKS_PER_TICK)
_ACQUIRE = (
    "{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; "
    "@p ld.acquire.{scope}.global.b32 $0, [$1]; }}"
)
_ACQUIRE_SYS = tl.constexpr(_ACQUIRE.format(scope="sys"))
_ACQUIRE_GPU = tl.constexpr(_ACQUIRE.format(scope="gpu"))


@triton.jit
def int32_at(address: tl.tensor) -> tl.tensor:
    """Return a pointer to the int32 at an address."""
    # The interpreter types an integer by its value, and a CPU has addresses below 2**31.
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def living_ranks(peers: Peers, c: constexprs.Layout) -> tl.tensor:
    """Return which ranks take part, [W_LANES]: yes, no, yes if rank 1 of 3 is excluded."""
    lane = tl.arange(0, c.W_LANES)
    return (lane < c.W) & (tl.load(peers.excluded + lane, mask=lane < c.W, other=1) == 0)


@triton.jit
def publish_as_last(
    peers: Peers,
    arrivals: tl.tensor,
    num_arriving: tl.tensor,
    signal_at: tl.tensor,
    epoch: tl.tensor,
    is_told: tl.tensor,
    c: constexprs.Layout,
) -> None:
    """Set a signal to the epoch once all `num_arriving` programs arrive, after all they stored.

    A fence of the whole system and a remote store a rank, not for each program: what another
    program stored is released by its arrival, acquired by the last, and released by that again.
    The signal is set, not added to: batches that are sent in lines do not change it. A signal of
    each program is no faster (two H100, T = 128 and 64: pairs of 23.3 and 20.4 us for 23.5 and
    18.8), because a program then keeps its SM, which receivers need, until its fence has ended.

    arrivals: the index in `state` of a count that is 0 before the first arrival and after the last.
    signal_at: the offset of the signal of this rank in the receive buffer of each rank.
    is_told: [W_LANES]: the ranks whose signal is set.
    """
    # The word is loaded while the arrival is in flight.
    arrivals_ptr = peers.state + arrivals
    bases = tl.load(peers.bases + tl.arange(0, c.W_LANES), mask=is_told, other=0)
    num_before = 0
    if num_arriving > 1:
        # One thread makes the arrival: it covers the stores of the others only after this barrier.
        tl.debug_barrier()
        num_before = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")
    if num_before == num_arriving - 1:
        tl.store(arrivals_ptr, 0)
        # A few threads make the release: after this barrier it covers what the last one acquired.
        tl.debug_barrier()
        words = (bases + signal_at).to(tl.pointer_type(tl.int32))
        numbers = is_told.to(tl.int32) * epoch
        # await_at() reads it on every rank. The store is one vector, so one fence covers all ranks.
        tl.atomic_xchg(words, numbers, mask=is_told, sem="release", scope="sys")


@triton.jit
def polls_spent(
    num_looks: tl.tensor,
    end_ns: tl.tensor,
    THREADS: tl.constexpr = 0,  # pyright: ignore[reportArgumentType]
) -> tuple[tl.tensor | int, tl.tensor]:
    """Count the polls that a look uses up, one without a clock, and return when the next poll ends.

    num_looks: those of the wait so far, this one among them.
    end_ns: int64: what the look before returned; 0 at first.
    THREADS: of the program, which must then all go by one clock; 0: each may go by its own.
    """
    if _IS_TIMED:
        spent = num_looks * 0
        if num_looks % _LOOKS_PER_TICK == 0:
            now_ns = globaltimer()
            if THREADS:
                now_ns = tl.max(tl.zeros([THREADS], tl.int64) + now_ns)
            # The first tick begins the first poll.
            end_ns = tl.where(end_ns == 0, now_ns + _POLL_NS, end_ns)
            over = tl.where(now_ns < end_ns, 0, ((now_ns - end_ns) >> _POLL_BITS) + 1)
            spent += over.to(tl.int32)
            end_ns += over << _POLL_BITS
        return spent, end_ns
    else:  # noqa: RET505 - what is not compiled must be the other branch
        return 1, end_ns


@triton.jit
def _behind(
    signals_ptr: tl.tensor,
    is_needed: tl.tensor,
    wanted: tl.tensor,
    SCOPE: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> tl.tensor:
    """Look once, acquiring; return 1 for each needed source whose signals are missing, int32."""
    if _IS_TIMED:
        # An atomic operation that adds 0 would double the time.
        found = tl.inline_asm_elementwise(
            _ACQUIRE_SYS if SCOPE == "sys" else _ACQUIRE_GPU,  # pyright: ignore[reportArgumentType]
            "=&r,l,r",
            [signals_ptr, is_needed.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        found = tl.load(signals_ptr, mask=is_needed, other=0, volatile=True)
    ahead = found - wanted
    is_behind = (ahead != 0) if IS_EXACT else (ahead < 0)
    return (is_needed & is_behind).to(tl.int32)


@triton.jit
def await_at(
    signals_ptr: tl.tensor,
    is_needed: tl.tensor,
    abort_ptr: tl.tensor | None,
    wanted: tl.tensor,
    max_polls: tl.tensor,
    SCOPE: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor | int]:
    """Wait until signals are at least `wanted`; what their sources stored before is visible then.

    IS_EXACT: they must equal `wanted`, as signals that are not written in each epoch.

    signals_ptr: [n], a signal of each source, of this rank.
    is_needed: [n]: sources that are waited for, whose signals are loaded.
    abort_ptr: not 0 once any rank has timed out; None: none does.
    Returns: [n], int32, 1 for each source that is still missing, and the abort flag or 0.
    """
    num_missing = 1
    polls_left = max_polls
    num_looks = max_polls * 0
    aborted = max_polls * 0
    end_ns = num_looks.to(tl.int64)
    # The loop carries only scalars, because a tensor would have to keep its layout.
    while (num_missing > 0) & (polls_left > 0):
        num_missing = tl.sum(_behind(signals_ptr, is_needed, wanted, SCOPE, IS_EXACT))
        num_looks += 1
        spent, end_ns = polls_spent(num_looks, end_ns)  # pyright: ignore[reportGeneralTypeIssues]
        polls_left -= spent
        if abort_ptr is not None:
            aborted = tl.load(abort_ptr, volatile=True)
            polls_left = tl.where(aborted != 0, 0, polls_left)
    missing = is_needed.to(tl.int32) * 0
    if num_missing > 0:
        missing = _behind(signals_ptr, is_needed, wanted, SCOPE, IS_EXACT)
    # The other threads may load only after those that acquired.
    tl.debug_barrier()
    return missing, aborted


@triton.jit
def abort_if_missing(
    missing: tl.tensor,
    aborted: tl.tensor,
    peers: Peers,
    wait: tl.constexpr,
    epoch: tl.tensor,
    c: constexprs.Layout,
) -> tl.tensor:
    """If this rank cannot continue, report why; set the abort flags unless another rank has.

    Rank 1, which misses ranks 0 and 2, sets 2 + 2**8 + 2**10.

    missing, aborted: as await_at() returned them.   wait: a Wait.
    Returns: whether this rank cannot continue.
    """
    report_ptr = peers.report
    is_lost = (tl.sum(missing) > 0) | (aborted != 0)
    if is_lost:
        lane = tl.arange(0, c.W_LANES)
        is_rank = living_ranks(peers, c)
        if aborted != 0:
            tl.store(report_ptr + REPORT_ABORTED, aborted)
        else:
            # Programs that wait for different ranks each report the ranks that they miss.
            tl.store(report_ptr + REPORT_MISSING + lane, missing, mask=is_rank & (missing != 0))
            tl.store(report_ptr + REPORT_EPOCH, epoch)
            # The release below covers the stores of all threads only after this.
            tl.debug_barrier()
            addresses = tl.load(peers.table + lane, mask=is_rank, other=0)
            # await_at() of later kernels reads it; they return and report it to their hosts.
            flags = addresses.to(tl.pointer_type(tl.int32))
            is_notified = (lane < MAX_MISSING) & (missing != 0)
            bits = tl.where(is_notified, 1, 0) << tl.where(is_notified, lane + MISSING_SHIFT, 0)
            mine = tl.zeros_like(lane) + tl.sum(bits) + peers.rank + 1
            tl.atomic_xchg(flags, mine, mask=is_rank, sem="release", scope="sys")
            tl.debug_barrier()
            # The store follows that fence: once the host finds it, it reads the rest of the report.
            tl.store(report_ptr + REPORT_WAIT, wait)
    return is_lost


@triton.jit
def await_signals(
    peers: Peers,
    signals_ptr: tl.tensor,
    is_awaited: tl.tensor,
    wait: tl.constexpr,
    epoch: tl.tensor,
    c: constexprs.Layout,
) -> tl.tensor:
    """Wait until signals of some sources equal the epoch; return whether this rank cannot continue.

    signals_ptr, is_awaited: [W_LANES].   wait: a Wait.
    """
    abort_ptr = int32_at(peers.own_address)
    missing, aborted = await_at(  # pyright: ignore[reportGeneralTypeIssues]
        signals_ptr, is_awaited, abort_ptr, epoch, peers.max_polls, "sys", True
    )
    return abort_if_missing(missing, aborted, peers, wait, epoch, c)
