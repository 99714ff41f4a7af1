import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from epcomm import (
    BackendUnavailable,
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    EPTimeout,
    HandleError,
    MoESpec,
    TopKOutput,
)
from epcomm.buffers.nvlink.low_latency import NVLinkLowLatencyBuffer
from tests.buffers.nvlink.test_low_latency import HastyBuffer, serve_any_device
from tests.failures import nvlink_rank

pytestmark = pytest.mark.slow

DEAD = 1


def exchange(dispatcher: DeepEPLowLatencyDispatcher, x: Tensor) -> Tensor:
    """Send every token to an expert of rank 0 and one of rank 1, which return it unchanged."""
    ids = torch.tensor([0, 2], device=x.device).repeat(x.shape[0], 1)
    weights = torch.full(ids.shape, 0.5, device=x.device)
    return nvlink_rank.exchange(dispatcher, x, TopKOutput(topk_ids=ids, topk_weights=weights))


@pytest.mark.ranks(2)
def test_dispatcher_survives_a_dead_rank(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_any_device(monkeypatch)
    # A timeout of 3 s.
    monkeypatch.setattr(NVLinkLowLatencyBuffer, "polls_per_s", HastyBuffer.polls_per_s)
    spec = MoESpec(hidden_size=64, num_experts=2 * num_ranks, top_k=2)
    with EPGroup() as group, torch.no_grad():
        config = EPConfig(backend="nvlink", max_tokens_per_rank=4)
        dispatcher = DeepEPLowLatencyDispatcher(group, spec, config)
        x = torch.full((3, 64), group.rank + 1.0, dtype=torch.bfloat16, device=group.device)
        assert torch.equal(exchange(dispatcher, x), x)
        if group.rank != DEAD:
            with pytest.raises(EPTimeout, match="rank 1"):
                exchange(dispatcher, x)
        # The excluded process still runs here, to end with the others; it makes no calls in
        # between.
        group.calls.gather_records({}, phase="the living have given up")
        if group.rank != DEAD:
            group.exclude_ranks([DEAD])
            for _ in range(2):
                assert torch.equal(exchange(dispatcher, x), 0.5 * x)
        group.calls.gather_records({}, phase="the living have gone on")
    with pytest.raises(HandleError, match="exclude_ranks: the EPGroup is closed"):
        group.exclude_ranks([DEAD])


@pytest.mark.ranks(2)
def test_a_backend_that_needs_all_ranks_says_so(group: EPGroup) -> None:
    spec = MoESpec(hidden_size=16, num_experts=4, top_k=1, dtype=torch.float32)
    DeepEPNormalDispatcher(group, spec, EPConfig(backend="collective"))
    with pytest.raises(BackendUnavailable, match="has buffers of collective, expected nvlink"):
        group.exclude_ranks([1 - group.rank])
