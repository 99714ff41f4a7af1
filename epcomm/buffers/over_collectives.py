"""What the buffers over plain collectives share: memory for rows on their way, one refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Availability, Buffer, BufferCaps, BufferSpec
from epcomm.buffers.faults import FaultCode, raise_faults
from epcomm.buffers.row_layout import RowLayout
from epcomm.buffers.scratch import Scratch
from epcomm.buffers.traffic import BufferTraffic, TrafficMeter
from epcomm.collectives.base import Collectives
from epcomm.errors import EPError
from epcomm.records import Pending
from epcomm.types import Layout, WeightsAppliedBy, WireDtype, WireFormat

# What every buffer here hands out and carries.
COLLECTIVE_CAPS = BufferCaps(
    layout=Layout.ROWS,
    trainable=True,
    graph_safe=False,
    ordered=True,
    wire_dtypes=frozenset(WireDtype),
    weights_applied_by=frozenset(WeightsAppliedBy),
)


class OverCollectives(Buffer):
    """A buffer that needs nothing but `Collectives`, so it serves wherever a group does."""

    name: ClassVar[str]

    @classmethod
    def probe(cls, environment: Mapping[str, str]) -> Availability:
        return Availability(ok=True)

    def __init__(self, collectives: Collectives, spec: BufferSpec) -> None:
        self._collectives = collectives
        self._spec = spec
        self._traffic = TrafficMeter(collectives.rank)
        self._waits = collectives.bounded is not None
        self._sent = Scratch(collectives.device, keeps=self._waits)
        self._home = Scratch(collectives.device, keeps=self._waits)

    def prepare(self) -> None:
        """Nothing to allocate: sizes are known only with the calls."""

    def refuse_combine(self, error: EPError) -> None:
        self._compare_calls(error).wait()

    def _compare_calls(
        self, error: EPError | None = None, *, is_forward: bool = True
    ) -> Pending[None]:
        """Begin to ask who refuses its combine call; wait() raises on every rank if any does.

        Local work goes in between, so that a rank which is done with it may send at once.
        """
        # Splits belong to one batch, and a refused call may name another, so rows cannot carry
        # this. The 8 bytes are not counted as traffic. In backward the calls are autograd's own.
        if not is_forward or not (self._waits or self._spec.compares_calls):
            return Pending(lambda: None)
        code = int(FaultCode.of(error, in_combine=True))
        mine = torch.full((1,), code, device=self._collectives.device)
        gathered = self._collectives.all_gather_async(mine, phase="combine calls")

        def wait() -> None:
            codes = gathered.wait().flatten().tolist()
            raise_faults(codes, self._collectives.rank, error, function="combine")

        return Pending(wait)

    def traffic(self) -> BufferTraffic:
        return self._traffic.snapshot()

    def check(self) -> None:
        """Nothing waits on the device: faults are raised in the call."""

    def close(self) -> None:
        self._sent.free()
        self._home.free()

    @property
    def _num_experts(self) -> int:
        return self._spec.num_local_experts * self._collectives.world_size

    def _row_layout(self, wire: WireFormat, *, has_ids: bool) -> RowLayout:
        return RowLayout(
            hidden_size=self._spec.hidden_size,
            top_k=self._spec.top_k,
            format=wire,
            has_ids=has_ids,
        )


def row_bytes_of(rows: Tensor) -> int:
    """Bytes of one row of a matrix."""
    return rows.shape[1] * rows.element_size()
