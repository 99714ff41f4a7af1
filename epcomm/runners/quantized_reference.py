"""Compute eight-bit experts in plain torch: it defines the arithmetic, step by step.

FP8: rows and matrices are dequantised to float32 and multiplied there. INT8: the integer products
are exact, then scaled once by row and channel. Between the two products the activations are
quantised again, to the format of the rows; router weights multiply the results in float32.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from epcomm.ops.activation import activate
from epcomm.ops.slots import gather_rows
from epcomm.quantization import dequantize, quantize
from epcomm.records import RowsDispatchOutput, SlotIndex
from epcomm.runners.base import ExpertRunner, row_major_readings, slot_weights_to_apply
from epcomm.types import Int8Profile, Layout, RowReading, WireTensor
from epcomm.weights.quantized import EightBitWeights, Fp8BlockWeights, Int8ChannelWeights
from epcomm.weights.unquantized import ExpertTensors


class QuantizedReferenceRunner(ExpertRunner):
    """Runs FP8 and INT8 experts in plain torch, one expert after another. No gradients."""

    name: ClassVar[str] = "quantized_reference"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (Fp8BlockWeights, Int8ChannelWeights)
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)
    int8_profiles: ClassVar[frozenset[Int8Profile]] = frozenset(Int8Profile)

    @classmethod
    def readings(cls, weights: ExpertTensors, layout: Layout) -> tuple[RowReading, ...]:
        # Dequantising reads FP8 rows with any known scales, whatever scales the matrices have.
        return row_major_readings(cls.wire_dtypes | {weights.wire_format.dtype}, None)

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        assert isinstance(weights, EightBitWeights), "supports() said so"
        slot_weights = slot_weights_to_apply(dispatched, self.name)
        return compute_experts(
            dispatched.hidden_states, dispatched.index, weights, self.int8_profile, slot_weights
        )


def compute_experts(
    rows: WireTensor,
    index: SlotIndex,
    weights: EightBitWeights,
    profile: Int8Profile = Int8Profile.RINT127,
    slot_weights: Tensor | None = None,
) -> Tensor:
    """Compute each slot with its expert, [C, H], in the dtype of hidden states; padding is 0."""
    slots, starts = _gather_wire(rows, index), index.first_slot.tolist()
    counts = index.host_num_tokens_per_expert or index.num_tokens_per_expert.tolist()
    shape = (len(slots.data), weights.hidden_size)
    results = slots.data.new_zeros(shape, dtype=weights.hidden_dtype)
    for expert, count in enumerate(counts):
        mine = slice(starts[expert], starts[expert] + count)
        result = _run_expert(_part(slots, mine), weights, expert, profile)
        if slot_weights is not None:
            result = result * slot_weights[mine].unsqueeze(1)
        results[mine] = result.to(weights.hidden_dtype)
    return results


def _gather_wire(rows: WireTensor, index: SlotIndex) -> WireTensor:
    """Copy the row of each slot with its scales, [R, H] to [C, H]; padding slots are zero."""
    if not rows.format.dtype.is_quantized:
        return WireTensor(data=gather_rows(rows.data, index), format=rows.format)
    assert rows.scales is not None, "quantised rows have scales"
    codes, scales = (_gather_any(part, index) for part in (rows.data, rows.scales))
    return WireTensor(data=codes, format=rows.format, scales=scales)


def _gather_any(rows: Tensor, index: SlotIndex) -> Tensor:
    """Gather rows, viewing elements of one byte as uint8, because torch cannot index them."""
    if rows.itemsize > 1:
        return gather_rows(rows, index)
    return gather_rows(rows.view(torch.uint8), index).view(rows.dtype)


def _part(rows: WireTensor, mine: slice) -> WireTensor:
    scales = None if rows.scales is None else rows.scales[mine]
    return WireTensor(data=rows.data[mine], format=rows.format, scales=scales)


def _run_expert(
    rows: WireTensor,
    weights: EightBitWeights,
    expert: int,
    profile: Int8Profile,
) -> Tensor:
    """Compute the rows [n, H] of one expert, and return [n, H], float32."""
    mine = weights.with_tensors(
        {name: tensor[expert : expert + 1] for name, tensor in weights.tensors().items()}
    )
    multiply = _multiply_fp8 if isinstance(mine, Fp8BlockWeights) else _multiply_int8
    if not rows.format.dtype.is_quantized:
        rows = quantize(rows.data, weights.wire_format, profile=profile)
    hidden = activate(multiply(rows, mine, "gate_up"), mine.format)
    return multiply(quantize(hidden, rows.format, profile=profile), mine, "down")


def _multiply_fp8(rows: WireTensor, weights: ExpertTensors, name: str) -> Tensor:
    assert isinstance(weights, Fp8BlockWeights), "chosen by kind"
    matrix = weights.dequantized()[f"{name}_proj"][0]
    return dequantize(rows, torch.float32) @ matrix.T


def _multiply_int8(rows: WireTensor, weights: ExpertTensors, name: str) -> Tensor:
    assert rows.scales is not None, "quantised rows have scales"
    codes, scale = weights.tensors()[f"{name}_proj"][0], weights.tensors()[f"{name}_scale"][0]
    # float64 holds every sum of products of int8 exactly, and is faster than integers on a CPU.
    product = rows.data.double() @ codes.double().T
    return product.float() * rows.scales.float() * scale
