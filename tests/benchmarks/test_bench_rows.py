"""The benchmark of rows: its cases and their checks, on kernels that are interpreted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.bench_rows import Case, CheckError, Finding, Sizes, cases_of, measure, table_of
from epcomm.bench.timing import Percentiles
from epcomm.ops import select

pytest.importorskip("triton")

SIZES = Sizes(tokens=12, hidden=72, top_k=3, experts=8, ranks=2)


def test_every_case_passes_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(select._LOADERS, "cpu", select._LOADERS["cuda"])
    names = []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for make in cases_of(SIZES, device):
        case = make()
        case.check()
        case.call()
        names.append(case.name)
    assert names[:3] == ["pack bf16", "pack fp8_e4m3", "inverse of pack"]
    assert len(names) == len(set(names)) == 7


def test_a_wrong_kernel_gets_no_number() -> None:
    def fail() -> None:
        raise CheckError("pack: [3, 4] differs from plain torch; not measured")

    case = Case(name="pack", num_bytes=8, call=list, plain=list, check=fail)
    finding = measure(lambda: case, torch.empty(0), calls=1)
    assert (finding.case, finding.ms) == ("pack", None)
    assert finding.fault.startswith("pack: [3, 4] differs")
    assert table_of([finding]).row_count == 1


def test_times_are_those_of_the_median() -> None:
    ms, copy = (Percentiles(p50=p50, p95=9.0, p99=9.0) for p50 in (3.0, 2.0))
    assert Finding(case="pack", ms=ms, copy_ms=copy).times_a_copy == 1.5


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_program_ends_without_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_rows"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
