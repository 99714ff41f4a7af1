"""The host's side of every buffer whose kernels write the memory of the GPUs of one host.

What differs between modes is the layout of a block and the kernels; here are the block, the one
order of calls, what a kernel reports, and the end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Availability, Buffer, BufferSpec
from epcomm.buffers.faults import DeviceFaults
from epcomm.buffers.symmetric_memory import SymmetricMemory, open_symmetric_memory
from epcomm.collectives.base import DEFAULT_TIMEOUT_S, Collectives, describe_ranks
from epcomm.errors import BackendUnavailable, EPTimeout, HandleError

_MOST_POLLS = 2**31 - 1


class NVLinkHost(Buffer):
    """A buffer between the GPUs of one host; under Triton's interpreter between CPU ranks."""

    needs_one_host: ClassVar[bool] = True
    # Polls of a kernel in a second: of a GPU, not measured yet, and of an interpreter.
    polls_per_s: ClassVar[Mapping[str, int]] = MappingProxyType({"cuda": 2_000_000, "cpu": 8_000})

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
        mine = torch.cuda.current_device()
        far = [
            other
            for other in range(torch.cuda.device_count())
            if other != mine and not torch.cuda.can_device_access_peer(mine, other)
        ]
        if far:
            reasons.append(f"device {mine} cannot write the memory of devices {far}")
        return Availability(ok=not reasons, reasons=tuple(reasons))

    def __init__(self, collectives: Collectives, spec: BufferSpec) -> None:
        self._collectives, self._spec = collectives, spec
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self._device = collectives.device
        self._faults = DeviceFaults(self._rank, self._world_size, self._device)
        self._memory: SymmetricMemory | None = None
        self._stream: torch.cuda.Stream | None = None

    @classmethod
    @abstractmethod
    def _waits(cls) -> Mapping[int, str]:
        """What a report's phase waited for; `{epoch}` in it stands for the report's epoch."""

    def close(self) -> None:
        if self._memory is None:
            return
        if self._device.type == "cuda":
            # Peers keep what they have mapped; our own kernels must not be under way.
            torch.cuda.synchronize(self._device)
        self._memory = None

    def _open_memory(self, num_bytes: int) -> SymmetricMemory:
        """Map the blocks of all ranks, zero at first, and make the report.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: some rank has not enough memory or cannot map it, or this is a CPU
                rank whose kernels are not interpreted.
        """
        from epcomm.kernels.launch import IS_INTERPRETED
        from epcomm.kernels.peer_signals import REPORT_LATE

        if self._device.type != "cuda" and not IS_INTERPRETED:
            raise BackendUnavailable(
                f"{self.name}: the group is on {self._device} (rank {self._rank} of "
                f"{self._world_size}), expected cuda; use backend='shared_memory'"
            )
        memory = open_symmetric_memory(self._collectives, num_bytes, phase=f"open {self.name}")
        # The host reads it while kernels run.
        self._report: Tensor = torch.zeros(
            REPORT_LATE + self._world_size,
            dtype=torch.int32,
            pin_memory=self._device.type == "cuda",
        )
        self._memory = memory
        return memory

    def _meet(self) -> None:
        """All ranks have done on the device what they were told.   Collective: yes."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._collectives.gather_records({}, phase=f"open {self.name}")

    def _begin_call(self) -> None:
        """Refuse a call that cannot succeed, and put it behind the last one on the device."""
        self._check_open()
        self._check_report()
        if self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            # Waiting kernels on free streams could fill two GPUs in different orders.
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
        from epcomm.kernels.peer_signals import (
            REPORT_ABORTED,
            REPORT_EPOCH,
            REPORT_LATE,
            REPORT_PHASE,
        )

        words = self._report.tolist()
        where = f"rank {self._rank} of {self._world_size}"
        if words[REPORT_PHASE]:
            late = [rank for rank, is_late in enumerate(words[REPORT_LATE:]) if is_late]
            wait = self._waits()[words[REPORT_PHASE]].format(epoch=words[REPORT_EPOCH])
            raise EPTimeout(
                f"{self.name}: {describe_ranks(late)} did not arrive in {wait}, within "
                f"{self._timeout_s:g} s (this is {where}); close the group and make a new one"
            )
        if words[REPORT_ABORTED]:
            raise EPTimeout(
                f"{self.name}: rank {words[REPORT_ABORTED] - 1} gave up waiting and told all "
                f"ranks (this is {where}); see its message; close the group and make a new one"
            )

    @property
    def _timeout_s(self) -> float:
        bounded = self._collectives.bounded
        return DEFAULT_TIMEOUT_S if bounded is None else bounded.timeout_s

    @property
    def _max_polls(self) -> int:
        polls = self._timeout_s * self.polls_per_s[self._device.type]
        return min(_MOST_POLLS, max(1, int(polls)))
