"""Replicated tokens: ranks with other tokens, and gradients; test_bad_calls.py has other faults."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from epcomm import EPConfig, EPGroup, MoESpec, ShapeError, StandardDispatcher, TopKOutput
from epcomm.ops.slots import gather_rows

NUM_RANKS, H, E, K, M = 4, 16, 8, 2, 5
SPEC = MoESpec(hidden_size=H, num_experts=E, top_k=K, dtype=torch.float32)
CONFIG = EPConfig(replicated=True, max_tokens_per_rank=M)
# The rank that differs.
FAULTY = 1


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of a dispatch, equal on all ranks unless changed."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def good(cls, device: torch.device, num_tokens: int = 4) -> Call:
        generator = torch.Generator().manual_seed(0)
        ids = torch.rand(num_tokens, E, generator=generator).argsort(1)[:, :K]
        return cls(
            x=torch.randn(num_tokens, H, generator=generator).to(device).requires_grad_(),
            ids=ids.to(device),
            weights=torch.rand(num_tokens, K, generator=generator).to(device),
        )


def run(dispatcher: StandardDispatcher, call: Call) -> Tensor:
    """Dispatch and combine with identity experts that apply the weights."""
    topk = TopKOutput(topk_ids=call.ids, topk_weights=call.weights)
    out = dispatcher.dispatch(call.x, topk)
    assert out.slot_weights is not None
    rows = gather_rows(out.hidden_states.data, out.index) * out.slot_weights.unsqueeze(1)
    return dispatcher.combine(out.combine_input(rows))


@pytest.mark.ranks(NUM_RANKS)
def test_other_tokens_of_one_rank_are_reported_on_every_rank() -> None:
    with EPGroup() as group:
        dispatcher = StandardDispatcher(group, SPEC, CONFIG)
        call = Call.good(group.device)
        with pytest.raises(ShapeError, match="ranks pass 4, 3, 4, 4 tokens, expected the same"):
            run(dispatcher, Call.good(group.device, 3) if group.rank == FAULTY else call)
        expect_works(dispatcher, call)


@pytest.mark.ranks(NUM_RANKS)
def test_rank_whose_inputs_need_no_gradients_takes_part_in_backward() -> None:
    with EPGroup() as group:
        dispatcher = StandardDispatcher(group, SPEC, CONFIG)
        call = Call.good(group.device)
        mine = call if group.rank == FAULTY else replace(call, x=call.x.detach())
        run(dispatcher, mine).sum().backward()
        assert (mine.x.grad is not None) == (group.rank == FAULTY)
        expect_works(dispatcher, Call.good(group.device))


@pytest.mark.ranks(NUM_RANKS)
def test_received_rows_have_no_history_of_the_callers_tensor() -> None:
    with EPGroup() as group:
        dispatcher = StandardDispatcher(group, SPEC, CONFIG)
        call = Call.good(group.device)
        with torch.no_grad():
            out = dispatcher.dispatch(
                call.x, TopKOutput(topk_ids=call.ids, topk_weights=call.weights)
            )
        assert not out.hidden_states.data.requires_grad
        # The tensor of the caller stays as it is where only the router weights need a gradient.
        x = call.x.detach()
        run(dispatcher, replace(call, x=x, weights=call.weights.requires_grad_()))
        assert not x.requires_grad


def expect_works(dispatcher: StandardDispatcher, call: Call) -> None:
    y = run(dispatcher, call)
    y.backward(torch.ones_like(y))
    factor = call.weights.sum(1, keepdim=True)
    torch.testing.assert_close(y, call.x * factor)
    torch.testing.assert_close(call.x.grad, factor.expand(-1, H))
