"""Measure eight-bit experts on a GPU: two grouped products, SwiGLU, the second quantisation.

    python -m benchmarks.bench_gemm --output gemm.json
    python -m benchmarks.bench_gemm --format int8 --output gemm_int8.json
    python -m benchmarks.bench_gemm --format mxfp8 --output gemm_mxfp8.json

The alternatives in the same run are BF16 (grouped_mm, silu(gate) * up, grouped_mm) and, for FP8,
DeepGEMM where it is installed: its two products with one kernel between them, which is its runner.
For mxfp8 they are the plain runner, launched from Python, and grouped_mm of rows and matrices that
are restored to BF16, the matrices before ("restored", twice the memory) or in each call.
Results of all are first compared with float32 products of the same codes; on a difference the
program ends without a number. FP8 is measured on a Hopper GPU. Rows are quantised and read through
an index, as a buffer returns them; the cache is read over before each call.

Of FP8 it reports ratios of times, ours over those of DeepGEMM:

    ratio_runner    both products, what is between them, and the gather of rows
    ratio_first     the first product of rows in the order of slots: ours ends with codes of the
                    activations, DeepGEMM's with bfloat16 gate and up
    ratio_second    the second product

Without the package a product of cuBLAS stands in, which has the rows and matrices of one expert and
one scale for each tensor: DeepGEMM's time is that of cuBLAS times what it took on one H200 beside
DeepGEMM 2.6.1 (54e2261), torch 2.11.0+cu130. The ratios are estimates then.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Self

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from benchmarks.measuring import Output, copy_rate, gpu_of, report_of, write_report
from epcomm import Fp8BlockWeights, RowsDispatchOutput
from epcomm.bench.bounds import dense_product
from epcomm.bench.check import CheckError
from epcomm.bench.timing import Captured, Clock, Percentiles, captured
from epcomm.cli.records import takes_records
from epcomm.kernels.gemm.fp8_hopper import down_fp8, gate_up_fp8
from epcomm.ops.slots import build_slot_index, expert_of_used_slot, pack, packed_index
from epcomm.platforms.deep_gemm import load_deep_gemm
from epcomm.quantization import (
    arrange_scales,
    dequantize,
    dequantizer_for,
    quantize,
    quantizer_for,
)
from epcomm.records import Handle
from epcomm.runners.base import ExpertRunner
from epcomm.runners.deep_gemm import COLUMNS, DeepGemmRunner
from epcomm.runners.fp8_triton import Fp8TritonRunner, Mxfp8TritonRunner
from epcomm.runners.fp8_wgmma import Fp8WgmmaRunner
from epcomm.runners.gpu_slots import first_product, second_product
from epcomm.runners.int8_triton import Int8TritonRunner
from epcomm.runners.quantized_reference import QuantizedReferenceRunner
from epcomm.types import Int8Profile, WeightsAppliedBy, WireFormat, WireTensor
from epcomm.weights.quantized import QUANTIZED_KINDS, QuantizedWeights
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights

# Replays of each graph before those that are timed.
_WARM_UP = 3
# Distributions of rows: the number of rows, and the skew, see counts_of().
_DISTRIBUTIONS = ((32768, 1), (32768, 8), (8192, 1), (32768, 0), (1024, 1))
# Time of one contender alone, after which power limits all of them.
_SUSTAINED_MS = 500
# 256 MiB: several times the cache of any GPU.
_READ_BYTES = 2**28
# Rows and columns of the product of cuBLAS, [m, k] by [k, n].
_CUBLAS = {"m": 32768, "n": 4096, "k": 7168}
# DeepGEMM's time over that of cuBLAS, by L, H, rows and skew: runner, first and second product.
_DEEP_GEMM_OVER_CUBLAS = {
    (32, 7168, 32768, 1): {"runner": 1.780, "first": 1.045, "second": 0.557},
    (32, 7168, 32768, 8): {"runner": 1.902},
    (32, 7168, 8192, 1): {"runner": 0.495, "first": 0.286, "second": 0.158},
    (32, 7168, 1024, 1): {"runner": 0.343},
    (16, 2048, 32768, 1): {"runner": 0.248, "first": 0.119, "second": 0.077},
}
_SUSTAINED_OVER_CUBLAS = {"runner": 1.814, "first": 1.094, "second": 0.574}


class Format(StrEnum):
    """The format of the experts."""

    FP8 = "fp8"
    INT8 = "int8"
    MXFP8 = "mxfp8"

    @property
    def kind(self) -> type[QuantizedWeights]:
        """The class of the experts."""
        return QUANTIZED_KINDS[self.value]

    @property
    def tolerance(self) -> float:
        """The largest relative error.

        FP8: products of the same codes in float32, and on tensor cores with some 14 bits. INT8 and
        MXFP8: half a unit in the last place of bfloat16, 2**-8, and one step of some hundred in one
        of I where an activation is within float32 rounding of the middle between two codes.
        """
        return 0.01 if self is Format.FP8 else 0.005


@dataclass(frozen=True, kw_only=True)
class Size:
    """L, H and I of one rank, and how often calls are timed."""

    experts: Annotated[int, typer.Option(min=8, help="L.")] = 32
    hidden: Annotated[int, typer.Option(min=128, help="H.")] = 7168
    inner: Annotated[int, typer.Option(min=128, help="I.")] = 2048
    calls: Annotated[int, typer.Option(min=1, help="Measured calls of each.")] = 30
    format: Annotated[Format, typer.Option(help="Of the experts.")] = Format.FP8


@dataclass(frozen=True, kw_only=True, eq=False)
class Experts:
    """The same experts in bfloat16 and in eight bits."""

    format: Format
    plain: ExpertWeights
    codes: QuantizedWeights

    @classmethod
    def make(cls, size: Size, device: torch.device) -> Self:
        """Make seeded matrices with products of order one."""
        generator = torch.Generator(device).manual_seed(0)

        def matrices(rows: int, columns: int) -> Tensor:
            shape = (size.experts, rows, columns)
            values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
            return values / columns**0.5

        plain = ExpertWeights(
            gate_up_proj=matrices(2 * size.inner, size.hidden),
            down_proj=matrices(size.hidden, size.inner),
        )
        codes = size.format.kind.from_unquantized(plain)
        return cls(format=size.format, plain=plain, codes=codes)


def counts_of(rows: int, experts: int, skew: int) -> list[int]:
    """Return the slots of each expert; an eighth of the experts get `skew` times as many.

    skew: 0 for all rows to the first eighth of the experts.
    """
    shares = [skew or 1 if expert < experts // 8 else min(skew, 1) for expert in range(experts)]
    counts = [rows * share // sum(shares) for share in shares]
    counts[0] += rows - sum(counts)
    return counts


def rows_record(
    counts: list[int], x: Tensor, wire: WireFormat, runner: ExpertRunner
) -> RowsDispatchOutput:
    """Make a record of rows in random order, with one slot each, as a runner reads it."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))].to(x.device)
    device_counts = torch.tensor(counts, device=x.device)
    rows = quantize(x, wire)
    if isinstance(runner, DeepGemmRunner):
        assert rows.scales is not None, "FP8 has scales"
        scales = arrange_scales(rows.scales, COLUMNS)
        rows = replace(rows, scales=scales, scale_layout=COLUMNS)
    return RowsDispatchOutput(
        hidden_states=rows,
        index=build_slot_index(
            ids.unsqueeze(1), device_counts, counts, expert_alignment=runner.expert_alignment
        ),
        slot_weights=None,
        weights_applied_by=WeightsAppliedBy.COMBINE,
        handle=Handle(owner=None, num_tokens=len(ids)),
    )


