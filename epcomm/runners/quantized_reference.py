"""Compute quantised experts in plain torch: it defines the arithmetic, step by step.

FP8, MX and NVFP4: rows and matrices are dequantised to float32 and multiplied there. INT8: the
integer products are exact, then scaled once by row and channel. Between the two products the
activations are quantised again, to the format of the rows; router weights multiply the results in
float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.ops.activation import activate
from epcomm.ops.fixed_blocks import BLOCK_SIZES
from epcomm.ops.slots import gather_rows, packed_index
from epcomm.platforms.machine import Machine
from epcomm.quantization import dequantize, quantize
from epcomm.records import RowsDispatchOutput, SlotIndex
from epcomm.runners.base import (
    BatchInvariance,
    ExpertRunner,
    row_major_readings,
    slot_weights_to_apply,
)
from epcomm.types import ROW_DTYPES, Int8Profile, Layout, RowReading, WireDtype, WireTensor
from epcomm.weights.quantized import (
    BlockFormatWeights,
    Fp8BlockWeights,
    Int8ChannelWeights,
    QuantizedWeights,
)
from epcomm.weights.unquantized import ExpertFormat, ExpertTensors, ExpertWeights


class QuantizedReferenceRunner(ExpertRunner):
    """Runs quantised experts in plain torch, one expert after another. No gradients."""

    name: ClassVar[str] = "quantized_reference"
    note: ClassVar[str] = "plain torch, which dequantises rows and matrices unless they are INT8"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (
        Fp8BlockWeights,
        Int8ChannelWeights,
        BlockFormatWeights,
    )
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)
    int8_profiles: ClassVar[frozenset[Int8Profile]] = frozenset(Int8Profile)
    # Rows of every product; None: all rows of an expert.
    block_rows: ClassVar[int | None] = None

    @classmethod
    def readings(cls, weights: ExpertTensors, layout: Layout) -> tuple[RowReading, ...]:
        # Dequantising reads FP8 rows with any known scales, whatever scales the matrices have.
        dtypes = cls.wire_dtypes | {weights.wire_format.dtype}
        if isinstance(weights, BlockFormatWeights):
            # Rows and matrices may differ, as mxfp8 rows and mxfp4 matrices do on some GPUs.
            dtypes = ROW_DTYPES - {WireDtype.FP64, WireDtype.INT8}
        return row_major_readings(dtypes, None)

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        assert isinstance(weights, QuantizedWeights), "supports() said so"
        return compute_experts(
            dispatched.hidden_states,
            dispatched.index,
            weights,
            self.int8_profile,
            slot_weights_to_apply(dispatched, self.name),
            self.block_rows,
        )


class QuantizedBlocksRunner(QuantizedReferenceRunner):
    """Computes blocks of one size, so that the bits of a row do not depend on other rows. CPUs.

    The results are those of QuantizedReferenceRunner, except for the order of sums.
    """

    name: ClassVar[str] = "quantized_blocks"
    is_for_sum_groups: ClassVar[bool] = True
    block_rows: ClassVar[int | None] = BLOCK_SIZES[1]

    @classmethod
    def _reasons(cls, weights: ExpertTensors, machine: Machine) -> list[str]:
        device = machine.device_of(weights.gate_up_proj)
        is_here = device.type in ("cpu", "meta")
        return [] if is_here else [f"the experts are on {device}, expected cpu"]

    @classmethod
    def batch_invariance(cls, weights: ExpertTensors, machine: Machine) -> BatchInvariance:
        assert isinstance(weights, QuantizedWeights), "supports() said so"
        sizes, threads = (weights.hidden_size, weights.intermediate_size), torch.get_num_threads()
        is_alike = _treats_rows_alike(type(weights), *sizes, weights.format, threads)
        return BatchInvariance.of_cpu(machine, is_alike)


# Cached, because plans of many layers ask.
@lru_cache(maxsize=256)
def _treats_rows_alike(
    kind: type[QuantizedWeights],
    hidden_size: int,
    intermediate_size: int,
    expert_format: ExpertFormat,
    num_threads: int,
) -> bool:
    """Return whether equal rows of a block have equal results, with this number of threads."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return values / shape[-1] ** 0.5

    weights = kind.from_unquantized(
        ExpertWeights(
            gate_up_proj=normal(1, 2 * intermediate_size, hidden_size),
            down_proj=normal(1, hidden_size, intermediate_size),
            format=expert_format,
        )
    )
    count = BLOCK_SIZES[1]
    row = normal(1, hidden_size) * hidden_size**0.5
    rows = quantize(row.expand(count, -1).contiguous(), weights.wire_format)
    index = packed_index(torch.tensor([count], device="cpu"), [count], is_dense=True)
    results = compute_experts(rows, index, weights, block_rows=count)
    return bool((results == results[0]).all())


