"""Counts of a dispatch of normal mode over NVLink, which a kernel writes and its host reads."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from epcomm.buffers.nvlink.waits import host_words
from epcomm.calls.call import DispatchCall
from epcomm.calls.counts import any_flags, check_headers
from epcomm.errors import RankNames
from epcomm.kernels.nvlink.common.layout import NormalLayout
from epcomm.kernels.nvlink.common.plan_parts import IndexSizes
from epcomm.protocol import FLAGS_SHIFT, BatchFlags, FaultCode, fault_word_of_byte, unpack_status
from epcomm.types import align_up


@dataclass(frozen=True, kw_only=True)
class NormalCounts:
    """The counts of a dispatch that the host reads.

    most_tokens: T of the rank that has most.   any_flags: the flags of all ranks, or-ed.
    sizes: those of an index over the received rows, numbered without gaps.
    """

    most_tokens: int
    sizes: IndexSizes
    any_flags: BatchFlags

    @classmethod
    def of(
        cls,
        totals: list[int],
        call: DispatchCall,
        layout: NormalLayout,
        names: RankNames,
        dead: Sequence[int],
        alignment: int,
    ) -> NormalCounts:
        """Read the totals that Totals.wait() returned.

        Raises:
            ShapeError, CapacityError, ConfigError: as check_headers().
        """
        size = layout.world_size
        flags, statuses = call.flags, totals[:size]
        own_status = int(flags) << FLAGS_SHIFT
        # There is nothing to compare if all ranks have the same flags and no fault.
        if call.error is not None or statuses.count(own_status) != size:
            headers = [unpack_status(status) for status in statuses]
            for other in dead:
                # The flags of excluded ranks never differ from the others.
                headers[other] = FaultCode.NONE, call.flags
            codes, all_flags = zip(*headers, strict=True)
            words = list(map(fault_word_of_byte, codes, names.numbers))
            check_headers(words, all_flags, call, layout.num_local_experts * size, names)
            flags = any_flags(all_flags)
        per_expert = tuple(totals[3 * size :])
        is_dense = alignment == 1 or not any(each % alignment for each in per_expert)
        slots = per_expert if is_dense else [align_up(each, alignment) for each in per_expert]
        sizes = IndexSizes(
            num_rows=sum(totals[2 * size : 3 * size]),
            num_slots=sum(slots),
            per_expert=per_expert,
            is_dense=is_dense,
        )
        return cls(most_tokens=max(totals[size : 2 * size]), sizes=sizes, any_flags=flags)


class Totals:
    """The totals of one dispatch, which a kernel writes and the host reads.

    entries: [3 * W + L], int32, negative until a kernel has written them, see push_rows().

    The memory is reused after a kernel has written all entries. After a timeout the kernel may
    still write.
    """

    def __init__(self, layout: NormalLayout, device: torch.device) -> None:
        """Allocate memory that the host and the device see."""
        num_entries = 3 * layout.world_size + layout.num_local_experts
        self.entries, self._words = host_words(num_entries, device)
        self.begin()

    def begin(self) -> None:
        """Make all entries negative, for the next call."""
        ctypes.memset(self._words, 0xFF, ctypes.sizeof(self._words))

    def wait(self, check: Callable[[], None], timeout_s: float) -> list[int] | None:
        """Wait until a kernel has written the totals, and return them; None after timeout_s.

        check: raises the timeout that a kernel has reported.

        Host sync: yes.
        """
        # A kernel that never runs reports nothing, so the host has a timeout too.
        deadline = time.monotonic() + timeout_s
        while time.monotonic() <= deadline:
            totals = self._words[:]
            if min(totals) >= 0:
                return totals
            check()
        return None
