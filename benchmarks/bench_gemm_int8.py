"""Measure INT8 experts on a GPU: two grouped products, SwiGLU and the second quantisation.

    python -m benchmarks.bench_gemm_int8 --output gemm_int8.json

The sizes and the alternative, BF16 with grouped_mm, are those of bench_gemm. Results of the kernels
are compared with exact sums of the same codes first, or the program ends without a number.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor

from benchmarks.bench_gemm import (
    Experts,
    Size,
    counts_of,
    masked_record,
    rows_record,
    run_bf16,
    time_in_turn,
)
from benchmarks.bench_quantize import CheckError, copy_rate
from benchmarks.measuring.machine_facts import describe_hardware, describe_versions
from epcomm import Int8ChannelWeights, RowsDispatchOutput
from epcomm.quantization import INT8_PER_TOKEN, quantize
from epcomm.runners.int8_triton import Int8TritonRunner
from epcomm.weights.unquantized import ExpertWeights

# Relative, of bfloat16 results: half a unit in the last place, 2**-8, and where an activation lies
# within float32 rounding of the middle between two codes, one step of some hundred in one of I.
TOLERANCE = 0.005
# Bytes a slot and column of I between the products: float32 written and read, codes written.
HIDDEN_BYTES = 9


@dataclass(frozen=True, kw_only=True, eq=False)
class Int8Experts:
    """The same experts in both precisions."""

    bf16: Experts
    int8: Int8ChannelWeights

    @classmethod
    def make(cls, size: Size, device: torch.device) -> Int8Experts:
        """Make the experts of bench_gemm in INT8."""
        plain = Experts.make(size, device)
        weights = ExpertWeights(gate_up_proj=plain.gate_up, down_proj=plain.down)
        return cls(bf16=plain, int8=Int8ChannelWeights.from_unquantized(weights))


def int8_record(counts: list[int], x: Tensor) -> RowsDispatchOutput:
    """Rows in random order, one slot each, quantised to INT8."""
    return replace(rows_record(counts, x), hidden_states=quantize(x, INT8_PER_TOKEN))


def check(results: Tensor, dispatched: RowsDispatchOutput, weights: Int8ChannelWeights) -> None:
    """Compare the first and the last expert with exact sums of the same codes, in float64.

    Raises:
        CheckError: they differ by more than rounding explains.
    """
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
        if not error <= TOLERANCE:
            raise CheckError(f"expert {expert} is off by {error:.1e}; nothing was measured")


def measure(
    rows: int, skew: int, size: Size, experts: Int8Experts, copy_gb_per_s: float, num_calls: int
) -> dict[str, object]:
    """Check one distribution of rows, then time it in INT8, in BF16 and MASKED."""
    x = torch.randn(rows, size.hidden, device=experts.bf16.down.device, dtype=torch.bfloat16)
    dispatched = int8_record(counts_of(rows, size.experts, skew), x)
    runner, weights = Int8TritonRunner(), experts.int8
    check(runner.run(dispatched, weights).hidden_states, dispatched, weights)
    calls: dict[str, Callable[[], object]] = {
        "int8": lambda: runner.run(dispatched, weights),
        "bf16": lambda: run_bf16(x, dispatched.index.first_slot[1:], experts.bf16),
    }
    if rows <= 1024:
        masked = masked_record(dispatched)
        calls["int8 masked"] = lambda: runner.run(masked, weights)
    times = time_in_turn(calls, num_calls)
    int8_ms = times["int8"].p50
    hidden_bytes = HIDDEN_BYTES * rows * size.inner
    return {
        "rows": rows,
        "skew": skew,
        "ms": {name: {"p50": t.p50, "p95": t.p95, "p99": t.p99} for name, t in times.items()},
        "times_as_fast_as_bf16": times["bf16"].p50 / int8_ms,
        "tops": size.operations(rows) / int8_ms / 1e9,
        "weights_over_copy_rate": size.weight_bytes / int8_ms / 1e6 / copy_gb_per_s,
        # The share of the time that moving hidden rows would take at the rate of a copy.
        "hidden_rows_part": hidden_bytes / copy_gb_per_s / 1e6 / int8_ms,
        "masked_over_rows": times["int8 masked"].p50 / int8_ms if "int8 masked" in times else None,
    }


def main(
    experts: Annotated[int, typer.Option(min=8, help="L.")] = 32,
    hidden: Annotated[int, typer.Option(min=128, help="H.")] = 7168,
    inner: Annotated[int, typer.Option(min=128, help="I.")] = 2048,
    calls: Annotated[int, typer.Option(min=1, help="Measured calls of each.")] = 30,
    output: Annotated[Path | None, typer.Option(help="Write the report there, as JSON.")] = None,
) -> None:
    """Check, measure, and print what came of it."""
    if not torch.cuda.is_available():
        sys.exit("bench_gemm_int8: no CUDA device; the kernels are measured on a GPU only")
    device = torch.device("cuda", torch.cuda.current_device())
    size = Size(experts=experts, hidden=hidden, inner=inner)
    console = Console(highlight=False, markup=False)
    copy_gb_per_s = copy_rate(device, num_calls=calls)
    try:
        with torch.no_grad():
            made = Int8Experts.make(size, device)
            findings = [
                measure(rows, skew, size, made, copy_gb_per_s, calls)
                for rows, skew in ((32768, 1), (32768, 8), (1024, 1))
            ]
    except CheckError as error:
        sys.exit(str(error))
    for finding in findings:
        console.print(json.dumps(finding))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "benchmark": "gemm_int8",
            "configuration": {"experts": experts, "hidden": hidden, "inner": inner, "calls": calls},
            "hardware": describe_hardware(device),
            "versions": describe_versions(device),
            "command": shlex.join(["python", "-m", "benchmarks.bench_gemm_int8", *sys.argv[1:]]),
            "copy_gb_per_s": copy_gb_per_s,
            "findings": findings,
        }
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