def compute_experts(
    rows: WireTensor,
    index: SlotIndex,
    weights: QuantizedWeights,
    profile: Int8Profile = Int8Profile.RINT127,
    slot_weights: Tensor | None = None,
    block_rows: int | None = None,
) -> Tensor:
    """Compute each slot with its expert, [C, H], in the dtype of hidden states; padding is 0.

    block_rows: rows of every product, some of them padding; None: all rows of an expert.
    """
    slots, starts = _gather_wire(rows, index), index.first_slot.tolist()
    counts = index.host_num_tokens_per_expert or index.num_tokens_per_expert.tolist()
    shape = (len(slots.data), weights.hidden_size)
    results = slots.data.new_zeros(shape, dtype=weights.hidden_dtype)
    for expert, count in enumerate(counts):
        mine = slice(starts[expert], starts[expert] + count)
        result = _run_expert(slots.part(mine), weights, expert, profile, block_rows)
        if slot_weights is not None:
            result = result * slot_weights[mine].unsqueeze(1)
        results[mine] = result.to(weights.hidden_dtype)
    return results


def _gather_wire(rows: WireTensor, index: SlotIndex) -> WireTensor:
    """Copy the row of each slot with its scales, [R, H] to [C, H]; padding slots are zero."""
    scales = None if rows.scales is None else _gather_any(rows.scales, index)
    return WireTensor(data=_gather_any(rows.data, index), format=rows.format, scales=scales)


def _gather_any(rows: Tensor, index: SlotIndex) -> Tensor:
    """Gather rows, viewing elements of one byte as uint8, because torch cannot index them."""
    if rows.itemsize > 1:
        return gather_rows(rows, index)
    return gather_rows(rows.view(torch.uint8), index).view(rows.dtype)


def _run_expert(
    rows: WireTensor,
    weights: QuantizedWeights,
    expert: int,
    profile: Int8Profile,
    block_rows: int | None,
) -> Tensor:
    """Compute the rows [n, H] of one expert, and return [n, H], float32."""
    mine = weights.with_tensors(
        {name: tensor[expert : expert + 1] for name, tensor in weights.tensors().items()}
    )
    multiply = _multiplier_of(mine)
    num_rows = len(rows.data)
    # Few elements are activated at a time, so that no thread begins within a row.
    part_rows = num_rows if block_rows is None else BLOCK_SIZES[-1]
    block_rows = block_rows or max(1, num_rows)
    results = rows.data.new_empty(num_rows, weights.hidden_size, dtype=torch.float32)
    for first in range(0, num_rows, block_rows):
        block = rows.part(slice(first, first + block_rows))
        if not block.format.dtype.is_quantized:
            block = quantize(block.data, weights.wire_format, profile=profile)
        gate_up = multiply(_padded(block, block_rows), "gate_up").split(part_rows)
        hidden = torch.cat([activate(part, mine.format) for part in gate_up])
        result = multiply(quantize(hidden, block.format, profile=profile), "down")
        results[first : first + block_rows] = result[: num_rows - first]
    return results


def _padded(rows: WireTensor, num_rows: int) -> WireTensor:
    """Append rows of zeros."""
    missing = num_rows - len(rows.data)
    if missing == 0:
        return rows
    assert rows.scales is not None, "quantised rows have scales"
    codes, scales = (
        torch.cat([part, torch.zeros_like(part[:1]).expand(missing, -1)])
        for part in (rows.data.view(torch.uint8), rows.scales.view(torch.uint8))
    )
    return replace(rows, data=codes.view(rows.data.dtype), scales=scales.view(rows.scales.dtype))


def _multiplier_of(weights: QuantizedWeights) -> Callable[[WireTensor, str], Tensor]:
    """Return a function of rows and the name of a matrix of one expert: their product."""
    if isinstance(weights, Int8ChannelWeights):
        return partial(_multiply_int8, weights.tensors())
    matrices = weights.dequantized()
    return lambda rows, name: dequantize(rows, torch.float32) @ matrices[f"{name}_proj"][0].T


def _multiply_int8(tensors: Mapping[str, Tensor], rows: WireTensor, name: str) -> Tensor:
    assert rows.scales is not None, "quantised rows have scales"
    codes, scale = tensors[f"{name}_proj"][0], tensors[f"{name}_scale"][0]
    # float64 holds every sum of products of int8 exactly, and is faster than integers on a CPU.
    return (rows.data.double() @ codes.double().T).float() * rows.scales.float() * scale
