from typing import NoReturn

import pytest
import torch

from epcomm import (
    BackendUnavailable,
    DeepEPNormalDispatcher,
    EPConfig,
    EPError,
    HandleError,
    MoESpec,
    TopKOutput,
)
from epcomm.buffers.hierarchical.buffer import HierarchicalBuffer
from epcomm.buffers.shared_memory.buffer import SharedMemoryBuffer
from tests.buffers.hierarchical.test_layers import two_hosts

pytestmark = pytest.mark.ranks(4)

SPEC = MoESpec(hidden_size=16, num_experts=8, top_k=2, dtype=torch.float32)


@pytest.mark.parametrize("exchange", ["_outer", "_inner"])
@pytest.mark.parametrize("function", ["dispatch", "combine"])
def test_a_rank_without_memory_is_no_reason_to_wait(exchange: str, function: str) -> None:
    with two_hosts() as group, torch.no_grad():
        dispatcher = DeepEPNormalDispatcher(group, SPEC, EPConfig(mode="normal", timeout_s=20))
        buffer = dispatcher._buffer
        assert isinstance(buffer, HierarchicalBuffer)
        topk = TopKOutput(topk_ids=torch.tensor([[0, 7], [3, 4]]), topk_weights=torch.ones(2, 2))
        x = torch.ones(2, 16)

        def step() -> torch.Tensor:
            out = dispatcher.dispatch(x, topk)
            return dispatcher.combine(out.combine_input(torch.ones(out.num_slots, 16)))

        assert step().eq(2).all()
        if group.rank == 2:
            _fail_once(getattr(buffer, exchange), function)
            with pytest.raises((RuntimeError, EPError), match="out of memory"):
                step()
        elif (exchange, function) == ("_outer", "combine") and group.rank != 0:
            # The host of the faulty rank has combined, so ranks with another index exchange nothing
            # more with it.
            assert step().eq(2).all()
        else:
            with pytest.raises(EPError, match="rank 2"):
                step()
        assert step().eq(2).all(), "the group goes on"
        group.calls.agree({}, what="the end")


def _fail_once(buffer: object, function: str) -> None:
    """Make the next call of `function` fail before any exchange."""
    original = getattr(buffer, function)

    def fail(*args: object, **kwargs: object) -> NoReturn:
        setattr(buffer, function, original)
        raise RuntimeError("out of memory")

    setattr(buffer, function, fail)


def test_a_host_without_memory_is_told_on_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: SharedMemoryBuffer) -> NoReturn:
        raise BackendUnavailable("no memory here")

    with two_hosts() as group:
        if group.rank >= 2:
            monkeypatch.setattr(SharedMemoryBuffer, "prepare", full)
        with pytest.raises(BackendUnavailable, match="no memory here"):
            DeepEPNormalDispatcher(group, SPEC, EPConfig(mode="normal"))
        monkeypatch.undo()
        DeepEPNormalDispatcher(group, SPEC, EPConfig(mode="normal"))


def test_a_rank_in_another_call_is_told_to_ranks_that_share_no_part_with_it() -> None:
    with two_hosts() as group, torch.no_grad():
        dispatcher = DeepEPNormalDispatcher(group, SPEC, EPConfig(mode="normal"))
        x = torch.ones(2, SPEC.hidden_size)
        ids = torch.zeros(2, SPEC.top_k, dtype=torch.int64) + torch.arange(SPEC.top_k)
        topk = TopKOutput(topk_ids=ids, topk_weights=torch.ones(2, SPEC.top_k))
        dispatcher.dispatch(x, topk)

        def call() -> None:
            if group.rank == 0:
                dispatcher.dispatch(x, topk)
            else:
                # Rank 3 is on the other host, and its index in the host differs from that of rank
                # 0.
                group.calls.gather_records({})

        with pytest.raises(HandleError, match=r"rank 0 "):
            call()
        dispatcher.dispatch(x, topk)
