"""Compute FuseEP in plain torch over any group: the steps of the fused operators one by one.

Tokens are sent as INT8 codes with one scale each. Experts compute as runner quantized_reference
does, and round their results to bfloat16. CollectiveBuffer moves the tokens and sums the weighted
results in float32, so that nothing is rounded between the results of the experts and y.
"""

from dataclasses import replace
from typing import ClassVar

import torch

from epcomm.buffers.collective.all_to_all import CollectiveBuffer
from epcomm.buffers.collective.base import COLLECTIVE_CAPS
from epcomm.buffers.fused import FusedBackend, FuseEPResult, check_packed
from epcomm.buffers.sizes import CallShape, Region
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.call import DispatchCall
from epcomm.calls.order import Calls
from epcomm.config import Mode
from epcomm.platforms.machine import Machine
from epcomm.runners.quantized_reference import compute_experts
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import RowsPer, WireDtype, WireFormat
from epcomm.weights.quantized import Int8ChannelWeights

_FLOAT32 = WireFormat(dtype=WireDtype.FP32)


class FuseEPReference(FusedBackend[Int8ChannelWeights]):
    """FuseEP with exact sizes on any device; the host waits for the counts."""

    name: ClassVar[str] = "fuseep_reference"

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        return Availability(ok=True)

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(
            COLLECTIVE_CAPS,
            trainable=False,
            wire_dtypes=frozenset({WireDtype.INT8}),
            combine_dtypes=frozenset(),
        )

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        return CollectiveBuffer.region_bytes(_exchange_spec(spec), world_size)

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        return CollectiveBuffer.wire_bytes(_exchange_spec(spec), call, backward=backward)

    @classmethod
    def pack(cls, weights: Int8ChannelWeights) -> Int8ChannelWeights:
        return weights

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        self._buffer = CollectiveBuffer(calls, _exchange_spec(spec))

    def prepare(self) -> None:
        self._buffer.prepare()

    def run(self, call: DispatchCall, experts: Int8ChannelWeights) -> FuseEPResult:
        check_packed(experts, Int8ChannelWeights, self.name)
        out = self._buffer.dispatch(call)
        assert out.slot_weights is not None, "weights travel with the rows"
        results = compute_experts(out.rows, out.index, experts).to(torch.bfloat16).float()
        y, _ = self._buffer.combine(
            results, out.exchange_plan, rows_per=RowsPer.SLOT, slot_weights=out.slot_weights
        )
        return FuseEPResult(
            y=y.to(call.unquantized.dtype),
            num_tokens_per_expert=out.index.num_tokens_per_expert,
            num_slots=len(results),
            num_rows=out.exchange_plan.num_rows,
        )

    def check(self) -> None:
        """Do nothing, because run() raises all faults."""

    def traffic(self) -> BufferTraffic:
        return self._buffer.traffic()

    def close(self) -> None:
        self._buffer.close()


def _exchange_spec(spec: BufferSpec) -> BufferSpec:
    return replace(spec, hidden_format=_FLOAT32, intermediate_size=None)
