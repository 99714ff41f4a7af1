"""Measure eight-bit experts on a GPU: two grouped products, SwiGLU, the second quantisation.

    python -m benchmarks.bench_gemm --output gemm.json
    python -m benchmarks.bench_gemm --format int8 --output gemm_int8.json

The alternative in the same run is BF16: grouped_mm, silu(gate) * up, grouped_mm. Results of the
kernels are first compared with float32 products of the same codes; on a difference the program ends
without a number. FP8 is measured on a Hopper GPU. Rows are quantised and read through an index, as
a buffer returns them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from benchmarks.measuring import Output, copy_rate, gpu_of, report_of, write_report
from epcomm import Fp8BlockWeights, Int8ChannelWeights, RowsDispatchOutput
from epcomm.bench.check import CheckError
from epcomm.bench.timing import Clock, Percentiles, captured
from epcomm.cli.records import takes_records
from epcomm.ops.slots import build_slot_index
from epcomm.quantization import FP8_FLOAT32_SCALES, INT8_PER_TOKEN, dequantize, quantize
from epcomm.records import Handle
from epcomm.runners.base import ExpertRunner
from epcomm.runners.fp8_triton import Fp8TritonRunner
from epcomm.runners.fp8_wgmma import Fp8WgmmaRunner
from epcomm.runners.int8_triton import Int8TritonRunner
from epcomm.types import WeightsAppliedBy, WireFormat
from epcomm.weights.unquantized import ExpertWeights

# Replays of each graph before those that are timed.
_WARM_UP = 3
# Distributions of rows: the number of rows, and the skew, see counts_of().
_DISTRIBUTIONS = ((32768, 1), (32768, 8), (1024, 1))


class Format(StrEnum):
    """The format of the experts."""

    FP8 = "fp8"
    INT8 = "int8"

    @property
    def wire(self) -> WireFormat:
        """The format of their rows."""
        return FP8_FLOAT32_SCALES if self is Format.FP8 else INT8_PER_TOKEN

    @property
    def tolerance(self) -> float:
        """The largest relative error.

        FP8: products of the same codes in float32, and on tensor cores with some 14 bits. INT8:
        half a unit in the last place of bfloat16, 2**-8, and one step of some hundred in one of I
        where an activation is within float32 rounding of the middle between two codes.
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
    codes: Fp8BlockWeights | Int8ChannelWeights

    @classmethod
    def make(cls, size: Size, device: torch.device) -> Experts:
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
        kind = Fp8BlockWeights if size.format is Format.FP8 else Int8ChannelWeights
        return cls(format=size.format, plain=plain, codes=kind.from_unquantized(plain))