def check(
    results: Tensor, dispatched: RowsDispatchOutput, experts: Experts, tolerance: float
) -> None:
    """Compare the first and the last expert with rows to float32 products of the same codes.

    Raises:
        CheckError: the results differ by more than rounding.
    """
    index, matrices = dispatched.index, experts.codes.dequantized()
    assert index.row_of_slot is not None
    starts, counts = index.first_slot.tolist(), index.num_tokens_per_expert.tolist()
    rows = dequantize(dispatched.hidden_states, torch.float32)
    used = [expert for expert, count in enumerate(counts) if count]
    for expert in (used[0], used[-1]):
        mine = slice(starts[expert], starts[expert] + counts[expert])
        x = rows[index.row_of_slot[mine].long()]
        gate, up = (x @ matrices["gate_up_proj"][expert].T).chunk(2, dim=1)
        hidden = quantize(F.silu(gate) * up, experts.codes.wire_format)
        expected = dequantize(hidden, torch.float32) @ matrices["down_proj"][expert].T
        error = float((results[mine].float() - expected).norm() / expected.norm())
        if not error <= tolerance:
            raise CheckError(f"expert {expert} has an error of {error:.1e}; nothing was measured")


def run_bf16(slots: Tensor, ends: Tensor, experts: ExpertWeights) -> Tensor:
    """Compute BF16 experts by torch's grouped matmul over packed slots."""
    hidden = F.grouped_mm(slots, experts.gate_up_proj.transpose(1, 2), offs=ends)
    gate, up = hidden.chunk(2, dim=1)
    return F.grouped_mm(F.silu(gate) * up, experts.down_proj.transpose(1, 2), offs=ends)


