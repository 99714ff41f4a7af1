"""Move tokens with the normal kernels of the Ascend deep_ep: one packed row for each slot.

Combine of the package multiplies by the router weights of the dispatch, so the runner must not.
The ids and weights that dispatch returns are uninitialised, and if no row arrives it returns one
undefined row, so only the counts are read. Each dispatch directly follows its layout call, which
sets state of the Buffer. There are no cached handles, hence no backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

import torch
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
from epcomm.platforms.ascend.chip import Soc
from epcomm.platforms.ascend.environment import Rounds, current_rounds, rounds_reasons
from epcomm.platforms.ascend.limits import Limits, normal_limits, normal_window_bytes
from epcomm.platforms.machine import Machine
from epcomm.records import SlotIndex
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import Int8Profile, WireTensor


class AscendNormalBuffer(AscendBuffer, Buffer):
    """Inference with exact sizes; the host waits for the counts once per dispatch."""

    name: ClassVar[str] = "ascend"
    mode: ClassVar[Mode] = Mode.NORMAL
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL})
    dispatching: ClassVar[str] = "dispatch"
    calls: ClassVar[Mapping[str, Sequence[str]]] = MappingProxyType(
        {
            "__init__": ("group",),
            "get_dispatch_layout": ("topk_idx", "num_experts"),
            "dispatch": (
                "x",
                "num_tokens_per_rank",
                "is_token_in_rank",
                "num_tokens_per_expert",
                "topk_idx",
                "topk_weights",
            ),
            "combine": ("x", "handle"),
        }
    )

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(
            packed_caps(current_rounds().max_tokens),
            # The package computes RINT127EPS; the two differ only for magnitudes below 2e-5.
            int8_profiles=frozenset({Int8Profile.RINT127, Int8Profile.RINT127EPS}),
        )

    @classmethod
    def _limits(cls, soc: Soc | None) -> Limits:
        return normal_limits(soc)

    @classmethod
    def lacks_with(cls, machine: Machine, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = super().lacks_with(machine, spec, world_size)
        return (*reasons, *rounds_reasons(machine.environment))

    @classmethod
    def _window_bytes(cls, spec: BufferSpec, world_size: int, rounds: Rounds) -> int:
        return normal_window_bytes(spec, rounds.window_tokens(spec.max_tokens_per_rank))

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        tokens = spec.max_tokens_per_rank
        row, combine_bytes = slot_bytes(spec)
        most = None if tokens is None else tokens * world_size * spec.top_k
        window = cls._window_bytes(spec, world_size, current_rounds())

        def slots(name: str, size: int) -> Region:
            return Region(
                name=name,
                bytes_per_token=spec.top_k * size,
                max_bytes=None if most is None else most * size,
            )

        return (
            Region(name="window of the process group", max_bytes=window),
            slots("received slots", row),
            slots("expert results", combine_bytes),
        )

    def prepare(self) -> None:
        self._open(self._process_group)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        ids, _ = self._guard(call)
        sent = self._sent(call, ids)
        per_rank, _, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
            topk_idx=sent.topk_ids, num_experts=self._num_experts
        )
        received, _, _, counts, handle, _ = self._buffer.dispatch(
            x=sent.hidden_states,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=sent.topk_ids,
            topk_weights=sent.topk_weights,
            **self._format_arguments,
        )
        self._raise_own(call)
        num_slots = sum(counts)
        exchange_plan = AscendExchangePlan(
            num_tokens=ids.shape[0],
            num_rows=num_slots,
            index=_index_of(counts, ids.device),
            handle=handle,
            slots_from_rank=slots_from_ranks(handle[5], self._world_size),
            is_empty=has_no_expert(ids),
        )
        # The undefined row of a dispatch that receives no row is left out.
        return self._dispatched(
            _first_rows(self._wire(received), num_slots), sent.topk_ids, exchange_plan
        )

    def _return_rows(self, rows: Tensor, exchange_plan: AscendExchangePlan) -> Tensor:
        if exchange_plan.num_rows == 0:
            # dispatch() has returned one undefined row, and combine() expects the same number.
            rows = rows.new_zeros(1, rows.shape[1])
        return self._buffer.combine(x=rows.contiguous(), handle=exchange_plan.handle)[0]


def _first_rows(wire: WireTensor, num_rows: int) -> WireTensor:
    scales = None if wire.scales is None else wire.scales[:num_rows]
    return replace(wire, data=wire.data[:num_rows], scales=scales)


def _index_of(counts: list[int], device: torch.device) -> SlotIndex:
    host = torch.tensor(counts, dtype=torch.int32, device="cpu")
    first = torch.cat([host.new_zeros(1), host.cumsum(0).to(torch.int32)])
    return SlotIndex(
        row_of_slot=None,
        slots_of_row=None,
        num_tokens_per_expert=host.to(device, non_blocking=True),
        first_slot=first.to(device, non_blocking=True),
        host_num_tokens_per_expert=tuple(counts),
        is_dense=True,
    )
