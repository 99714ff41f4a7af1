"""What a call costs the host, in functions of Python: no noise, so it can be held."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_host import measure
from epcomm import EPGroup, Mode

# A tenth above what torch 2.13 on Python 3.11 runs.
MOST_CALLS = {
    Mode.NORMAL: {"dispatch + combine": 275, "layer": 340, "layer, forward for training": 415},
    Mode.LOW_LATENCY: {"dispatch + combine": 255, "layer": 315},
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("mode", MOST_CALLS)
def test_calls_run_few_functions(mode: Mode) -> None:
    with EPGroup() as group:
        costs = measure(group, mode, num_calls=1)
    assert costs.keys() == MOST_CALLS[mode].keys()
    for name, most in MOST_CALLS[mode].items():
        # Under a default device a torch function mode is active, whose functions count too.
        if torch._C._len_torch_function_stack() == 0:
            assert 0 < costs[name].python_calls <= most, name
        assert costs[name].cpu_us > 0
