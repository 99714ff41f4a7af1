"""Compute FuseEP in plain torch over any group: the steps of the fused operators one by one.

Tokens are sent as INT8 codes with one scale each. An expert multiplies codes exactly, scales the
sums to float32, applies SwiGLU, quantises again, multiplies, and rounds the results to bfloat16.
CollectiveBuffer moves the tokens and sums the weighted results in float32, so that nothing is
rounded between the results of the experts and y.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.collective.all_to_all import CollectiveBuffer
from epcomm.buffers.collective.base import COLLECTIVE_CAPS
from epcomm.buffers.fused import FusedBackend, FuseEPResult, check_packed
from epcomm.buffers.sizes import CallShape, Region
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.call import DispatchCall
from epcomm.calls.order import Calls
from epcomm.config import Mode
from epcomm.errors import HandleError
from epcomm.ops.slots import gather_rows
from epcomm.platforms.machine import Machine
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import RowsPer, WireDtype, WireFormat, WireTensor
from epcomm.weights.quantized import INT8_MAX, Int8ChannelWeights

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
        self._is_closed = False

    def prepare(self) -> None:
        self._buffer.prepare()

    def run(self, call: DispatchCall, experts: Int8ChannelWeights) -> FuseEPResult:
        check_packed(experts, Int8ChannelWeights, self.name)
        if self._is_closed:
            raise HandleError(f"{self.name}: the operator is closed; make a new EPGroup")
        out = self._buffer.dispatch(call)
        assert out.slot_weights is not None, "weights travel with the rows"
        assert out.rows.scales is not None, "rows travel as INT8"
        slots = WireTensor(
            data=gather_rows(out.rows.data, out.index),
            format=out.rows.format,
            scales=gather_rows(out.rows.scales, out.index),
        )
        counts = out.index.host_num_tokens_per_expert
        assert counts is not None, "sizes are exact"
        results = compute_experts(slots, counts, experts)
        y, _ = self._buffer.combine(
            results.float(), out.exchange_plan, rows_per=RowsPer.SLOT, slot_weights=out.slot_weights
        )
        return FuseEPResult(
            y=y.to(call.unquantized.dtype),
            num_tokens_per_expert=out.index.num_tokens_per_expert,
            num_slots=sum(counts),
            num_rows=out.exchange_plan.num_rows,
        )

    def check(self) -> None:
        """Do nothing, because run() raises all faults."""

    def traffic(self) -> BufferTraffic:
        return self._buffer.traffic()

    def close(self) -> None:
        self._is_closed = True
        self._buffer.close()


def compute_experts(
    slots: WireTensor, counts: tuple[int, ...], experts: Int8ChannelWeights
) -> Tensor:
    """Compute the W8A8 experts of packed slots.

    Args:
        slots: INT8 [S, H] with scales [S, 1], in expert-major order.
        counts: [L], slots of each expert, S in all.
        experts: the experts of this rank.

    Returns:
        [S, H], bfloat16, without router weights.
    """
    assert slots.scales is not None, "INT8 rows have scales"
    results = torch.empty(slots.data.shape, dtype=torch.bfloat16, device=slots.data.device)
    end = 0
    for expert, count in enumerate(counts):
        start, end = end, end + count
        codes, scales = slots.data[start:end], slots.scales[start:end]
        sums = _integer_product(codes, experts.gate_up_proj[expert])
        hidden = sums * experts.gate_up_scale[expert] * scales
        gate, up = hidden.chunk(2, dim=1)
        codes, scales = _to_codes(gate * torch.sigmoid(gate) * up)
        sums = _integer_product(codes, experts.down_proj[expert])
        results[start:end] = (sums * experts.down_scale[expert] * scales).to(torch.bfloat16)
    return results


def _integer_product(codes: Tensor, matrix: Tensor) -> Tensor:
    """Return the exact product of codes [N, K] and a matrix [M, K], int8: [N, M], float32."""
    # Sums of products of codes are integers below 2**53, which float64 represents exactly.
    return (codes.double() @ matrix.double().T).float()


def _to_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise float32 [N, I] to codes rint(v * 127 / amax), int8, and scales amax / 127, [N, 1].

    Codes and scale of a row of zeros are 0.
    """
    amax = values.abs().amax(dim=1, keepdim=True)
    largest = torch.full_like(amax, INT8_MAX)
    # torch computes `127 / amax` as 127 times a rounded reciprocal, so it is not used.
    factor = torch.where(amax > 0, torch.div(largest, amax), 0.0)
    return (values * factor).round().to(torch.int8), amax / largest


def _exchange_spec(spec: BufferSpec) -> BufferSpec:
    return replace(spec, hidden_format=_FLOAT32, intermediate_size=None)
