"""Measure eight-bit experts on a GPU: two grouped products, SwiGLU, the second quantisation.

    python -m benchmarks.bench_gemm --output gemm.json
    python -m benchmarks.bench_gemm --format int8 --output gemm_int8.json

The alternative in the same run is BF16: grouped_mm, silu(gate) * up, grouped_mm. Results of the
kernels are compared with products of the same codes first, in float32 or exact ones of INT8, or the
program ends without a number. FP8 is measured on a Hopper GPU. Rows come quantised, through an
index, as a buffer hands them out.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor

from benchmarks.bench_quantize import CheckError, copy_rate
from epcomm import (
    Fp8BlockWeights,
    Int8ChannelWeights,
    MaskedDispatchOutput,
    RowsDispatchOutput,
    WireTensor,
)
from epcomm.bench.machine import describe_hardware, describe_versions
from epcomm.bench.timing import EventClock, Percentiles, captured
from epcomm.ops.slots import build_slot_index
from epcomm.quantization import FP8_FLOAT32_SCALES, INT8_PER_TOKEN, dequantize, quantize
from epcomm.records import ExchangePlan, Handle
from epcomm.runners.fp8_triton import Fp8TritonRunner
from epcomm.runners.fp8_wgmma import Fp8WgmmaRunner
from epcomm.runners.int8_triton import Int8TritonRunner
from epcomm.types import WeightsAppliedBy, WireFormat
from epcomm.weights.unquantized import ExpertWeights

# Two FP8 products of the same codes, in float32 by cuBLAS and on tensor cores with some 14 bits.
TOLERANCE = 0.01
# Relative, of bfloat16 results: half a unit in the last place, 2**-8, and where an activation lies
# within float32 rounding of the middle between two codes, one step of some hundred in one of I.
INT8_TOLERANCE = 0.005
# Bytes a slot and column of I between the INT8 products: float32 written and read, codes written.
HIDDEN_BYTES = 9
# MASKED rows have capacity for so many times what comes.
MASKED_CAPACITY = 33


class Format(StrEnum):
    """Hold what the experts are held in."""

    FP8 = "fp8"
    INT8 = "int8"


@dataclass(frozen=True, kw_only=True)
class Size:
    """L, H and I of one rank."""

    experts: int
    hidden: int
    inner: int

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all matrices in eight bits."""
        return 3 * self.experts * self.hidden * self.inner

    def operations(self, rows: int) -> int:
        """Count the multiplications and additions of `rows` slots."""
        return 6 * rows * self.hidden * self.inner


@dataclass(frozen=True, kw_only=True, eq=False)
class Experts:
    """The same experts in all precisions."""

    gate_up: Tensor
    down: Tensor
    fp8: Fp8BlockWeights
    int8: Int8ChannelWeights

    @classmethod
    def make(cls, size: Size, device: torch.device) -> Experts:
        """Make seeded matrices with products of order one."""
        generator = torch.Generator(device).manual_seed(0)

        def matrices(rows: int, columns: int) -> Tensor:
            shape = (size.experts, rows, columns)
            values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
            return values / columns**0.5

        gate_up, down = matrices(2 * size.inner, size.hidden), matrices(size.hidden, size.inner)
        codes, scales = zip(*map(Fp8BlockWeights._quantize, (gate_up, down)), strict=True)
        plain = ExpertWeights(gate_up_proj=gate_up, down_proj=down)
        return cls(
            gate_up=gate_up,
            down=down,
            int8=Int8ChannelWeights.from_unquantized(plain),
            fp8=Fp8BlockWeights(
                gate_up_proj=codes[0],
                gate_up_scale=scales[0],
                down_proj=codes[1],
                down_scale=scales[1],
            ),
        )


