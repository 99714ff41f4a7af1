"""A device graph of dispatch and combine in each format of sums: y by the definition.

    MULTI_RANK_BACKEND=nccl scripts/launch_multi_rank.sh 2 tests/dispatchers/test_combine_graphs.py

With gloo_on_gpus, ranks may share a GPU; then only nvlink has graphs. CPU ranks have none.
"""

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epcomm import EPConfig, EPGroup, Mode, WireDtype
from epcomm.dispatchers import DeepEPLowLatencyDispatcher, DeepEPNormalDispatcher
from tests.dispatchers.test_combine_dtype import (
    ROW_BYTES,
    SPEC,
    batch_of,
    compute,
    expected,
    spec_of,
)
from tests.multi_rank import BACKEND_ENV, SHARED_GPUS
from tests.placement.test_graphs import captured_calls, needs_gpus

# Over nvlink a rank sends at most 32 tokens in lines: rank 0 does so, the others send in bulk.
LARGER = replace(SPEC, tokens_of_rank=lambda rank, size: 24 + 20 * rank)
WAYS = [("nvlink", Mode.LOW_LATENCY), ("nvlink", Mode.NORMAL)]
CASES = [(*way, each) for way in WAYS for each in ROW_BYTES]
if os.environ.get(BACKEND_ENV) != SHARED_GPUS:
    CASES += [("collective", Mode.LOW_LATENCY, each) for each in ROW_BYTES]


@needs_gpus
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("backend", "mode", "combine_dtype"), CASES, ids=str)
def test_replays_of_other_tokens_have_the_bits_of_the_definition(
    backend: str, mode: Mode, combine_dtype: WireDtype | None
) -> None:
    is_normal = mode is Mode.NORMAL
    kind = DeepEPNormalDispatcher if is_normal else DeepEPLowLatencyDispatcher
    config = EPConfig(
        backend=backend,
        combine_dtype=combine_dtype,
        max_tokens_per_rank=128,
        max_recv_slots=1024 if is_normal else None,
    )
    with EPGroup() as group, torch.no_grad():
        rank, world_size = group.rank, group.world_size
        dispatcher = kind(group, spec_of(world_size), config)
        assert dispatcher.plan.is_capturable
        batch = batch_of(rank, world_size, config, spec=LARGER).to(group.device)

        def call() -> Tensor:
            out = dispatcher.dispatch(batch.x, batch.topk)
            return dispatcher.combine(out.combine_input(compute(out, rank)))

        replay, y = captured_calls(call)
        for number in range(1, 4):
            other = batch_of(rank, world_size, config, spec=LARGER, number=number)
            for name, tensor in vars(other).items():
                getattr(batch, name).copy_(tensor)
            wanted = expected(other, [[each] for each in range(world_size)], combine_dtype)
            y.fill_(torch.nan)
            replay()
            for found in (y, call()):
                assert torch.equal(found.cpu(), wanted), f"batch {number}, rank {rank}"
        dispatcher.check()
