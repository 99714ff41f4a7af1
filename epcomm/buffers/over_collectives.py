"""What the buffers over plain collectives share: no memory of their own, one kind of refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Availability, Buffer, BufferCaps, BufferSpec
from epcomm.buffers.faults import FaultCode, raise_faults
from epcomm.buffers.row_layout import RowLayout
from epcomm.buffers.traffic import BufferTraffic, TrafficMeter
from epcomm.collectives.base import Collectives
from epcomm.errors import EPError
from epcomm.types import Layout, WeightsAppliedBy, WireDtype, WireFormat

# What every buffer here hands out and carries.
COLLECTIVE_CAPS = BufferCaps(
    layout=Layout.ROWS,
    trainable=True,
    graph_safe=False,
    ordered=True,
    wire_dtypes=frozenset({WireDtype.BF16, WireDtype.FP16, WireDtype.FP32}),
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

    def prepare(self) -> None:
        """Nothing to allocate: records own their rows."""

    def announce_combine(self, error: EPError | None, *, may_wait: bool) -> None:
        # Splits belong to one batch, and a refused call may name another, so rows cannot carry
        # the announcement. Where the host waits in every verb anyway, one more is cheap.
        if self._collectives.bounded is None and not may_wait:
            return
        code = int(FaultCode.of(error, in_combine=True))
        mine = torch.full((1,), code, device=self._collectives.device)
        codes = self._collectives.all_gather(mine, phase="combine calls")
        raise_faults(codes.flatten().tolist(), self._collectives.rank, error, function="combine")

    def traffic(self) -> BufferTraffic:
        return self._traffic.snapshot()

    def check(self) -> None:
        """Nothing waits on the device: faults are raised in the call."""

    def close(self) -> None:
        """Nothing is held between calls."""

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