def counts_of(rows: int, experts: int, skew: int) -> list[int]:
    """Slots of each expert; an eighth of the experts get `skew` times as many."""
    shares = [skew if expert < experts // 8 else 1 for expert in range(experts)]
    counts = [rows * share // sum(shares) for share in shares]
    counts[0] += rows - sum(counts)
    return counts


def rows_record(
    counts: list[int], x: Tensor, wire: WireFormat = FP8_FLOAT32_SCALES
) -> RowsDispatchOutput:
    """Make a record of rows in random order, with one slot each."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))].to(x.device)
    device_counts = torch.tensor(counts, device=x.device)
    return RowsDispatchOutput(
        hidden_states=quantize(x, wire),
        index=build_slot_index(ids.unsqueeze(1), device_counts, counts),
        slot_weights=None,
        weights_applied_by=WeightsAppliedBy.COMBINE,
        handle=_handle(len(ids)),
    )


def masked_record(dispatched: RowsDispatchOutput) -> MaskedDispatchOutput:
    """Return the same slots, each expert's behind one another, with capacity for many more."""
    rows, index = dispatched.hidden_states, dispatched.index
    assert index.row_of_slot is not None
    assert rows.scales is not None
    counts = index.num_tokens_per_expert.tolist()
    capacity = MASKED_CAPACITY * max(counts)
    device = rows.data.device
    codes = torch.zeros(len(counts), capacity, rows.data.shape[1], dtype=torch.uint8, device=device)
    scales = torch.zeros(len(counts), capacity, rows.scales.shape[1], device=device)
    for expert, (start, count) in enumerate(zip(index.first_slot.tolist(), counts, strict=False)):
        mine = index.row_of_slot[start : start + count].long()
        codes[expert, :count] = rows.data.view(torch.uint8)[mine]
        scales[expert, :count] = rows.scales[mine]
    return MaskedDispatchOutput(
        hidden_states=WireTensor(
            data=codes.view(rows.data.dtype), format=rows.format, scales=scales
        ),
        num_tokens_per_expert=index.num_tokens_per_expert,
        slot_weights=None,
        weights_applied_by=WeightsAppliedBy.COMBINE,
        handle=_handle(len(index.row_of_slot)),
    )


def _handle(num_tokens: int) -> Handle:
    return Handle(
        owner=None,
        exchange_plan=ExchangePlan(),
        call=1,
        num_tokens=num_tokens,
        needs_backward=False,
    )


def check(results: Tensor, dispatched: RowsDispatchOutput, experts: Experts) -> None:
    """Compare the first and the last expert with float32 products of the same codes.

    Raises:
        CheckError: they differ by more than rounding explains.
    """
    index, matrices = dispatched.index, experts.fp8.dequantized()
    assert index.row_of_slot is not None
    starts = index.first_slot.tolist()
    for expert in (0, len(starts) - 2):
        mine = slice(starts[expert], starts[expert + 1])
        rows = dequantize(dispatched.hidden_states, torch.float32)[index.row_of_slot[mine].long()]
        gate, up = (rows @ matrices["gate_up_proj"][expert].T).chunk(2, dim=1)
        hidden = dequantize(quantize(F.silu(gate) * up, FP8_FLOAT32_SCALES), torch.float32)
        expected = hidden @ matrices["down_proj"][expert].T
        error = float((results[mine].float() - expected).norm() / expected.norm())
        if not error <= TOLERANCE:
            raise CheckError(f"expert {expert} is off by {error:.1e}; nothing was measured")


def check_int8(results: Tensor, dispatched: RowsDispatchOutput, experts: Experts) -> None:
    """Compare the first and the last expert with exact sums of the same codes, in float64.

    Raises:
        CheckError: they differ by more than rounding explains.
    """
    weights = experts.int8
    index, rows = dispatched.index, dispatched.hidden_states
    assert index.row_of_slot is not None
    assert rows.scales is not None
    starts = index.first_slot.tolist()
    for expert in (0, len(starts) - 2):
        mine = slice(starts[expert], starts[expert + 1])
        slots = index.row_of_slot[mine].long()
        sums = rows.data[slots].double() @ weights.gate_up_proj[expert].double().T
        scaled = sums * rows.scales[slots].double() * weights.gate_up_scale[expert].double()
        gate, up = scaled.chunk(2, dim=1)
        hidden = quantize((F.silu(gate) * up).float(), INT8_PER_TOKEN)
        assert hidden.scales is not None
        sums = hidden.data.double() @ weights.down_proj[expert].double().T
        expected = sums * hidden.scales.double() * weights.down_scale[expert].double()
        error = float((results[mine].double() - expected).norm() / expected.norm())
        if not error <= INT8_TOLERANCE:
            raise CheckError(f"expert {expert} is off by {error:.1e}; nothing was measured")


def run_bf16(slots: Tensor, ends: Tensor, experts: Experts) -> Tensor:
    """Compute experts in the usual way, over slots that are packed already."""
    hidden = F.grouped_mm(slots, experts.gate_up.transpose(1, 2), offs=ends)
    gate, up = hidden.chunk(2, dim=1)
    return F.grouped_mm(F.silu(gate) * up, experts.down.transpose(1, 2), offs=ends)


def time_in_turn(calls: dict[str, Callable[[], object]], num_calls: int) -> dict[str, Percentiles]:
    """Milliseconds of each by CUDA events, one after another, so that clocks treat all alike."""
    graphs = {name: captured(call) for name, call in calls.items()}
    clocks = {name: [EventClock() for _ in range(num_calls)] for name in calls}
    for number in range(-3, num_calls):
        for name, graph in graphs.items():
            clock = clocks[name][number]
            if number >= 0:
                clock.mark()
            graph.replay()
            if number >= 0:
                clock.mark()
    return {
        name: Percentiles.of([lap for clock in found for lap in clock.take()])
        for name, found in clocks.items()
    }


def measure(
    precision: Format,
    distribution: tuple[int, int],
    size: Size,
    experts: Experts,
    copy_gb_per_s: float,
    num_calls: int,
) -> dict[str, object]:
    """Check one distribution of rows, then time it in eight bits, in BF16 and MASKED."""
    rows, skew = distribution
    x = torch.randn(rows, size.hidden, device=experts.gate_up.device, dtype=torch.bfloat16)
    counts, is_int8 = counts_of(rows, size.experts, skew), precision is Format.INT8
    dispatched = rows_record(counts, x, INT8_PER_TOKEN if is_int8 else FP8_FLOAT32_SCALES)
    weights = experts.int8 if is_int8 else experts.fp8
    runners = (
        {"": Int8TritonRunner()}
        if is_int8
        else {"": Fp8WgmmaRunner(), " in triton": Fp8TritonRunner()}
    )
    calls: dict[str, Callable[[], object]] = {}
    for name, runner in runners.items():
        results = runner.run(dispatched, weights).hidden_states
        (check_int8 if is_int8 else check)(results, dispatched, experts)
        calls[f"{precision}{name}"] = partial(runner.run, dispatched, weights)
    calls["bf16"] = lambda: run_bf16(x, dispatched.index.first_slot[1:], experts)
    if rows <= 1024:
        masked = masked_record(dispatched)
        for name, runner in runners.items():
            calls[f"{precision} masked{name}"] = partial(runner.run, masked, weights)
    times = time_in_turn(calls, num_calls)
    own_ms, of_masked = times[precision].p50, times.get(f"{precision} masked")
    found = {
        "rows": rows,
        "skew": skew,
        "ms": {name: {"p50": t.p50, "p95": t.p95, "p99": t.p99} for name, t in times.items()},
        "times_as_fast_as_bf16": times["bf16"].p50 / own_ms,
        "tops" if is_int8 else "tflops": size.operations(rows) / own_ms / 1e9,
        "weights_over_copy_rate": size.weight_bytes / own_ms / 1e6 / copy_gb_per_s,
        "masked_over_rows": None if of_masked is None else of_masked.p50 / own_ms,
    }
    if is_int8:
        # What hidden rows would take at the rate of a copy, as a part of the whole.
        hidden_bytes = HIDDEN_BYTES * rows * size.inner
        found["hidden_rows_part"] = hidden_bytes / copy_gb_per_s / 1e6 / own_ms
    return found


def main(
    experts: Annotated[int, typer.Option(min=8, help="L.")] = 32,
    hidden: Annotated[int, typer.Option(min=128, help="H.")] = 7168,
    inner: Annotated[int, typer.Option(min=128, help="I.")] = 2048,
    calls: Annotated[int, typer.Option(min=1, help="Measured calls of each.")] = 30,
    precision: Annotated[
        Format, typer.Option("--format", help="What the experts are held in.")
    ] = Format.FP8,
    output: Annotated[Path | None, typer.Option(help="Write the report there, as JSON.")] = None,
) -> None:
    """Check, measure, and print what came of it."""
    if not torch.cuda.is_available():
        sys.exit("bench_gemm: no CUDA device; the kernels are measured on a GPU only")
    device = torch.device("cuda", torch.cuda.current_device())
    size = Size(experts=experts, hidden=hidden, inner=inner)
    console = Console(highlight=False, markup=False)
    copy_gb_per_s = copy_rate(device, num_calls=calls)
    try:
        with torch.no_grad():
            made = Experts.make(size, device)
            findings = [
                measure(precision, distribution, size, made, copy_gb_per_s, calls)
                for distribution in ((32768, 1), (32768, 8), (1024, 1))
            ]
    except CheckError as error:
        sys.exit(str(error))
    for finding in findings:
        console.print(json.dumps(finding))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "benchmark": "gemm_int8" if precision is Format.INT8 else "gemm",
            "configuration": {"experts": experts, "hidden": hidden, "inner": inner, "calls": calls},
            "hardware": describe_hardware(device),
            "versions": describe_versions(device),
            "command": shlex.join(["python", "-m", "benchmarks.bench_gemm", *sys.argv[1:]]),
            "copy_gb_per_s": copy_gb_per_s,
            "findings": findings,
        }
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