def restored_experts(experts: QuantizedWeights) -> list[Tensor]:
    """Return gate_up and down of mxfp8 experts in bfloat16, in which they are exact."""
    restore = dequantizer_for(experts.gate_up_proj.device)
    pairs = (experts.gate_up_proj, experts.gate_up_scale), (experts.down_proj, experts.down_scale)
    return [
        restore(
            WireTensor(
                data=codes.flatten(0, 1), format=experts.wire_format, scales=scales.flatten(0, 1)
            ),
            torch.bfloat16,
        ).view(codes.shape)
        for codes, scales in pairs
    ]


def run_restored(
    dispatched: RowsDispatchOutput, experts: QuantizedWeights, matrices: Sequence[Tensor] = ()
) -> Tensor:
    """Compute mxfp8 experts by torch's grouped matmul; matrices: none to restore them here.

    Gate, up, silu(gate) and the activations are rounded to bfloat16, with errors of 0.4% together;
    so one code of thirty of the activations is the next, 3% to 13% away: 2% of y.
    """
    gate_up, down = matrices or restored_experts(experts)
    restore, quantizer = dequantizer_for(gate_up.device), quantizer_for(gate_up.device)
    slots = pack(restore(dispatched.hidden_states, torch.bfloat16), dispatched.index)
    ends = dispatched.index.first_slot[1:]
    gate, up = F.grouped_mm(slots, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
    hidden = quantizer(F.silu(gate) * up, experts.wire_format)
    return F.grouped_mm(restore(hidden, torch.bfloat16), down.transpose(1, 2), offs=ends)


@dataclass(frozen=True, kw_only=True, eq=False)
class Eager:
    """A call that waits for the device, which no graph can capture."""

    replay: Callable[[], object]


def fp8_parts(
    rows: Tensor, counts: list[int], experts: Fp8BlockWeights
) -> dict[str, Callable[[], object]]:
    """Return each product alone, of rows in the order of slots, by epcomm and by DeepGEMM."""
    device_counts = torch.tensor(counts, device=rows.device)
    index, wire = packed_index(device_counts, counts, is_dense=True), experts.wire_format
    packed = RowsDispatchOutput(
        hidden_states=quantize(rows, wire),
        index=index,
        slot_weights=None,
        weights_applied_by=WeightsAppliedBy.COMBINE,
        handle=Handle(owner=None, num_tokens=len(rows)),
    )
    first = first_product(packed, experts, Int8Profile.RINT127)
    hidden = quantize(torch.randn_like(rows[:, : experts.intermediate_size]), wire)
    assert hidden.scales is not None, "FP8 has scales"
    assert packed.hidden_states.scales is not None, "FP8 has scales"
    codes, scales = torch.empty_like(hidden.data), torch.empty_like(hidden.scales)
    second = second_product(first, hidden.data, hidden.scales, experts)
    out = torch.empty_like(rows)
    calls: dict[str, Callable[[], object]] = {
        "first": partial(gate_up_fp8, first, out_codes=codes, out_scales=scales),
        "second": partial(down_fp8, second, slot_weights=None, out=out),
    }
    package = load_deep_gemm() if DeepGemmRunner.supports(experts).ok else None
    if package is None or any(count % DeepGemmRunner.expert_alignment for count in counts):
        return calls
    options = {"use_psum_layout": True} if package.takes_ends else {}
    ends = index.first_slot[1:] if package.takes_ends else expert_of_used_slot(index, len(rows))
    gate_up = rows.new_empty(len(rows), 2 * experts.intermediate_size)
    operands = {
        "first": (packed.hidden_states, experts.gate_up_proj, experts.gate_up_scale, gate_up),
        "second": (hidden, experts.down_proj, experts.down_scale, out),
    }
    for name, (left, matrices, matrix_scales, result) in operands.items():
        assert left.scales is not None, "FP8 has scales"
        operand = left.data, arrange_scales(left.scales, COLUMNS)
        calls[f"deep_gemm {name}"] = partial(
            package.multiply_contiguous,
            operand,
            (matrices, matrix_scales),
            result,
            ends,
            **options,
        )
    return calls


def time_in_turn(
    graphs: Mapping[str, Captured | Eager], device: torch.device, num_calls: int
) -> dict[str, Percentiles]:
    """Return milliseconds of each graph, one after another: clocks treat all alike.

    The host waits once, at the end, so that the time includes no launch.
    """
    clocks = {name: [Clock(device) for _ in range(num_calls)] for name in graphs}
    others = torch.ones(_READ_BYTES // 4, dtype=torch.int32, device=device)
    for _ in range(_WARM_UP):
        for graph in graphs.values():
            graph.replay()
    for number in range(num_calls):
        for name, graph in graphs.items():
            others.sum()
            clocks[name][number].mark()
            graph.replay()
            clocks[name][number].mark()
    return {
        name: Percentiles.of(clock.take()[0] for clock in found) for name, found in clocks.items()
    }


def time_sustained(graph: Captured | Eager, device: torch.device, ms: float) -> float:
    """Return milliseconds of a graph that is replayed alone for _SUSTAINED_MS; ms: of one."""
    clock, num_calls = Clock(device), max(1, round(_SUSTAINED_MS / ms))
    # The second half is measured, because a GPU takes a while to reduce its clocks.
    for number in range(2 * num_calls):
        if number == num_calls:
            clock.mark()
        graph.replay()
    clock.mark()
    return clock.take()[0] / num_calls


def runners_of(format: Format, weights: ExpertTensors) -> Mapping[str, ExpertRunner]:
    """Return the runners of a format, by name; the one that auto would take comes first."""
    if format is Format.INT8:
        return {"int8": Int8TritonRunner()}
    if format is Format.MXFP8:
        return {"mxfp8": Mxfp8TritonRunner(), "reference": QuantizedReferenceRunner()}
    runners: dict[str, ExpertRunner] = {"fp8": Fp8WgmmaRunner(), "fp8 in triton": Fp8TritonRunner()}
    if DeepGemmRunner.supports(weights).ok:
        runners["deep_gemm"] = DeepGemmRunner()
    return runners


def ratios_of(ms: Mapping[str, float], over_cublas: Mapping[str, float]) -> dict[str, float]:
    """Return times over those of DeepGEMM, measured or estimated, by what is compared."""
    ours = {"runner": "fp8", "first": "first", "second": "second"}
    theirs = {"runner": "deep_gemm", "first": "deep_gemm first", "second": "deep_gemm second"}
    found = {}
    for name, mine in ours.items():
        if mine in ms and theirs[name] in ms:
            found[f"ratio_{name}"] = ms[mine] / ms[theirs[name]]
        elif mine in ms and "deep_gemm" not in ms and name in over_cublas:
            found[f"ratio_{name}"] = ms[mine] / (over_cublas[name] * ms["cublas"])
    return found


def measure(
    experts: Experts, rows: int, skew: int, copy_gb_per_s: float, num_calls: int
) -> dict[str, Any]:
    """Check one distribution of rows, then time it in eight bits and in BF16."""
    num_experts, hidden, inner = experts.plain.down_proj.shape
    device, is_fp8 = experts.plain.down_proj.device, experts.format is Format.FP8
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    counts, wire = counts_of(rows, num_experts, skew), experts.codes.wire_format
    calls: dict[str, Callable[[], object]] = {}
    for name, runner in runners_of(experts.format, experts.codes).items():
        dispatched = rows_record(counts, x, wire, runner)
        results = runner.run(dispatched, experts.codes).hidden_states
        # DeepGEMM returns gate and up in bfloat16, which moves codes of the activations.
        tolerance = experts.format.tolerance * (2 if isinstance(runner, DeepGemmRunner) else 1)
        check(results, dispatched, experts, tolerance)
        calls[name] = partial(runner.run, dispatched, experts.codes)
    if experts.format is Format.MXFP8:
        dispatched = rows_record(counts, x, wire, Mxfp8TritonRunner())
        matrices = restored_experts(experts.codes)
        check(run_restored(dispatched, experts.codes, matrices), dispatched, experts, 0.03)
        calls["restored"] = partial(run_restored, dispatched, experts.codes, matrices)
        calls["restored in the call"] = partial(run_restored, dispatched, experts.codes)
    if isinstance(experts.codes, Fp8BlockWeights):
        calls |= fp8_parts(x, counts, experts.codes)
        calls["cublas"] = dense_product("fp8", **_CUBLAS, device=device)
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    calls["bf16"] = partial(run_bf16, x, ends, experts.plain)
    graphs = {
        name: Eager(replay=call) if name == "reference" else captured(call)
        for name, call in calls.items()
    }
    times = time_in_turn(graphs, device, num_calls)
    ms = {name: each.p50 for name, each in times.items()}
    own_ms = ms[experts.format]
    finding: dict[str, Any] = {
        "rows": rows,
        "skew": skew,
        "ms": {name: asdict(each) for name, each in times.items()},
        "times_as_fast_as_bf16": ms["bf16"] / own_ms,
        "tera_operations_per_s": 6 * rows * hidden * inner / own_ms / 1e9,
        "weights_over_copy_rate": 3 * num_experts * hidden * inner / own_ms / 1e6 / copy_gb_per_s,
    }
    if is_fp8:
        over_cublas = _DEEP_GEMM_OVER_CUBLAS.get((num_experts, hidden, rows, skew), {})
        finding |= ratios_of(ms, over_cublas)
    if is_fp8 and (rows, skew) == _DISTRIBUTIONS[0]:
        sustained = {name: time_sustained(graphs[name], device, ms[name]) for name in ms}
        finding["sustained_ms"] = sustained
        finding["sustained"] = ratios_of(sustained, _SUSTAINED_OVER_CUBLAS)
    return finding


@takes_records
def main(size: Size, output: Output) -> None:
    """Check the experts, measure them, and print the results."""
    device = gpu_of("bench_gemm")
    benchmark = "gemm" if size.format is Format.FP8 else f"gemm_{size.format}"
    report = report_of(benchmark, asdict(size), device, "benchmarks.bench_gemm")
    rate = copy_rate(device, size.calls)
    try:
        with torch.no_grad():
            made = Experts.make(size, device)
            findings = [measure(made, *each, rate, size.calls) for each in _DISTRIBUTIONS]
    except CheckError as error:
        sys.exit(str(error))
    sys.stdout.writelines(f"{json.dumps(each)}\n" for each in findings)
    ratios = {name: value for name, value in findings[0].items() if name.startswith("ratio_")}
    if ratios:
        is_there = DeepGemmRunner.supports(made.codes).ok
        ratios["ratios_to"] = "DeepGEMM" if is_there else "an estimate of DeepGEMM by cuBLAS"
    write_report({**report, **ratios, "copy_gb_per_s": rate, "findings": findings}, output)


if __name__ == "__main__":
    typer.run(main)
