"""Dispatchers: faults of several ranks, grad modes, asynchronous calls and shared buffers.

test_bad_calls.py has the faults of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from epcomm import (
    CapacityError,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    HandleError,
    MoESpec,
    RowsDispatchOutput,
    ShapeError,
    StandardDispatcher,
    TopKOutput,
)
from epcomm.dispatchers.dispatcher import Dispatcher
from epcomm.ops.slots import gather_rows
from epcomm.testing.data import BatchSpec, make_weights, random_ids

NUM_RANKS, H, E, K, M = 4, 16, 8, 2, 5
SPEC = MoESpec(hidden_size=H, num_experts=E, top_k=K, dtype=torch.float32)
DISPATCHERS = {"normal": DeepEPNormalDispatcher, "standard": StandardDispatcher}
# The rank with the fault.
FAULTY = 1


def dispatcher_of(kind: str, group: EPGroup) -> Dispatcher:
    return DISPATCHERS[kind](group, SPEC, EPConfig(max_tokens_per_rank=M))


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one dispatch."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @property
    def topk(self) -> TopKOutput:
        return TopKOutput(topk_ids=self.ids, topk_weights=self.weights)

    @classmethod
    def draw(cls, device: torch.device, seed: int, num_tokens: int) -> Call:
        """Make a valid call."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.rand(num_tokens, E, generator=generator).argsort(1)[:, :K]
        return cls(
            x=torch.randn(num_tokens, H, generator=generator).to(device).requires_grad_(),
            ids=ids.to(device),
            weights=torch.rand(num_tokens, K, generator=generator).to(device),
        )


def good_call(group: EPGroup, *, num_tokens: int | None = None) -> Call:
    """Make a valid call with 2, 3, 4, 5 tokens by rank, so T = M on the last rank."""
    num_tokens = 2 + group.rank if num_tokens is None else num_tokens
    return Call.draw(group.device, group.rank, num_tokens)


def identity_experts(out: RowsDispatchOutput) -> Tensor:
    """Return each slot as its row times its weight."""
    assert out.slot_weights is not None
    return gather_rows(out.hidden_states.data, out.index) * out.slot_weights.unsqueeze(1)


def run(dispatcher: Dispatcher, call: Call) -> Tensor:
    """Dispatch and combine with identity experts that apply the weights."""
    out = dispatcher.dispatch(call.x, call.topk)
    return dispatcher.combine(out.combine_input(identity_experts(out)))


def check_works(dispatcher: Dispatcher, call: Call) -> None:
    """Check one correct batch, forward and backward."""
    y = run(dispatcher, call)
    y.backward(torch.ones_like(y))
    factor = call.weights.sum(1, keepdim=True)
    torch.testing.assert_close(y, call.x * factor)
    torch.testing.assert_close(call.x.grad, factor.expand(-1, H))


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("kind", DISPATCHERS)
def test_two_faults_are_told_together(kind: str) -> None:
    with EPGroup() as group:
        dispatcher = dispatcher_of(kind, group)
        call = good_call(group, num_tokens=M + 1 if group.rank == 3 else None)
        if group.rank == FAULTY:
            call = replace(call, ids=call.ids.int())
        kinds = {FAULTY: ShapeError, 3: CapacityError}
        with pytest.raises(kinds.get(group.rank, ShapeError)) as caught:
            dispatcher.dispatch(call.x, call.topk)
        if group.rank not in kinds:
            assert "wrong shape, dtype or device on rank 1" in str(caught.value)
            assert "more tokens than max_tokens_per_rank on rank 3" in str(caught.value)
        check_works(dispatcher, good_call(group))


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("kind", DISPATCHERS)
def test_asynchronous_calls_do_their_work_in_wait(kind: str) -> None:
    with EPGroup() as group:
        dispatcher = dispatcher_of(kind, group)
        call = good_call(group)
        pending = dispatcher.dispatch_async(call.x, call.topk)
        out = pending.wait()
        y = dispatcher.combine_async(out.combine_input(identity_experts(out))).wait()
        torch.testing.assert_close(y, call.x * call.weights.sum(1, keepdim=True))
        with pytest.raises(HandleError, match="already completed"):
            pending.wait()


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("kind", DISPATCHERS)
def test_layers_of_one_shape_share_a_buffer(kind: str) -> None:
    spec = BatchSpec(tokens_of_rank=lambda rank, world_size: 2, choose_ids=random_ids)
    with EPGroup() as group:
        config = EPConfig(mode=kind)  # type: ignore[arg-type]
        first, second = (
            ExpertParallelExperts(
                make_weights(spec, NUM_RANKS, number=number, device=group.device),
                group,
                config,
                top_k=2,
            )
            for number in range(2)
        )
        wider = ExpertParallelExperts(
            make_weights(replace(spec, hidden_size=64), NUM_RANKS, device=group.device),
            group,
            config,
            top_k=2,
        )
        assert first.phases.prefill is not second.phases.prefill
        assert first.phases.prefill._buffer is second.phases.prefill._buffer
        assert first.phases.prefill._buffer is not wider.phases.prefill._buffer
