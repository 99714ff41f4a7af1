"""Move tokens once a host with static shapes: low latency, or a slot budget, on several hosts.

The host reads nothing that depends on the routing. Each rank sends M rows to every host, where the
ranks see all of them. What is wrong travels on the device: what ranks hear in dispatch between
hosts they tell inside theirs, and what is new there, such as an overflow, they tell in the combine
between hosts. So y is NaN on all ranks, and check() names the rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from epcomm.buffers.base import Buffer, Combined
from epcomm.buffers.collective.all_to_all_static import (
    StaticCollectiveBuffer,
    StaticExchangePlan,
    num_static_slots,
)
from epcomm.buffers.hierarchical.buffer import HierarchicalBuffer, HierarchicalExchangePlan
from epcomm.buffers.hierarchical.outer import StaticHostRowsBuffer
from epcomm.buffers.hierarchical.sizes import hosts_of, inner_spec, num_places, outer_spec
from epcomm.buffers.sizes import CallShape, Region
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.faults import new_faults, pass_on
from epcomm.calls.order import Calls
from epcomm.config import Mode
from epcomm.errors import CapacityError, EPError
from epcomm.records import ExchangePlan
from epcomm.spec import BufferCaps, BufferSpec


class HierarchicalStaticBuffer(HierarchicalBuffer):
    """Serves low latency, and normal mode with a budget, over collectives on several hosts."""

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL, Mode.LOW_LATENCY})

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return StaticCollectiveBuffer.caps(mode)

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        hosts = hosts_of(spec)
        outer = StaticHostRowsBuffer.region_bytes(outer_spec(spec), hosts.num_hosts)
        inside = _static_inner_spec(spec)
        return outer + StaticCollectiveBuffer.region_bytes(inside, num_places(hosts))

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        by_link = call.by_link
        assert by_link is not None, "where hosts are known, the call tells what goes between"
        assert by_link.outer is not None, "hosts are even"
        assert by_link.inner is not None, "hosts are even"
        outer, inner = outer_spec(spec), _static_inner_spec(spec)
        between = StaticHostRowsBuffer.wire_bytes(outer, by_link.outer, backward=backward)
        inside = StaticCollectiveBuffer.wire_bytes(inner, by_link.inner, backward=backward)
        return between.all_between() + inside

    def _way_home(self, exchange_plan: HierarchicalExchangePlan, sums: Combined) -> ExchangePlan:
        """Return a plan along which other hosts hear of what is new in this one."""
        outer, inner = exchange_plan.outer, exchange_plan.inner
        assert isinstance(outer, StaticExchangePlan), "of StaticHostRowsBuffer"
        assert isinstance(inner, StaticExchangePlan), "of StaticCollectiveBuffer"
        fault = pass_on(new_faults(inner.faults))
        if sums.faults is not None:
            fault = torch.where(fault[0] == 0, pass_on(new_faults(sums.faults)), fault)
        # What ranks heard in dispatch between hosts, they have told in every host.
        has_failed = outer.has_failed | inner.has_failed
        return replace(outer, fault=fault, has_failed=has_failed)

    def check(self) -> None:
        """Raise what has failed; both exchanges may have heard of it, and both forget it."""
        problems: list[EPError] = []
        for buffer in (self._inner, self._outer):
            try:
                buffer.check()
            except EPError as problem:
                problems.append(problem)
        # Of few elements, rows do not tell other hosts how many slots an overflow needs.
        problems.sort(key=lambda problem: not isinstance(problem, CapacityError))
        if problems:
            raise problems[0]

    def _make_buffers(self, between: Calls, inside: Calls) -> tuple[Buffer, Buffer]:
        hosts, inner = hosts_of(self._spec), _static_inner_spec(self._spec)
        same_places = tuple(zip(*hosts.ranks_of_host, strict=True))
        return (
            StaticHostRowsBuffer(
                between,
                outer_spec(self._spec),
                origins=hosts.ranks_of_host,
                num_slots=num_static_slots(inner, num_places(hosts)),
                has_budget=inner.max_recv_slots is not None,
            ),
            StaticCollectiveBuffer(inside, inner, origins=same_places),
        )


def _static_inner_spec(spec: BufferSpec) -> BufferSpec:
    """Return the specification inside a host: the rows of a host are M tokens and a header."""
    most = spec.max_tokens_per_rank
    assert most is not None, "plan() has checked the limit"
    return replace(inner_spec(spec), max_tokens_per_rank=(1 + most) * hosts_of(spec).num_hosts)
