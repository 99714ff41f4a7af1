"""Dispatchers: faults of two ranks, replicated tokens, grad modes of low latency, and decode.

test_bad_calls.py has the faults of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from epcomm import (
    CapacityError,
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    MoESpec,
    ShapeError,
    StandardDispatcher,
    TopKOutput,
)
from epcomm.dispatchers.dispatcher import Dispatcher
from epcomm.testing.data import BatchSpec, make_weights, random_ids
from tests.cases.playing import identity

NUM_RANKS, H, E, K, M = 4, 16, 8, 2, 5
SPEC = MoESpec(hidden_size=H, num_experts=E, top_k=K, dtype=torch.float32)
DISPATCHERS = {"normal": DeepEPNormalDispatcher, "standard": StandardDispatcher}
REPLICATED = EPConfig(replicated=True, max_tokens_per_rank=M)
COLLECTIVE = EPConfig(backend="collective", max_tokens_per_rank=M)
# The rank with the fault.
FAULTY = 1


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

    @classmethod
    def of_rank(cls, group: EPGroup, num_tokens: int | None = None) -> Call:
        """Make a valid call with 2, 3, 4, 5 tokens by rank, so T = M on the last rank."""
        return cls.draw(group.device, group.rank, num_tokens or 2 + group.rank)

    @classmethod
    def of_all(cls, group: EPGroup, num_tokens: int = 4) -> Call:
        """Make a call that is equal on all ranks."""
        return cls.draw(group.device, 0, num_tokens)


def run(dispatcher: Dispatcher, call: Call) -> Tensor:
    """Dispatch and combine with identity experts."""
    return dispatcher.combine(identity(dispatcher.dispatch(call.x, call.topk)))


def check_works(dispatcher: Dispatcher, call: Call) -> None:
    """Check one correct batch, forward and backward."""
    y = run(dispatcher, call)
    y.backward(torch.ones_like(y))
    factor = call.weights.sum(1, keepdim=True)
    torch.testing.assert_close(y, call.x * factor)
    torch.testing.assert_close(call.x.grad, factor.expand(-1, H))


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("kind", DISPATCHERS)
def test_two_faults_are_reported_together(kind: str, group: EPGroup) -> None:
    dispatcher = DISPATCHERS[kind](group, SPEC, EPConfig(max_tokens_per_rank=M))
    call = Call.of_rank(group, M + 1 if group.rank == 3 else None)
    if group.rank == FAULTY:
        call = replace(call, ids=call.ids.int())
    kinds = {FAULTY: ShapeError, 3: CapacityError}
    with pytest.raises(kinds.get(group.rank, ShapeError)) as caught:
        dispatcher.dispatch(call.x, call.topk)
    if group.rank not in kinds:
        assert "wrong shape, dtype or device on rank 1" in str(caught.value)
        assert "more tokens than max_tokens_per_rank on rank 3" in str(caught.value)
    check_works(dispatcher, Call.of_rank(group))


@pytest.mark.ranks(NUM_RANKS)
def test_other_replicated_tokens_of_one_rank_are_reported_on_every_rank(group: EPGroup) -> None:
    dispatcher = StandardDispatcher(group, SPEC, REPLICATED)
    call = Call.of_all(group)
    with pytest.raises(ShapeError, match="ranks pass 4, 3, 4, 4 tokens, expected the same"):
        run(dispatcher, Call.of_all(group, 3) if group.rank == FAULTY else call)
    check_works(dispatcher, call)


@pytest.mark.ranks(NUM_RANKS)
def test_rank_whose_replicated_inputs_need_no_gradients_takes_part_in_backward() -> None:
    with EPGroup() as group:
        dispatcher = StandardDispatcher(group, SPEC, REPLICATED)
        call = Call.of_all(group)
        mine = call if group.rank == FAULTY else replace(call, x=call.x.detach())
        run(dispatcher, mine).sum().backward()
        assert (mine.x.grad is not None) == (group.rank == FAULTY)
        check_works(dispatcher, Call.of_all(group))


@pytest.mark.ranks(NUM_RANKS)
def test_replicated_rows_have_no_history_of_the_callers_tensor(group: EPGroup) -> None:
    dispatcher = StandardDispatcher(group, SPEC, REPLICATED)
    call = Call.of_all(group)
    with torch.no_grad():
        out = dispatcher.dispatch(call.x, call.topk)
    assert not out.hidden_states.data.requires_grad
    # The tensor of the caller stays as it is where only the router weights need a gradient.
    x = call.x.detach()
    run(dispatcher, replace(call, x=x, weights=call.weights.requires_grad_()))
    assert not x.requires_grad


@pytest.mark.ranks(NUM_RANKS)
def test_grad_mode_may_differ_where_there_are_no_gradients(group: EPGroup) -> None:
    dispatcher = DeepEPLowLatencyDispatcher(group, SPEC, COLLECTIVE)
    call = Call.of_rank(group)
    call = replace(call, x=call.x.detach())
    with torch.set_grad_enabled(group.rank == FAULTY):
        y = run(dispatcher, call)
    torch.testing.assert_close(y, call.x * call.weights.sum(1, keepdim=True))
    dispatcher.check()


@pytest.mark.ranks(NUM_RANKS)
def test_decode_over_collective_has_exact_sizes_and_the_sums_of_prefill() -> None:
    """Selected by name, low latency has static sizes."""
    spec = BatchSpec(
        tokens_of_rank=lambda rank, size: M,
        choose_ids=random_ids,
        hidden_size=H,
        num_local_experts=E // NUM_RANKS,
    )
    with EPGroup() as group, torch.no_grad():
        weights = make_weights(spec, group.world_size, device=group.device)
        experts = ExpertParallelExperts(weights, group, COLLECTIVE, top_k=K)
        decode = experts.phases.of_phase(decode=True).plan
        assert (decode.buffer, decode.caps.is_static) == ("CollectiveBuffer", False)
        by_name = DeepEPLowLatencyDispatcher(group, SPEC, COLLECTIVE).plan
        assert by_name.buffer == "StaticCollectiveBuffer"
        good, bad = Call.of_rank(group), Call.of_rank(group, M + 1 if group.rank == 2 else None)
        y = experts(good.x, good.topk)
        assert torch.equal(experts(good.x, good.topk, decode=True), y)
        with pytest.raises(CapacityError, match="rank 2"):
            experts(bad.x, bad.topk, decode=True)
        assert torch.equal(experts(good.x, good.topk, decode=True), y)
