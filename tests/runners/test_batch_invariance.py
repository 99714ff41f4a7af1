from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from epcomm import (
    BackendUnavailable,
    EPConfig,
    ExpertWeights,
    MoESpec,
    RowsDispatchOutput,
    WireFormat,
    plan,
)
from epcomm.errors import PlanRefused
from epcomm.ops.fixed_blocks import BLOCK_SIZES
from epcomm.ops.slots import pack
from epcomm.platforms.machine import this_machine
from epcomm.runners import batch_invariant
from epcomm.runners.base import ExpertRunner
from epcomm.runners.batch_invariant import BatchInvariantRunner
from epcomm.runners.fp8_triton import Mxfp8TritonRunner
from epcomm.runners.fp8_wgmma import Fp8WgmmaRunner
from epcomm.runners.quantized_reference import QuantizedBlocksRunner
from epcomm.runners.reference import ReferenceRunner
from epcomm.testing.data import ACTIVATIONS, BatchSpec, make_weights, random_ids
from epcomm.types import Layout
from epcomm.weights.quantized import (
    QUANTIZED_KINDS,
    Fp8BlockWeights,
    Mxfp8Weights,
    QuantizedWeights,
)
from epcomm.weights.unquantized import ExpertTensors
from tests.runners.batch_invariance import check_batch_invariance, check_close, without_gradients

COUNTS = (*range(1, 71), 255, 256, 257, 330)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def experts(
    dtype: torch.dtype, hidden_size: int = 64, intermediate_size: int = 32, name: str = "swiglu"
) -> ExpertTensors:
    spec = BatchSpec(
        num_local_experts=3,
        top_k=2,
        tokens_of_rank=lambda rank, world_size: 1,
        choose_ids=random_ids,
        hidden_size=hidden_size,
        dtype=dtype,
    )
    weights = make_weights(
        spec,
        1,
        intermediate_size=intermediate_size,
        expert_format=ACTIVATIONS[name],
        has_bias=name == "clamped_swiglu",
    )
    return without_gradients(weights)


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_of_a_cpu_have_equal_bits_in_every_batch(dtype: torch.dtype, activation: str) -> None:
    weights = experts(dtype, name=activation)
    assert not BatchInvariantRunner.batch_invariance(weights, this_machine()).reasons
    check_batch_invariance(BatchInvariantRunner(), weights, COUNTS, WireFormat.of(dtype))


@pytest.mark.parametrize("are_quantized", [True, False])
@pytest.mark.parametrize("kind", QUANTIZED_KINDS.values(), ids=QUANTIZED_KINDS)
def test_quantised_rows_of_a_cpu_have_the_same_bits_in_every_batch(
    kind: type[QuantizedWeights], are_quantized: bool
) -> None:
    unquantized = experts(torch.bfloat16, 256, 128)
    weights = kind.from_unquantized(unquantized)
    wire = weights.wire_format if are_quantized else WireFormat.of(torch.bfloat16)
    assert not QuantizedBlocksRunner.batch_invariance(weights, this_machine()).reasons
    check_batch_invariance(QuantizedBlocksRunner(), weights, COUNTS, wire)


class NumberMatters(BatchInvariantRunner):
    """Changes the last bit of the rows of an expert that has fewer than four."""

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        results, index = super()._compute_rows(dispatched, weights), dispatched.index
        starts = index.first_slot.tolist()
        for start, count in zip(starts, index.num_tokens_per_expert.tolist(), strict=False):
            if self.is_changed(start, count):
                results[start : start + count] = after(results[start : start + count])
        return results

    def is_changed(self, start: int, count: int) -> bool:
        return count < 4


class PositionMatters(NumberMatters):
    """Changes the last bit of the rows of an expert whose slots begin at an odd number."""

    def is_changed(self, start: int, count: int) -> bool:
        return start % 2 == 1


class LayoutMatters(NumberMatters):
    """Changes the last bit of the rows of slabs."""

    layout: Layout = Layout.ROWS

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        self.layout = Layout.ROWS if dispatched.index.host_num_tokens_per_expert else Layout.MASKED
        return super()._compute_rows(dispatched, weights)

    def is_changed(self, start: int, count: int) -> bool:
        return self.layout is Layout.MASKED


def after(values: Tensor) -> Tensor:
    return torch.nextafter(values, torch.full_like(values, float("inf")))


@pytest.mark.parametrize("mutant", [NumberMatters, PositionMatters, LayoutMatters])
def test_suite_finds_a_mutant(mutant: type[BatchInvariantRunner]) -> None:
    with pytest.raises(AssertionError, match="results of"):
        check_batch_invariance(
            mutant(), experts(torch.float32), COUNTS, WireFormat.of(torch.float32)
        )


@pytest.fixture
def device() -> torch.device:
    """Return the device that kernels run on, which are interpreted on a CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on(device: torch.device, weights: ExpertTensors) -> ExpertTensors:
    return weights.with_tensors({n: t.to(device) for n, t in weights.tensors().items()})


def tile_dtype(device: torch.device) -> torch.dtype:
    """Return a dtype that the device multiplies: the interpreter has no bfloat16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


class InTiles(BatchInvariantRunner):
    """Runs the kernel of GPUs, which is interpreted where there is none."""

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        slots = pack(dispatched.hidden_states.data, dispatched.index)
        return batch_invariant._run_tiles(slots, weights, dispatched.index, self.product_sms)


