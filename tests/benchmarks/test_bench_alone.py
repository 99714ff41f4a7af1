"""The program that times NVLink kernels alone checks them first: here on a CPU, without a clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import bench_alone
from epcomm.bench.check import CheckError
from tests.kernels.nvlink.host_cuda import compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU"),
    pytest.mark.skipif(compiler() is None, reason="no compiler of the host"),
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"HIDDEN": 256, "TOP_K": 4, "EXPERTS": 16, "NUM_SMS": 3, "NUM_PROGRAMS": 3}
    sizes |= {"MAX_TOKENS": 48, "MAX_LOW_LATENCY_TOKENS": 16}

    def call_twice(
        call: Callable[[], object], reset: Callable[[], None], kernels: int = 1
    ) -> list[float]:
        for _ in range(2):
            reset()
            call()
        return [float(kernels)]

    for name, value in {**sizes, "time_call": call_twice}.items():
        monkeypatch.setattr(bench_alone, name, value)


def test_all_calls_are_checked() -> None:
    assert set(bench_alone.time_normal(2, 40, CPU)) >= {"combine", "dispatch"}
    for num_tokens in (1, 12):
        assert bench_alone.time_low_latency(2, num_tokens, CPU) == [4]


def test_wrong_sums_get_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = bench_alone.combine_rows
    monkeypatch.setattr(bench_alone, "combine_rows", lambda *args, **kw: combine(*args, **kw) + 1)
    with pytest.raises(CheckError, match="wrong"):
        bench_alone.time_normal(2, 1, CPU)
