"""Normal mode over NVLink with a budget of slots: for graphs, and hosts that must not wait."""

from __future__ import annotations

from typing import ClassVar

import torch

from epcomm.buffers.base import DispatchCall, Dispatched
from epcomm.buffers.faults import assume_all_need_grad
from epcomm.buffers.nvlink.normal import NVLinkNormal
from epcomm.buffers.nvlink.normal_plans import NVLinkNormalExchangePlan
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.protocol import BatchFlags
from epcomm.spec import BufferCaps


class NVLinkStaticBuffer(NVLinkNormal):
    """A budget of slots, no host sync: for graphs, and where the host must not wait."""

    name: ClassVar[str] = "nvlink"

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return cls._caps(is_static=True)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._begin_call()
        num_tokens = call.hidden_states.shape[0]
        assert num_tokens <= self._layout.max_tokens, "the dispatcher has checked T"
        self._faults.note_own(call.error)
        buffer_index, sends = self._next_buffer_index(), self._plan_memory.sends(num_tokens)
        self._push(call, sends, buffer_index, None)
        num_rows = self._layout.num_rows
        num_slots = self._max_slots_of(self._spec, num_rows)
        exchange_plan = NVLinkNormalExchangePlan(
            num_tokens=num_tokens,
            num_rows=num_rows,
            index=self._plan_memory.index(num_rows, num_slots, None, is_dense=False),
            sends=sends,
            arrivals=self._plan_memory.arrivals(),
            owns_rows=bool(call.flags & BatchFlags.GRAD_ENABLED),
            capacity_tokens=self._layout.max_tokens,
            batch=self._last_batch,
        )
        slot_weights = torch.zeros(num_slots, device=self._device)
        rows = self._index(
            exchange_plan, slot_weights, buffer_index, is_compact=False, has_budget=True
        )
        return Dispatched(
            rows=rows,
            index=exchange_plan.index,
            slot_weights=slot_weights,
            exchange_plan=exchange_plan,
            any_flags=assume_all_need_grad(call.flags),
        )

    def _compare_combine(self, error: EPError | None = None) -> None:
        """Nobody waits: a refused combine is NaN, and check() tells."""
