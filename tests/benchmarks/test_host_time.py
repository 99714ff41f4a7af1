import time
from collections.abc import Callable

import pytest
import torch

from benchmarks.host_time import eager_row
from epcomm.buffers.nvlink.normal_counts import Totals


def wait(self: Totals, check: Callable[[], None], timeout_s: float) -> list[int] | None:
    time.sleep(0.004)
    return None


def test_rows_count_work_and_leave_waiting_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Totals, "wait", wait)
    totals, x = object.__new__(Totals), torch.zeros(2)

    def call() -> None:
        totals.wait(lambda: None, 1.0)
        x.add_(1).mul_(2)

    row = eager_row(call, torch.device("cpu"), rounds=2, burst=3)
    assert Totals.wait is wait, "what was replaced is put back"
    assert row.torch_operators == 2
    # With a default device a torch function mode is active, whose functions are counted too.
    if torch._C._len_torch_function_stack() == 0:
        assert row.python_calls == 2, "call() and wait()"
    assert row.waited_us >= 3_900
    assert 0 < row.units * row.unit_us < 2_000
    assert row.units == (row.us - row.waited_us) / row.unit_us
    assert "add_" in row.profile
    assert " tests/benchmarks/test_host_time.py:" in row.profile
