"""The program that times NVLink kernels alone checks them first: here on a CPU, without a clock."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import bench_alone
from epcomm.bench.check import CheckError
from epcomm.quantization import FP8_FLOAT32_SCALES
from tests.kernels.nvlink.host_cuda import compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU"),
    pytest.mark.skipif(compiler() is None, reason="no compiler of the host"),
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"HIDDEN": 256, "TOP_K": 4, "EXPERTS": 16, "MAX_TOKENS": 48}

    def call_twice(
        call: Callable[[], object], reset: Callable[[], None], kernels: int = 1
    ) -> list[float]:
        for _ in range(2):
            reset()
            call()
        return [float(kernels)]

    for name, value in {**sizes, "time_call": call_twice}.items():
        monkeypatch.setattr(bench_alone, name, value)


def test_normal_mode_is_checked_and_timed() -> None:
    names = {"combine", "combine_without_weights", "dispatch"}
    assert set(bench_alone.time_normal(2, 40, CPU)) == names
    assert set(bench_alone.time_normal(2, 40, CPU, FP8_FLOAT32_SCALES)) == names


def test_wrong_sums_get_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = bench_alone.Ranks.results
    monkeypatch.setattr(bench_alone.Ranks, "results", lambda *args: 2 * factors(*args))
    with pytest.raises(CheckError, match="wrong"):
        bench_alone.time_normal(2, 1, CPU)
