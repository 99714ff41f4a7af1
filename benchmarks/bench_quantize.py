"""Measure quantising hidden states on a GPU against the rate of a device-to-device copy.

    python -m benchmarks.bench_quantize --output quantize.json

The kernels are compared with plain torch first, bit by bit, or the program ends without a number.
A rate counts each byte that must be read or written once: hidden states, codes and scales.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from epcomm.bench.machine import describe_hardware, describe_versions
from epcomm.bench.timing import EventClock, Percentiles, captured
from epcomm.quantization import (
    FP8_FLOAT32_SCALES,
    FP8_POWER_OF_TWO_SCALES,
    INT8_PER_TOKEN,
    Int8Profile,
    Quantizer,
    quantize,
    quantizer_for,
)
from epcomm.quantization.outputs import output_for
from epcomm.types import WireFormat

# 256 MiB: several times the cache of any GPU, so that writing it leaves nothing of the tensors.
FLUSH_BYTES = 256 * 2**20
# 1 GiB: long enough that the launch does not count, and beyond every cache.
COPY_BYTES = 2**30


class CheckError(Exception):
    """A kernel wrote other bits than plain torch; nothing may be measured."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A quantisation to measure."""

    name: str
    format: WireFormat
    profile: Int8Profile = Int8Profile.RINT127

    def num_bytes(self, x: Tensor) -> int:
        """Return the bytes that one call reads and writes."""
        rows, hidden_size = x.shape
        written = self.format.data_bytes(hidden_size) + self.format.scale_bytes(hidden_size)
        return rows * (hidden_size * x.element_size() + written)