def counts_of(rows: int, experts: int, skew: int) -> list[int]:
    """Return the slots of each expert; an eighth of the experts get `skew` times as many."""
    shares = [skew if expert < experts // 8 else 1 for expert in range(experts)]
    counts = [rows * share // sum(shares) for share in shares]
    counts[0] += rows - sum(counts)
    return counts


def rows_record(counts: list[int], x: Tensor, wire: WireFormat) -> RowsDispatchOutput:
    """Make a record of rows in random order, with one slot each."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))].to(x.device)
    device_counts = torch.tensor(counts, device=x.device)
    return RowsDispatchOutput(
        hidden_states=quantize(x, wire),
        index=build_slot_index(ids.unsqueeze(1), device_counts, counts),
        slot_weights=None,
        weights_applied_by=WeightsAppliedBy.COMBINE,
        handle=Handle(owner=None, num_tokens=len(ids)),
    )


def check(results: Tensor, dispatched: RowsDispatchOutput, experts: Experts) -> None:
    """Compare the first and the last expert with float32 products of the same codes.

    Raises:
        CheckError: the results differ by more than rounding.
    """
    index, matrices = dispatched.index, experts.codes.dequantized()
    assert index.row_of_slot is not None
    starts = index.first_slot.tolist()
    rows = dequantize(dispatched.hidden_states, torch.float32)
    for expert in (0, len(starts) - 2):
        mine = slice(starts[expert], starts[expert + 1])
        x = rows[index.row_of_slot[mine].long()]
        gate, up = (x @ matrices["gate_up_proj"][expert].T).chunk(2, dim=1)
        hidden = quantize(F.silu(gate) * up, experts.format.wire)
        expected = dequantize(hidden, torch.float32) @ matrices["down_proj"][expert].T
        error = float((results[mine].float() - expected).norm() / expected.norm())
        if not error <= experts.format.tolerance:
            raise CheckError(f"expert {expert} has an error of {error:.1e}; nothing was measured")


def run_bf16(slots: Tensor, ends: Tensor, experts: ExpertWeights) -> Tensor:
    """Compute BF16 experts by torch's grouped matmul over packed slots."""
    hidden = F.grouped_mm(slots, experts.gate_up_proj.transpose(1, 2), offs=ends)
    gate, up = hidden.chunk(2, dim=1)
    return F.grouped_mm(F.silu(gate) * up, experts.down_proj.transpose(1, 2), offs=ends)


def time_in_turn(
    calls: Mapping[str, Callable[[], object]], device: torch.device, num_calls: int
) -> dict[str, Percentiles]:
    """Return milliseconds of each call as a graph, one after another: clocks treat all alike.

    The host waits once, at the end, so that the time includes no launch.
    """
    graphs = {name: captured(call) for name, call in calls.items()}
    clocks = {name: [Clock(device) for _ in range(num_calls)] for name in calls}
    for _ in range(_WARM_UP):
        for graph in graphs.values():
            graph.replay()
    for number in range(num_calls):
        for name, graph in graphs.items():
            clocks[name][number].mark()
            graph.replay()
            clocks[name][number].mark()
    return {
        name: Percentiles.of(clock.take()[0] for clock in found) for name, found in clocks.items()
    }


def runners_of(format: Format) -> Mapping[str, ExpertRunner]:
    """Return the runners of a format, by name; the one that auto would take comes first."""
    if format is Format.INT8:
        return {"int8": Int8TritonRunner()}
    return {"fp8": Fp8WgmmaRunner(), "fp8 in triton": Fp8TritonRunner()}


def measure(
    experts: Experts, rows: int, skew: int, copy_gb_per_s: float, num_calls: int
) -> dict[str, object]:
    """Check one distribution of rows, then time it in eight bits and in BF16."""
    num_experts, hidden, inner = experts.plain.down_proj.shape
    device = experts.plain.down_proj.device
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    dispatched = rows_record(counts_of(rows, num_experts, skew), x, experts.format.wire)
    runners = runners_of(experts.format)
    calls: dict[str, Callable[[], object]] = {}
    for name, runner in runners.items():
        check(runner.run(dispatched, experts.codes).hidden_states, dispatched, experts)
        calls[name] = partial(runner.run, dispatched, experts.codes)
    calls["bf16"] = partial(run_bf16, x, dispatched.index.first_slot[1:], experts.plain)
    times = time_in_turn(calls, device, num_calls)
    own_ms = times[experts.format].p50
    return {
        "rows": rows,
        "skew": skew,
        "ms": {name: asdict(each) for name, each in times.items()},
        "times_as_fast_as_bf16": times["bf16"].p50 / own_ms,
        "tera_operations_per_s": 6 * rows * hidden * inner / own_ms / 1e9,
        "weights_over_copy_rate": 3 * num_experts * hidden * inner / own_ms / 1e6 / copy_gb_per_s,
    }


@takes_records
def main(size: Size, output: Output) -> None:
    """Check the experts, measure them, and print the results."""
    device = gpu_of("bench_gemm")
    benchmark = "gemm_int8" if size.format is Format.INT8 else "gemm"
    report = report_of(benchmark, asdict(size), device, "benchmarks.bench_gemm")
    rate = copy_rate(device, size.calls)
    try:
        with torch.no_grad():
            made = Experts.make(size, device)
            findings = [measure(made, *each, rate, size.calls) for each in _DISTRIBUTIONS]
    except CheckError as error:
        sys.exit(str(error))
    sys.stdout.writelines(f"{json.dumps(each)}\n" for each in findings)
    write_report({**report, "copy_gb_per_s": rate, "findings": findings}, output)


if __name__ == "__main__":
    typer.run(main)
