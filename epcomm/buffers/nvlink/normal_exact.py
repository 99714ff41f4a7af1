"""Normal mode over NVLink with exact sizes: the host reads counts once a dispatch."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import DispatchCall, Dispatched
from epcomm.buffers.counts import check_headers
from epcomm.buffers.faults import any_flags, raise_faults
from epcomm.buffers.nvlink.normal import NVLinkNormal
from epcomm.buffers.nvlink.normal_plans import NVLinkNormalExchangePlan
from epcomm.config import Mode
from epcomm.errors import CapacityError, EPError, EPTimeout, describe_ranks
from epcomm.protocol import BatchFlags, FaultCode, unpack_status
from epcomm.spec import BufferCaps
from epcomm.types import align_up

if TYPE_CHECKING:
    from epcomm.kernels.nvlink.normal_exchange import Sends

_logger = logging.getLogger(__name__)

# By which a buffer without a limit grows.
_TOKEN_MULTIPLE = 128


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """What the host reads of a dispatch.

    most_tokens: T of the rank that has most.   num_rows: that come.
    tokens_per_expert: [L].   any_flags: the flags of all ranks, or-ed.
    """

    most_tokens: int
    num_rows: int
    tokens_per_expert: tuple[int, ...]
    any_flags: BatchFlags


class NVLinkBuffer(NVLinkNormal):
    """Exact sizes: the host reads counts while rows are on their way."""

    name: ClassVar[str] = "nvlink"

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return cls._caps(is_static=False)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._begin_call()
        while True:
            buffer_index, sends = (
                self._next_buffer_index(),
                self._plan_memory.sends(call.hidden_states.shape[0]),
            )
            totals = self._begin_totals()
            self._push(call, sends, buffer_index, totals)
            counts = self._read_counts(self._await_totals(totals), call)
            if counts.most_tokens <= self._layout.max_tokens:
                return self._receive(call, buffer_index, sends, counts)
            self._grow(counts.most_tokens)

    def _receive(
        self, call: DispatchCall, buffer_index: int, sends: Sends, counts: _Counts
    ) -> Dispatched:
        """Wait for the rows, of which there are so many."""
        owns_rows = bool(call.flags & BatchFlags.GRAD_ENABLED)
        num_rows = counts.num_rows if owns_rows else self._layout.num_rows
        slots = counts.tokens_per_expert
        num_slots = sum(align_up(each, self._spec.expert_alignment) for each in slots)
        exchange_plan = NVLinkNormalExchangePlan(
            num_tokens=call.hidden_states.shape[0],
            num_rows=num_rows,
            index=self._plan_memory.index(
                num_rows, num_slots, slots, is_dense=num_slots == sum(slots)
            ),
            sends=sends,
            arrivals=self._plan_memory.arrivals(),
            owns_rows=owns_rows,
            capacity_tokens=self._layout.max_tokens,
            batch=self._last_batch,
        )
        slot_weights = torch.empty(num_slots, device=self._device)
        rows = self._index(
            exchange_plan, slot_weights, buffer_index, is_compact=owns_rows, has_budget=False
        )
        return Dispatched(
            rows=rows,
            index=exchange_plan.index,
            slot_weights=slot_weights,
            exchange_plan=exchange_plan,
            any_flags=counts.any_flags,
        )

    def _compare_combine(self, error: EPError | None = None) -> None:
        if self._excluded_ranks or not self._spec.compares_calls:
            # A collective would wait for the dead: y is NaN on the others, and check() tells.
            return
        code = int(FaultCode.of(error, in_combine=True))
        mine = torch.full((1,), code, device=self._device)
        codes = self._collectives.all_gather(mine, phase="combine calls").flatten().tolist()
        raise_faults(codes, self._rank, error, function="combine")

    def _begin_totals(self) -> Tensor:
        """[3 * W + L], int32, negative until a kernel has written it."""
        num_words = 3 * self._world_size + self._spec.num_local_experts
        # Of this call alone, for an earlier one may have ended in a timeout; kept, for then a
        # kernel may write it when the call has raised.
        totals = torch.empty(num_words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._totals = totals.fill_(-1)
        return totals

    def _await_totals(self, totals: Tensor) -> list[int]:
        """Return the totals of all ranks, once a kernel has written them; this is the host sync.

        Raises:
            EPTimeout: some rank did not come.
        """
        # A kernel that waits in vain reports it; this is for one that never runs.
        deadline = time.monotonic() + 2 * self._timeout_s
        while True:
            words = totals.tolist()
            if min(words) >= 0:
                return words
            self._check_report()
            if time.monotonic() > deadline:
                raise EPTimeout(
                    f"{self.name}: no counts within {2 * self._timeout_s:g} s (rank {self._rank} "
                    f"of {self._world_size}): work before this dispatch did not end; close the "
                    "group and make a new one"
                )

    def _read_counts(self, totals: list[int], call: DispatchCall) -> _Counts:
        """totals: as push_rows() writes them.

        Raises:
            ShapeError, CapacityError, ConfigError: as check_headers().
        """
        size = self._world_size
        words = [unpack_status(word) for word in totals[:size]]
        for rank in self._excluded_ranks:
            # They agree with everybody.
            words[rank] = FaultCode.NONE, call.flags
        codes, flags = zip(*words, strict=True)
        check_headers(codes, flags, call, self._spec.num_local_experts * size, self._rank)
        return _Counts(
            most_tokens=max(totals[size : 2 * size]),
            num_rows=sum(totals[2 * size : 3 * size]),
            tokens_per_expert=tuple(totals[3 * size :]),
            any_flags=any_flags(flags),
        )

    def _grow(self, num_tokens: int) -> None:
        """Grow the memory of every rank to so many tokens a rank: all have read the same counts.

        Raises:
            CapacityError: some rank is excluded; on all remaining ranks.
        """
        if self._excluded_ranks:
            raise CapacityError(
                f"dispatch: a rank has T = {num_tokens} tokens, expected at most "
                f"{self._layout.max_tokens}, for memory cannot grow without "
                f"{describe_ranks(self._excluded_ranks)} (this is rank {self._rank} of "
                f"{self._world_size}); "
                "pass max_tokens_per_rank to EPConfig, or make a new EPGroup"
            )
        # Nobody stores to the old blocks any more; views of this rank keep them.
        self._host_barrier()
        wanted = max(num_tokens, 2 * self._layout.max_tokens)
        self._open(align_up(wanted, _TOKEN_MULTIPLE))
        # The dispatch that did not fit overwrote no rows, and begins again.
        self._num_dispatches -= 1
        _logger.debug("rank %d: nvlink has capacity for %d tokens now", self._rank, wanted)