CASES = (
    Case(name="fp8", format=FP8_FLOAT32_SCALES),
    Case(name="fp8 powers of two", format=FP8_POWER_OF_TWO_SCALES),
    *(Case(name=f"int8 {p.value}", format=INT8_PER_TOKEN, profile=p) for p in Int8Profile),
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One case at one number of tokens; ms: of plain torch too, and of a copy of as many bytes."""

    case: str
    tokens: int
    num_bytes: int
    ms: Percentiles
    plain_ms: Percentiles
    copy_ms: Percentiles
    copy_gb_per_s: float

    @property
    def gb_per_s(self) -> float:
        """Read and written, by the median."""
        return self.num_bytes / self.ms.p50 / 1e6

    @property
    def share_of_copy(self) -> float:
        """Return the rate as a share of the rate of a copy in the same run."""
        return self.gb_per_s / self.copy_gb_per_s

    def as_dict(self) -> dict[str, object]:
        """Return all values, rounded to the resolution of events."""
        return {
            "case": self.case,
            "tokens": self.tokens,
            "num_bytes": self.num_bytes,
            "ms": {name: round(value, 4) for name, value in asdict(self.ms).items()},
            "copy_ms": {name: round(value, 4) for name, value in asdict(self.copy_ms).items()},
            "plain_torch_ms": {name: round(v, 4) for name, v in asdict(self.plain_ms).items()},
            "gb_per_s": round(self.gb_per_s, 1),
            "share_of_copy": round(self.share_of_copy, 3),
        }


def check(x: Tensor, case: Case) -> None:
    """Compare the device's own implementation with plain torch.

    Raises:
        CheckError: bits differ.
    """
    came = quantizer_for(x.device)(x, case.format, profile=case.profile)
    expected = quantize(x, case.format, profile=case.profile)
    num_codes = _num_differing(came.data, expected.data)
    num_scales = _num_differing(came.scales, expected.scales)
    if num_codes or num_scales:
        raise CheckError(
            f"{case.name}: {num_codes} bytes of codes and {num_scales} bytes of scales differ from "
            "plain torch; nothing was measured"
        )


def time_calls(call: Callable[[], object], flush: Tensor, *, num_calls: int) -> Percentiles:
    """Milliseconds by CUDA events, each call alone and after the cache was written over.

    The call is captured: from Python it would start later than the GPU is ready.
    """
    graph, laps = captured(call), []
    for _ in range(num_calls):
        flush.zero_()
        clock = EventClock()
        clock.mark()
        graph.replay()
        clock.mark()
        laps += clock.take()
    return Percentiles.of(laps)


def copy_rate(device: torch.device, *, num_calls: int) -> float:
    """Measure the GB/s that a device-to-device copy of COPY_BYTES reads and writes."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    clock = EventClock()
    for _ in range(num_calls + 1):
        clock.mark()
        target.copy_(source)
    return 2 * COPY_BYTES / statistics.median(clock.take()) / 1e6


def run(device: torch.device, *, hidden: int, tokens: Sequence[int], calls: int) -> list[Finding]:
    """Check every case at every size, then measure.

    Raises:
        CheckError: before anything was measured.
    """
    generator = torch.Generator(device).manual_seed(0)
    batches = [
        torch.randn(num, hidden, generator=generator, device=device).bfloat16() for num in tokens
    ]
    for x in batches:
        for case in CASES:
            check(x, case)
    rate = copy_rate(device, num_calls=calls)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    return [_measure(x, case, flush, rate, calls) for x in batches for case in CASES]


def report_of(
    findings: Sequence[Finding], device: torch.device, *, hidden: int, calls: int
) -> dict[str, object]:
    """Report the findings, with all that they depend on."""
    return {
        "benchmark": "quantize",
        "configuration": {"hidden": hidden, "calls": calls, "dtype": "bf16", "cold_cache": True},
        "hardware": describe_hardware(device),
        "versions": describe_versions(device),
        "command": shlex.join(["python", "-m", "benchmarks.bench_quantize", *sys.argv[1:]]),
        "copy_gb_per_s": round(findings[0].copy_gb_per_s, 1),
        "findings": [finding.as_dict() for finding in findings],
    }


def table_of(findings: Sequence[Finding]) -> Table:
    """Make a table with a row for each finding."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("", "tokens", "us p50", "us p99", "GB/s", "of copy", "copy us", "plain torch us"):
        table.add_column(name, justify="right" if name else "left")
    for finding in findings:
        table.add_row(
            finding.case,
            str(finding.tokens),
            f"{finding.ms.p50 * 1e3:.1f}",
            f"{finding.ms.p99 * 1e3:.1f}",
            f"{finding.gb_per_s:.0f}",
            f"{finding.share_of_copy:.0%}",
            f"{finding.copy_ms.p50 * 1e3:.1f}",
            f"{finding.plain_ms.p50 * 1e3:.1f}",
        )
    return table


def _measure(x: Tensor, case: Case, flush: Tensor, rate: float, calls: int) -> Finding:
    out = output_for("bench_quantize", x, case.format, None)

    def calls_of(quantizer: Quantizer) -> Percentiles:
        return time_calls(
            lambda: quantizer(x, case.format, profile=case.profile, out=out), flush, num_calls=calls
        )

    source = torch.ones(case.num_bytes(x) // 2, dtype=torch.uint8, device=x.device)
    target = torch.empty_like(source)
    return Finding(
        case=case.name,
        tokens=x.shape[0],
        num_bytes=case.num_bytes(x),
        ms=calls_of(quantizer_for(x.device)),
        plain_ms=calls_of(quantize),
        copy_ms=time_calls(lambda: target.copy_(source), flush, num_calls=calls),
        copy_gb_per_s=rate,
    )


def _num_differing(came: Tensor | None, expected: Tensor | None) -> int:
    assert came is not None, "quantised formats have scales"
    assert expected is not None, "quantised formats have scales"
    return int((came.view(torch.uint8) != expected.view(torch.uint8)).sum())


def main(
    hidden: Annotated[int, typer.Option(min=1, help="H.")] = 7168,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="T; may be repeated.")] = None,
    calls: Annotated[int, typer.Option(min=1, help="Measured calls of each.")] = 50,
    output: Annotated[Path | None, typer.Option(help="Write the report there, as JSON.")] = None,
) -> None:
    """Check all kernels, measure them, and print what came of it."""
    if not torch.cuda.is_available():
        sys.exit("bench_quantize: no CUDA device; the kernels are measured on a GPU only")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        findings = run(device, hidden=hidden, tokens=tokens or [4096, 32768], calls=calls)
    except CheckError as error:
        sys.exit(str(error))
    console = Console(highlight=False, markup=False)
    console.print(table_of(findings))
    console.print(f"a copy reads and writes {findings[0].copy_gb_per_s:.0f} GB/s")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        report = report_of(findings, device, hidden=hidden, calls=calls)
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
