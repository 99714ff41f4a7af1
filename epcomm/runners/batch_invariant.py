"""Compute unquantised experts so that the bits of a row do not depend on other rows.

On CPUs every product has one of a few fixed shapes (epcomm.ops.fixed_blocks); on GPUs every tile
has one shape and one order of sums (epcomm.kernels.gemm.fixed_tiles). EPConfig.sum_groups needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.ops.fixed_blocks import BLOCK_SIZES, Blocks, FixedShapes, run_blocks
from epcomm.ops.precision import cast_experts, compute_dtype
from epcomm.ops.slots import expert_of_used_slot, pack
from epcomm.platforms.cuda import Capabilities, triton_reasons
from epcomm.platforms.machine import Machine
from epcomm.quantization import dequantizer_for
from epcomm.records import RowsDispatchOutput, SlotIndex
from epcomm.runners.base import (
    BatchInvariance,
    ExpertRunner,
    size_reasons,
    slot_weights_to_apply,
    weight_slots,
)
from epcomm.runners.grouped_mm import GroupedMMRunner, bias_of_slots, multiply_groups
from epcomm.types import ROW_DTYPES, Layout, WireDtype
from epcomm.weights.unquantized import ExpertFormat, ExpertTensors, ExpertWeights

# The inner dimension of the tiles of GPUs, and of their products of 16-bit rows.
_GPU_SIZE_MULTIPLE = 64
_GPU_DTYPES = (torch.bfloat16, torch.float16)
# A plan may be made with experts on the meta device.
_CPUS = ("cpu", "meta")
_GPUS = Capabilities(least=(8, 0))
# Sizes of blocks, the fastest first. Kernels for AVX512 and AMX give a row other bits in a product
# of 8 rows than in one of 64.
_BLOCK_CHOICES = (BLOCK_SIZES, BLOCK_SIZES[1:2], BLOCK_SIZES[2:])


class BatchInvariantRunner(ExpertRunner):
    """Computes a row alike, whatever the number, positions and values of other rows.

    On CPUs in all dtypes; on GPUs in bfloat16 and float16. Host sync on CPUs alone.
    """

    name: ClassVar[str] = "batch_invariant"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (ExpertWeights,)
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)
    wire_dtypes: ClassVar[frozenset[WireDtype]] = ROW_DTYPES
    is_for_sum_groups: ClassVar[bool] = True
    has_gradients: ClassVar[bool] = True

    @classmethod
    def _reasons(cls, weights: ExpertTensors, machine: Machine) -> list[str]:
        device = machine.device_of(weights.gate_up_proj)
        if device.type in _CPUS:
            return []
        if device.type != "cuda":
            return [f"the experts are on {device}, expected cpu or cuda"]
        reasons = size_reasons(weights, multiple=_GPU_SIZE_MULTIPLE)
        if weights.dtype not in _GPU_DTYPES:
            reasons.append(f"the experts are {weights.dtype}, expected bfloat16 or float16 on GPUs")
        return reasons + _GPUS.lacking(machine.capability(device)) + triton_reasons(machine)

    @classmethod
    def limit_reasons(cls, weights: ExpertTensors, machine: Machine) -> list[str]:
        # Gradients of matrices are torch's products.
        return GroupedMMRunner.limit_reasons(weights, machine)

    @classmethod
    def batch_invariance(cls, weights: ExpertTensors, machine: Machine) -> BatchInvariance:
        device = machine.device_of(weights.gate_up_proj)
        if device.type not in _CPUS:
            return BatchInvariance.of_gpu(machine, device, "triton")
        sizes = _blocks_for(weights)
        found = BatchInvariance.of_cpu(machine, bool(sizes))
        if sizes in ((), BLOCK_SIZES):
            return found
        return replace(found, rests_on=f"{found.rests_on}, blocks of {sizes[0]} rows")

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        assert isinstance(weights, ExpertWeights), "supports() said so"
        weights = cast_experts(weights, compute_dtype(dispatched, weights))
        index, rows = dispatched.index, dispatched.hidden_states
        slots = pack(dequantizer_for(rows.data.device)(rows, weights.dtype), index)
        run = partial(_run_tiles, num_sms=self.product_sms) if slots.is_cuda else _run_blocks
        results = run(slots, weights, index)
        slot_weights = slot_weights_to_apply(dispatched, self.name)
        return results if slot_weights is None else weight_slots(results, slot_weights)


def _run_blocks(slots: Tensor, weights: ExpertWeights, index: SlotIndex) -> Tensor:
    counts = index.host_num_tokens_per_expert or index.num_tokens_per_expert.tolist()
    # Experts that were cast after the plan may have no such sizes.
    sizes = _blocks_for(weights) or BLOCK_SIZES
    blocks = Blocks.of(index.first_slot.tolist(), counts, slots.shape[0], sizes)
    return run_blocks(slots, weights, blocks)


def _blocks_for(weights: ExpertTensors) -> tuple[int, ...]:
    sizes = weights.hidden_size, weights.intermediate_size
    return alike_blocks(*sizes, weights.dtype, weights.format, torch.get_num_threads())


# Cached, because plans of many layers ask.
@lru_cache(maxsize=256)
def alike_blocks(
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    expert_format: ExpertFormat,
    num_threads: int,
) -> tuple[int, ...]:
    """Return sizes of blocks in which equal rows have equal results and gradients, or none.

    It computes them at all positions of all blocks, with two experts whose matrices are equal but
    stored at other addresses.

    num_threads: torch.get_num_threads(), on which the answer depends.
    """
    generator = torch.Generator().manual_seed(1)

    def equal(*shape: int, copies: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return (values / max(1, shape[-1]) ** 0.5).to(dtype).expand(copies, *shape).clone()

    first = intermediate_size * (2 if expert_format.activation.is_gated else 1)
    shapes = (first, hidden_size), (hidden_size, intermediate_size)
    matrices = [
        equal(*(reversed(shape) if expert_format.is_transposed else shape), copies=2)
        for shape in shapes
    ]
    weights = ExpertWeights(gate_up_proj=matrices[0], down_proj=matrices[1], format=expert_format)
    row, gradient = (equal(hidden_size, copies=1) * hidden_size**0.5 for _ in range(2))

    def are_alike(sizes: Sequence[int]) -> bool:
        # One block of each size, and another small one.
        counts = sum(sizes), sizes[-1]
        blocks = Blocks.of((0, counts[0], sum(counts)), counts, sum(counts), sizes)
        with torch.inference_mode(False), torch.enable_grad():
            rows = row.repeat(sum(counts), 1).requires_grad_()
            results = run_blocks(rows, weights, blocks)
            (gradients,) = torch.autograd.grad(results, rows, gradient.repeat(len(results), 1))
        return all(bool((each == each[0]).all()) for each in (results, gradients))

    return next((sizes for sizes in _BLOCK_CHOICES if are_alike(sizes)), ())


def _run_tiles(
    slots: Tensor, weights: ExpertWeights, index: SlotIndex, num_sms: int | None = None
) -> Tensor:
    """Return the result of each slot, [C, H]; without gradients those of padding are undefined."""
    needs_gradients = torch.is_grad_enabled() and (slots.requires_grad or weights.requires_grad)
    unused = None
    if needs_gradients and not index.is_dense:
        # Gradients of matrices and biases sum padding too, whose rows and gradients are undefined.
        owners = index.row_of_slot
        if owners is None:
            owners = expert_of_used_slot(index, slots.shape[0])
        unused = (owners < 0).unsqueeze(1)
        slots = slots.masked_fill(unused, 0)
    results = _Tiles(index=index, num_slots=slots.shape[0], num_sms=num_sms).run(slots, weights)
    return results if unused is None else results.masked_fill(unused, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tiles(FixedShapes):
    """The tiles of slots, which all have one size."""

    index: SlotIndex
    num_slots: int
    num_sms: int | None

    def products(self, rows: Tensor, matrices: Tensor) -> Tensor:
        from epcomm.kernels.gemm.fixed_tiles import multiply_tiles

        index = self.index
        # Padding is zero, because gradients of matrices read it.
        out = rows.new_empty if index.is_dense else rows.new_zeros
        results = out((rows.shape[0], matrices.shape[2]))
        counts, first_slot = index.num_tokens_per_expert, index.first_slot
        multiply_tiles(rows, counts, first_slot, matrices, results, self.num_sms)
        return results

    def sum_products(self, rows: Tensor, other: Tensor, like: Tensor) -> Tensor:
        return multiply_groups(rows.T, other, self.index.first_slot[1:], self.num_sms)

    def biases(self, bias: Tensor) -> Tensor:
        return bias_of_slots(bias, self.index, self.num_slots)
