"""Move tokens with the low-latency kernels of the Ascend deep_ep, in memory of fixed size.

A dispatch returns M * W * min(K, L) packed rows, of which the first sum(counts) are defined; the
counts stay on the device. Combine takes all rows and multiplies by the router weights, which the
exchange plan keeps. Hooks, events and cleaning of the package do nothing: all work is ordered by
the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.buffers.ascend.base import (
    AscendBuffer,
    AscendExchangePlan,
    packed_caps,
    slots_from_ranks,
)
from epcomm.buffers.ascend.calls import slot_bytes
from epcomm.buffers.base import Buffer, Dispatched
from epcomm.buffers.sizes import Region
from epcomm.calls.call import DispatchCall
from epcomm.config import Mode
from epcomm.ops.masked_entries import has_no_expert
from epcomm.platforms.ascend.chip import Soc, current_soc
from epcomm.platforms.ascend.environment import Rounds
from epcomm.platforms.ascend.limits import (
    MAX_LOCAL_EXPERTS_TIMES_RANKS,
    Limits,
    low_latency_limits,
    low_latency_window_bytes,
)
from epcomm.records import SlotIndex
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import Int8Profile


@dataclass(frozen=True, kw_only=True, eq=False)
class AscendLowLatencyExchangePlan(AscendExchangePlan):
    """The plan of a low-latency dispatch, with the tensors that combine takes.

    topk_ids, topk_weights: [T, K] as sent; weights are float32, 0 for masked entries.
    has_failed: bool scalar on the device: the call was refused.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    has_failed: Tensor


class AscendLowLatencyBuffer(AscendBuffer, Buffer):
    """Low latency with static sizes and no host sync."""

    name: ClassVar[str] = "ascend"
    mode: ClassVar[Mode] = Mode.LOW_LATENCY
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.LOW_LATENCY})
    dispatching: ClassVar[str] = "low_latency_dispatch"
    calls: ClassVar[Mapping[str, Sequence[str]]] = MappingProxyType(
        {
            "__init__": ("group", "low_latency_mode"),
            "low_latency_dispatch": (
                "x",
                "topk_idx",
                "num_max_dispatch_tokens_per_rank",
                "num_experts",
                "topk_weights",
            ),
            "low_latency_combine": ("x", "topk_idx", "topk_weights", "handle"),
        }
    )

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(
            packed_caps(low_latency_limits(current_soc()).max_tokens),
            is_static=True,
            has_slot_budget=False,
            int8_profiles=frozenset({Int8Profile.RINT127}),
        )

    @classmethod
    def _limits(cls, soc: Soc | None) -> Limits:
        return low_latency_limits(soc)

    @classmethod
    def _window_bytes(cls, spec: BufferSpec, world_size: int, rounds: Rounds) -> int | None:
        has_limit = spec.max_tokens_per_rank is not None
        return low_latency_window_bytes(spec, world_size) if has_limit else None

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = super().lacks(mode, spec, world_size)
        rows = spec.num_local_experts * world_size
        if rows <= MAX_LOCAL_EXPERTS_TIMES_RANKS:
            return reasons
        most = MAX_LOCAL_EXPERTS_TIMES_RANKS
        return (*reasons, f"experts of one rank * ranks is {rows}, at most {most}")

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        num_slots, (row, combine_bytes) = _num_slots(spec, world_size), slot_bytes(spec)
        sizes = {
            "window of the process group": low_latency_window_bytes(spec, world_size),
            "received slots": num_slots * row,
            "expert results": num_slots * combine_bytes,
        }
        return tuple(Region(name=name, max_bytes=size) for name, size in sizes.items())

    def prepare(self) -> None:
        self._open(self._process_group, low_latency_mode=True)
        self._max_slots = _num_slots(self._spec, self._world_size)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        ids, fault, _ = self._guard_on_device(call)
        has_failed = self._record(call, fault, fault * 0, self._max_slots)
        sent = self._sent(call, ids)
        received, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            x=sent.hidden_states,
            topk_idx=sent.topk_ids,
            num_max_dispatch_tokens_per_rank=self._spec.max_tokens_per_rank,
            num_experts=self._num_experts,
            topk_weights=sent.topk_weights,
            **self._format_arguments,
        )
        index = SlotIndex(
            row_of_slot=None,
            slots_of_row=None,
            num_tokens_per_expert=counts.to(torch.int32),
            first_slot=F.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
            host_num_tokens_per_expert=None,
        )
        exchange_plan = AscendLowLatencyExchangePlan(
            num_tokens=ids.shape[0],
            num_rows=self._max_slots,
            index=index,
            handle=handle,
            topk_ids=sent.topk_ids,
            topk_weights=sent.topk_weights,
            slots_from_rank=slots_from_ranks(handle[1], self._world_size),
            # After a fault y is NaN everywhere.
            is_empty=has_no_expert(ids) & ~has_failed,
            has_failed=has_failed,
        )
        return self._dispatched(self._wire(received), sent.topk_ids, exchange_plan)

    def _return_rows(self, rows: Tensor, exchange_plan: AscendExchangePlan) -> Tensor:
        assert isinstance(exchange_plan, AscendLowLatencyExchangePlan), (
            "an exchange plan of this buffer"
        )
        y, _, _ = self._buffer.low_latency_combine(
            x=rows.contiguous(),
            topk_idx=exchange_plan.topk_ids,
            topk_weights=exchange_plan.topk_weights,
            handle=exchange_plan.handle,
        )
        return y.masked_fill(exchange_plan.has_failed, float("nan"))


def _num_slots(spec: BufferSpec, world_size: int) -> int:
    """Return the number of rows that the package allocates."""
    assert spec.max_tokens_per_rank is not None, "low latency has a limit"
    return spec.max_tokens_per_rank * world_size * min(spec.top_k, spec.num_local_experts)
