"""The benchmark of rows: its cases and their checks, on kernels that are interpreted."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_rows import Case, CheckError, Sizes, cases_of, measure, table_of
from epcomm.ops import slots as kernels_by_device

pytest.importorskip("triton")

SIZES = Sizes(tokens=12, hidden=72, top_k=3, experts=8, ranks=2)


def test_every_case_passes_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels_by_device._LOADERS, "cpu", kernels_by_device._LOADERS["cuda"])
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
