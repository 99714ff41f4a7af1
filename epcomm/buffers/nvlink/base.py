"""The host's side of every buffer whose kernels write the memory of the GPUs of one host.

What differs between modes is the layout of a block and the kernels; here are the block, the one
order of calls, what a kernel reports, and the end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer
from epcomm.buffers.faults import DeviceFaults
from epcomm.buffers.nvlink.memory import SymmetricMemory, open_symmetric_memory
from epcomm.collectives.base import Collectives
from epcomm.errors import BackendUnavailable, EPTimeout, HandleError, describe_ranks
from epcomm.spec import Availability, BufferSpec
from epcomm.types import WireTensor, align_up

_MAX_POLLS = 2**31 - 1
# The signals of a barrier begin at a line of the L2 cache.
_LINE_BYTES = 128
_WORD_BYTES = 4


class NVLinkHost(Buffer):
    """A buffer between the GPUs of one host; under Triton's interpreter between CPU ranks."""

    needs_one_host: ClassVar[bool] = True
    needs_nvlink: ClassVar[bool] = True
    needs_process_group: ClassVar[bool] = True
    # Receive buffers, used in turn, unless the specification asks for another number.
    num_buffers: ClassVar[int]
    # Polls of a kernel in a second: those of a GPU are timed, see peer_signals.POLL_NS; an
    # interpreter takes 1.1 ms for one on a busy machine.
    polls_per_s: ClassVar[Mapping[str, int]] = MappingProxyType({"cuda": 1_000, "cpu": 1_000})

    @classmethod
    def probe(cls, environment: Mapping[str, str]) -> Availability:
        reasons = []
        if find_spec("triton") is None:
            reasons.append("triton is not installed; install it")
        if not (torch.backends.cuda.is_built() and torch.cuda.is_available()):
            reasons.append("there is no CUDA device")
            return Availability(ok=False, reasons=tuple(reasons))
        if find_spec("torch.distributed._symmetric_memory") is None:
            reasons.append("this torch has no symmetric memory; install 2.11 or newer")
        # What its device reaches depends on the ranks: the survey asks (needs_nvlink).
        return Availability(ok=not reasons, reasons=tuple(reasons))

    def __init__(self, collectives: Collectives, spec: BufferSpec) -> None:
        self._collectives, self._spec = collectives, spec
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self._device = collectives.device
        self._faults = DeviceFaults(self._rank, self._world_size, self._device)
        self._memory: SymmetricMemory | None = None
        self._stream: torch.cuda.Stream | None = None

    @abstractmethod
    def received_rows(self) -> tuple[WireTensor, ...]:
        """Return [W * M, H] of each receive buffer, views of memory that peers write. Local."""

    @classmethod
    def num_buffers_of(cls, spec: BufferSpec) -> int:
        """Return the number of receive buffers: the batches that may be in flight."""
        return spec.batches_in_flight or cls.num_buffers

    @classmethod
    @abstractmethod
    def _waits(cls) -> Mapping[int, str]:
        """Return what each phase of a report waits for; `{epoch}` stands for the report's epoch."""

    def close(self) -> None:
        """Let go of the memory once no rank writes it: ranks close together. Idempotent.

        A rank that does not come is waited for as long as in a call, and not at all once a wait has
        been in vain. It is no danger then: a block lasts until nobody has it mapped, and what this
        rank had under way has ended.
        """
        if self._memory is None:
            return
        self._synchronize()
        if not self._report.any():
            self._missing_ranks()
        self._release()

    def abandon(self) -> None:
        """Close without waiting for other ranks."""
        if self._memory is None:
            return
        # The error that this follows may be the device's own, which raises it again.
        with suppress(RuntimeError):
            self._synchronize()
        self._release()

    def _release(self) -> None:
        """Forget every view of the memory."""
        self._memory = None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _missing_ranks(self) -> list[int]:
        """Wait for all ranks on the device; return those that did not come.

        Collective: yes, and ends if some do not come.   Host sync: yes.
        """
        from epcomm.kernels.nvlink.common.barrier import device_barrier

        self._num_barriers += 1
        device_barrier(
            self._barrier_table,
            self._excluded,
            self._never,
            self._missing,
            flags_address=self._barrier_address,
            rank=self._rank,
            number=self._num_barriers,
            max_polls=self._max_polls,
        )
        return [rank for rank, is_missing in enumerate(self._missing.tolist()) if is_missing]

    def _open_memory(self, num_bytes: int) -> SymmetricMemory:
        """Map the blocks of all ranks, zero at first, and make the report.

        num_bytes: of a rank's memory as the kernels of a mode know it; the signals of the barrier
            follow it.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: some rank has not enough memory or cannot map it, or this is a CPU
                rank whose kernels are not interpreted.
        """
        from epcomm.kernels.launch import IS_INTERPRETED
        from epcomm.kernels.nvlink.common.signals import REPORT_MISSING

        if self._device.type != "cuda" and not IS_INTERPRETED:
            raise BackendUnavailable(
                f"{self.name}: the group is on {self._device} (rank {self._rank} of "
                f"{self._world_size}), expected cuda; use backend='shared_memory'"
            )
        flags_at, size = align_up(num_bytes, _LINE_BYTES), self._world_size
        memory = open_symmetric_memory(
            self._collectives, flags_at + _WORD_BYTES * size, phase=f"open {self.name}"
        )
        device = memory.block.device
        addresses = [base + flags_at for base in memory.addresses]
        self._barrier_table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._barrier_address, self._num_barriers = addresses[self._rank], 0
        # Not 0: a rank that is dead.
        self._excluded = torch.zeros(size, dtype=torch.int32, device=device)
        self._never = torch.zeros(1, dtype=torch.int32, device=device)
        self._missing = torch.zeros(size, dtype=torch.int32, device=device)
        # The host reads it while kernels run.
        self._report: Tensor = torch.zeros(
            REPORT_MISSING + size, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._memory = memory
        return memory

    def _host_barrier(self) -> None:
        """Wait until the devices of all ranks have done what was launched.   Collective: yes."""
        self._synchronize()
        self._collectives.gather_records({}, phase=f"open {self.name}")

    def _begin_call(self) -> None:
        """Refuse a call that cannot succeed; order it after the previous call on the device."""
        self._check_open()
        self._check_report()
        self._follow()

    def _follow(self) -> None:
        """Make the current stream wait for the stream of the group's previous call."""
        if self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            # Calls of a group run in one order on the device: kernels that wait, on streams without
            # an
            # order, could fill two GPUs in different orders and wait for ever.
            stream = torch.cuda.current_stream(self._device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream

    def _check_open(self) -> None:
        if self._memory is None:
            raise HandleError(
                f"{self.name}: the buffer is closed (rank {self._rank} of {self._world_size}); "
                "make a new EPGroup"
            )

    def _check_report(self) -> None:
        """Raise what a kernel has reported. Local; no device is waited for."""
        from epcomm.kernels.nvlink.common.signals import (
            REPORT_ABORTED,
            REPORT_EPOCH,
            REPORT_MISSING,
            REPORT_PHASE,
            decode_abort,
        )

        report = self._report.tolist()
        where = f"rank {self._rank} of {self._world_size}"
        if report[REPORT_PHASE]:
            missing = [
                rank for rank, is_missing in enumerate(report[REPORT_MISSING:]) if is_missing
            ]
            wait = self._waits()[report[REPORT_PHASE]].format(epoch=report[REPORT_EPOCH])
            raise EPTimeout(
                f"{self.name}: {describe_ranks(missing)} did not arrive in {wait}, within "
                f"{self._timeout_s:g} s (this is {where}); close the group and make a new one"
            )
        if report[REPORT_ABORTED]:
            impatient, missing = decode_abort(report[REPORT_ABORTED])
            what = (
                f"rank {impatient} gave up waiting for {describe_ranks(missing)} and told all ranks"
            )
            if self._rank in missing:
                reason = f"this rank came too late: {what}"
            elif missing:
                reason = f"{describe_ranks(missing)} did not arrive: {what}"
            else:
                reason = f"rank {impatient} gave up waiting and told all ranks; see its message"
            raise EPTimeout(
                f"{self.name}: {reason} (this is {where}); close the group and make a new one"
            )

    @property
    def _timeout_s(self) -> float:
        return self._collectives.kernel_timeout_s

    @property
    def _max_polls(self) -> int:
        polls = self._timeout_s * self.polls_per_s[self._device.type]
        return min(_MAX_POLLS, max(1, int(polls)))
