from collections.abc import Callable

import pytest
import torch

from benchmarks.host_time import eager_row
from epcomm import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    Mode,
    MoESpec,
)
from epcomm.testing.data import BatchSpec, make_batch, make_weights, random_ids

BATCH = BatchSpec(
    hidden_size=64,
    num_local_experts=8,
    dtype=torch.bfloat16,
    tokens_of_rank=lambda rank, world_size: 8,
    choose_ids=random_ids,
)
DISPATCHERS = {Mode.NORMAL: DeepEPNormalDispatcher, Mode.LOW_LATENCY: DeepEPLowLatencyDispatcher}
# A tenth above what torch 2.13 on Python 3.11 runs.
MOST_CALLS = {
    Mode.NORMAL: {"dispatch + combine": 250, "layer": 305, "layer, forward for training": 370},
    Mode.LOW_LATENCY: {"dispatch + combine": 230, "layer": 285},
}


def calls_of(call: Callable[[], object]) -> float:
    return eager_row(call, torch.device("cpu"), rounds=1, burst=5).python_calls


@pytest.mark.ranks(1)
@pytest.mark.parametrize("mode", MOST_CALLS)
def test_calls_run_few_functions(mode: Mode) -> None:
    config = EPConfig(mode=mode, backend="collective", max_tokens_per_rank=8)
    spec = MoESpec(hidden_size=64, num_experts=8, top_k=BATCH.top_k, dtype=BATCH.dtype)
    batch = make_batch(BATCH, 0, 1)
    x, topk = batch.x, batch.topk
    with EPGroup() as group:
        dispatcher = DISPATCHERS[mode](group, spec, config)
        layer = ExpertParallelExperts(make_weights(BATCH, 1), group, config, top_k=BATCH.top_k)
        out = dispatcher.dispatch(x, topk)
        rows = batch.x.new_ones(out.num_slots, BATCH.hidden_size)
        dispatcher.combine(out.combine_input(rows))
        with torch.no_grad():
            found = {
                "dispatch + combine": calls_of(
                    lambda: dispatcher.combine(dispatcher.dispatch(x, topk).combine_input(rows))
                ),
                "layer": calls_of(lambda: layer(x, topk)),
            }
        if mode is Mode.NORMAL:
            found["layer, forward for training"] = calls_of(lambda: layer(x, topk))
    assert found.keys() == MOST_CALLS[mode].keys()
    for name, most in MOST_CALLS[mode].items():
        # With a default device a torch function mode is active, whose functions are counted too.
        if torch._C._len_torch_function_stack() == 0:
            assert 0 < found[name] <= most, name