# Rows of tiles of 32, 64 and 128 rows, one more and one less, and many tiles.
GPU_COUNTS = (1, 2, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 1000, 4096, 8191, 8192)


@needs_triton
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "relu2"])
def test_tiles_equal_the_plain_runner(activation: str, device: torch.device) -> None:
    weights = on(device, experts(tile_dtype(device), 192, 64, activation))
    check_close(InTiles(), ReferenceRunner(), weights)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(64, 64, "swiglu"), (192, 64, "clamped_swiglu"), (1024, 512, "relu2"), (7168, 2048, "swiglu")],
    ids=str,
)
def test_rows_of_a_gpu_have_equal_bits_in_every_batch(
    sizes: tuple[int, int, str], dtype: torch.dtype
) -> None:
    weights = on(torch.device("cuda"), experts(dtype, *sizes))
    assert BatchInvariantRunner.supports(weights).ok
    assert not BatchInvariantRunner.batch_invariance(weights, this_machine()).reasons
    check_batch_invariance(BatchInvariantRunner(), weights, GPU_COUNTS, WireFormat.of(dtype))


@needs_gpu
@pytest.mark.parametrize("sizes", [(1024, 512), (7168, 2048)], ids=str)
@pytest.mark.parametrize("are_quantized", [True, False])
@pytest.mark.parametrize(
    ("runner", "kind"), [(Fp8WgmmaRunner, Fp8BlockWeights), (Mxfp8TritonRunner, Mxfp8Weights)]
)
def test_quantised_rows_of_hopper_have_the_same_bits_in_every_batch(
    runner: type[ExpertRunner],
    kind: type[QuantizedWeights],
    are_quantized: bool,
    sizes: tuple[int, int],
) -> None:
    unquantized = experts(torch.bfloat16, *sizes)
    weights = on(torch.device("cuda"), kind.from_unquantized(unquantized))
    if not runner.supports(weights).ok:
        pytest.skip("needs compute capability 9.0 and NVRTC")
    assert not runner.batch_invariance(weights, this_machine()).reasons
    wire = weights.wire_format if are_quantized else WireFormat.of(torch.bfloat16)
    check_batch_invariance(runner(), weights, GPU_COUNTS, wire)


SPEC = MoESpec(hidden_size=64, num_experts=8, top_k=2, dtype=torch.float32)


def of_plan() -> ExpertWeights:
    """Return the experts of one rank of SPEC, for plans."""
    return ExpertWeights(gate_up_proj=torch.ones(8, 64, 64), down_proj=torch.ones(8, 64, 32))


def test_sum_groups_take_a_runner_whose_rows_depend_on_no_others() -> None:
    chosen = plan(EPConfig(sum_groups=4), SPEC, weights=of_plan())
    assert chosen.runner == "batch_invariant"
    reason = "the bits of a row may depend on other rows, but EPConfig.sum_groups is set"
    assert f"rejected runner grouped_mm, reference: {reason}" in chosen.explain()
    threads = torch.get_num_threads()
    assert f"{threads} threads" in chosen.rests_on
    assert f"the same bits for any number of ranks rest on {chosen.rests_on}" in chosen.explain()
    assert plan(EPConfig(), SPEC, weights=of_plan()).rests_on == ""
    with pytest.raises(BackendUnavailable, match=f"runner grouped_mm cannot .*: {reason}"):
        plan(EPConfig(sum_groups=4, runner="grouped_mm"), SPEC, weights=of_plan())


@pytest.mark.parametrize("kind", QUANTIZED_KINDS.values(), ids=QUANTIZED_KINDS)
def test_quantised_experts_of_a_cpu_take_blocks(kind: type[QuantizedWeights]) -> None:
    weights = kind.from_unquantized(of_plan())
    spec = replace(SPEC, dtype=weights.dtype)
    assert plan(EPConfig(sum_groups=4), spec, weights=weights).runner == "quantized_blocks"
    chosen = plan(EPConfig(), spec, weights=weights)
    assert "\nrunner quantized_reference: plain torch, which dequantises" in chosen.explain()
    assert chosen.prefill.buffer_spec.dispatch_format == weights.wire_format


def test_positions_that_matter_here_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of a block gives its last row other bits, as a library may."""

    def multiply(rows: Tensor, matrix: Tensor, *, out: Tensor) -> None:
        out.copy_(rows @ matrix)
        out[-1] = after(out[0])

    batch_invariant.alike_blocks.cache_clear()
    monkeypatch.setattr(torch, "mm", multiply)
    with pytest.raises(PlanRefused, match="the bits of a row depend on its position"):
        plan(EPConfig(sum_groups=4), SPEC, weights=of_plan())
    batch_invariant.alike_blocks.cache_clear()


def test_blocks_have_one_size_if_the_row_count_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 8 rows have other bits, as with AMX."""

    def multiply(rows: Tensor, matrix: Tensor, *, out: Tensor) -> None:
        out.copy_(rows @ matrix)
        if len(rows) == BLOCK_SIZES[-1]:
            out.copy_(after(out))

    batch_invariant.alike_blocks.cache_clear()
    monkeypatch.setattr(torch, "mm", multiply)
    chosen = plan(EPConfig(sum_groups=4), SPEC, weights=of_plan())
    assert chosen.rests_on.endswith(f"threads, blocks of {BLOCK_SIZES[1]} rows")
    batch_invariant.alike_blocks.cache_clear()
