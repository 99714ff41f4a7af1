"""The host's side of every buffer whose kernels write the memory of the GPUs of one host.

The modes differ in the layout of a block and in the kernels. This module has the common parts: the
block, the order of calls, reports of kernels, excluded ranks, and closing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Generic

import torch
from torch import Tensor

from epcomm.buffers.nvlink.memory import SymmetricMemory, open_symmetric_memory, received_rows
from epcomm.buffers.nvlink.waits import WaitReport
from epcomm.calls.call import DispatchCall
from epcomm.calls.faults import DeviceFaults
from epcomm.calls.order import Calls
from epcomm.errors import BackendUnavailable, ConfigError, EPTimeout, HandleError, describe_ranks
from epcomm.kernels.nvlink.common.exchange import LayoutT, PeerBlocks
from epcomm.platforms.cuda import cuda_reasons, triton_reasons
from epcomm.platforms.machine import Machine
from epcomm.protocol import NUM_BUFFERS, BatchFlags
from epcomm.spec import Availability, BufferSpec
from epcomm.types import SUM_DTYPES, WireDtype, WireTensor, align_up

if TYPE_CHECKING:
    # Plans read this module on machines without Triton.
    from epcomm.kernels.nvlink.common.barrier import LivingRanks

_MAX_POLLS = 2**31 - 1
# The signals of a barrier begin at a line of the L2 cache.
_LINE_BYTES = 128
_WORD_BYTES = 4


class NVLinkHost(ABC, Generic[LayoutT]):
    """The base of the buffers of both modes; under Triton's interpreter they serve CPU ranks."""

    name: ClassVar[str] = "nvlink"
    needs_one_host: ClassVar[bool] = True
    needs_nvlink: ClassVar[bool] = True
    needs_process_group: ClassVar[bool] = True
    combine_dtypes: ClassVar[frozenset[WireDtype]] = SUM_DTYPES
    # Receive buffers, unless the specification asks for another number. Tests also use 1, where a
    # missing wait fails immediately.
    num_buffers: ClassVar[int] = NUM_BUFFERS
    # The specification may limit the slots that a rank receives.
    _has_slot_budget: ClassVar[bool] = True
    # Polls of a kernel in a second: those of a GPU are timed, see POLL_BITS in signals.py; an
    # interpreter takes 1.1 ms for one on a busy machine.
    polls_per_s: ClassVar[Mapping[str, int]] = MappingProxyType({"cuda": 954, "cpu": 1_000})

    # These are created when memory is opened.
    _layout: LayoutT
    _blocks: PeerBlocks[LayoutT]
    _living: LivingRanks
    _report: WaitReport

    def __init__(self, calls: Calls, spec: BufferSpec, num_counters: int) -> None:
        collectives = calls.collectives
        self._calls, self._collectives, self._spec = calls, collectives, spec
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self._device = collectives.device
        self._faults = DeviceFaults(collectives.names, self._device)
        # Bytes sent to peers; survives a resize.
        self._counters = torch.zeros(num_counters, dtype=torch.int64, device=self._device)
        self._memory: SymmetricMemory | None = None
        self._streams = collectives.streams
        self._is_cuda = self._device.type == "cuda"

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        # Which peers the device reaches depends on the ranks; planning checks it (needs_nvlink).
        return Availability.judge(
            missing=triton_reasons(machine),
            command="pip install --upgrade 'torch>=2.11' triton",
            absent=cuda_reasons(machine),
            needs="NVIDIA GPUs of one host that NVLink joins",
        )

    @classmethod
    def num_buffers_of(cls, spec: BufferSpec) -> int:
        """Return the number of receive buffers: the batches that may be in flight."""
        return spec.batches_in_flight or cls.num_buffers

    @classmethod
    @abstractmethod
    def _max_slots_of(cls, spec: BufferSpec, num_rows: int) -> int:
        """Return C of an index over R rows."""

    @property
    @abstractmethod
    def _num_programs(self) -> int:
        """Return P, the programs of every kernel that sends; equal on all ranks."""

    @abstractmethod
    def _start_anew(self) -> None:
        """Reset signals and states to their first values; no kernel is running. Local."""

    def received_rows(self) -> tuple[WireTensor, ...]:
        """Return [W * M, H] of each receive buffer, views of memory that peers write. Local."""
        block, layout, spec = self._block, self._layout, self._spec
        return tuple(
            received_rows(block, layout, buffer_index, spec.dispatch_format, spec.hidden_size)
            for buffer_index in range(layout.num_buffers)
        )

    def exclude_ranks(self, ranks: Sequence[int]) -> None:
        """Continue without dead ranks: do not wait for them, and send nothing to them.

        Entries of topk_ids for experts of excluded ranks count as -1, and sums leave them out. An
        EPTimeout has named the missing ranks; every remaining rank must pass the same ranks.
        Unfinished calls are lost, and recorded faults are cleared, the EPTimeout too. Captured
        graphs may be replayed afterwards. An excluded rank stays excluded until a new buffer is
        opened.

        Args:
            ranks: the ranks to exclude; ranks excluded before stay excluded.

        Collective: yes, among the ranks that are left, at one point in the order of their calls.
        Host sync: yes.
        Raises:
            ConfigError: a rank is not in the group, or is this rank; before any change.
            EPTimeout: some other rank did not arrive; it may be excluded as well.
            HandleError: the buffer is closed.
        """
        self._check_open()
        wrong = [rank for rank in ranks if rank == self._rank or not 0 <= rank < self._world_size]
        if wrong:
            raise ConfigError(
                f"exclude_ranks: ranks holds {wrong}, expected other ranks from 0 to "
                f"{self._world_size - 1} (rank {self._rank} of {self._world_size}); pass those "
                "that are missing"
            )
        self._synchronize()
        for rank in ranks:
            self._living.excluded[rank] = 1
        # After a timeout the signals of the remaining ranks differ. They meet in a barrier when no
        # kernel that writes here is in flight, reset their signals, ...
        self._await_remaining()
        self._start_anew()
        self._report.entries.zero_()
        self._synchronize()
        # ... and meet again before any of them writes.
        self._await_remaining()

    def _await_remaining(self) -> None:
        missing = self._living.device_barrier(self._max_polls)
        if missing:
            raise EPTimeout(
                f"exclude_ranks: {describe_ranks(missing)} did not arrive within "
                f"{self._collectives.kernel_timeout_s:g} s (this is rank {self._rank} of "
                f"{self._world_size}); exclude them as well, or make a new EPGroup"
            )

    def check(self) -> None:
        """Raise an error if a wait timed out, or a fault since the last check; see Buffer.check."""
        self._check_open()
        self._synchronize()
        self._report.check()
        self._raise_faults()

    def _raise_faults(self) -> None:
        num_slots = self._max_slots_of(self._spec, self._layout.num_rows)
        self._faults.check(num_slots, has_budget=self._has_slot_budget)

    def close(self) -> None:
        """Release the memory after all ranks have stopped writing to it. Idempotent.

        Collective. A missing rank is waited for until the timeout of a call, and not at all after a
        timeout. This is safe: a block exists until no process has it mapped, and the kernels of
        this rank have ended.
        """
        if self._memory is None:
            return
        self._synchronize()
        if not self._report.entries.any():
            self._living.device_barrier(self._max_polls)
        self._release()

    def abandon(self) -> None:
        """Close without waiting for other ranks."""
        if self._memory is None:
            return
        try:
            self._synchronize()
        except RuntimeError:
            # The preceding error is one of the device. torch would end the process if the memory
            # were freed now, and nobody would see that error.
            return
        self._release()

    def _release(self) -> None:
        """Drop every view of the memory."""
        self._memory = None

    @property
    def _block(self) -> Tensor:
        assert self._memory is not None, "the call has been checked"
        return self._memory.block

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _open_memory(self, layout: LayoutT) -> None:
        """Map the blocks of all ranks, zero at first; signals of the barrier follow the layout's.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: some rank has not enough memory or cannot map it, or this is a CPU
                rank whose kernels are not interpreted.
        """
        from epcomm.kernels.launch import IS_INTERPRETED
        from epcomm.kernels.nvlink.common.barrier import LivingRanks

        if self._device.type != "cuda" and not IS_INTERPRETED:
            raise BackendUnavailable(
                f"{self.name}: the group is on {self._device} (rank {self._rank} of "
                f"{self._world_size}), expected cuda; use backend='shared_memory'"
            )
        flags_at, size = align_up(layout.num_bytes, _LINE_BYTES), self._world_size
        self._memory = memory = open_symmetric_memory(
            self._calls, flags_at + _WORD_BYTES * size, phase=f"open {self.name}"
        )
        # The layout changes only now: where memory cannot grow, the old one stays in use.
        self._layout, addresses, device = layout, memory.addresses, memory.block.device
        self._living = LivingRanks([base + flags_at for base in addresses], self._rank, device)
        self._report = WaitReport(self._collectives, self.name)
        self._blocks = PeerBlocks(
            rank=self._rank,
            num_programs=self._num_programs,
            max_polls=self._max_polls,
            own_address=addresses[self._rank],
            table=torch.tensor(addresses, dtype=torch.int64, device=device),
            layout=layout,
            excluded=self._living.excluded,
            counters=self._counters,
            faults=self._faults.entries,
            report=self._report.entries,
        )

    def _host_barrier(self) -> None:
        """Wait until the devices of all ranks have done what was launched.   Collective: yes."""
        self._synchronize()
        self._calls.gather_records({}, phase=f"open {self.name}")

    def _empty_call(self, dtype: torch.dtype) -> DispatchCall:
        """Return a batch without tokens, by which kernels are compiled and loaded."""
        hidden_size, top_k, device = self._spec.hidden_size, self._spec.top_k, self._device
        return DispatchCall(
            hidden_states=torch.empty(0, hidden_size, dtype=dtype, device=device),
            topk_ids=torch.empty(0, top_k, dtype=torch.int64, device=device),
            topk_weights=torch.empty(0, top_k, dtype=torch.float32, device=device),
            flags=BatchFlags.NONE,
        )

    def _begin_call(self) -> None:
        """Refuse a call that cannot succeed; order it after the previous call on the device."""
        self._check_open()
        self._report.check()
        self._follow()

    def _follow(self) -> None:
        """Order what follows after the last call of any buffer of the group, on the device."""
        if self._is_cuda:
            self._streams.follow(self._device)

    def _check_open(self) -> None:
        if self._memory is None:
            raise HandleError(
                f"{self.name}: the buffer is closed (rank {self._rank} of {self._world_size}); "
                "make a new EPGroup"
            )

    @property
    def _max_polls(self) -> int:
        polls = self._collectives.kernel_timeout_s * self.polls_per_s[self._device.type]
        return min(_MAX_POLLS, max(1, int(polls)))
