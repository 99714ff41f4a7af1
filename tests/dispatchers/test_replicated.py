"""Replicated tokens: ranks with other tokens, and gradients; test_bad_calls.py has other faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epcomm import EPConfig, EPGroup, ShapeError, StandardDispatcher
from tests.dispatchers.test_dispatchers import FAULTY, NUM_RANKS, SPEC, Call, M, check_works, run

CONFIG = EPConfig(replicated=True, max_tokens_per_rank=M)


def good_call(group: EPGroup, num_tokens: int = 4) -> Call:
    """Make a call that is equal on all ranks."""
    return Call.draw(group.device, 0, num_tokens)


@pytest.mark.ranks(NUM_RANKS)
def test_other_tokens_of_one_rank_are_reported_on_every_rank() -> None:
    with EPGroup() as group:
        dispatcher = StandardDispatcher(group, SPEC, CONFIG)
        call = good_call(group)
        with pytest.raises(ShapeError, match="ranks pass 4, 3, 4, 4 tokens, expected the same"):
            run(dispatcher, good_call(group, 3) if group.rank == FAULTY else call)
        check_works(dispatcher, call)


@pytest.mark.ranks(NUM_RANKS)
def test_rank_whose_inputs_need_no_gradients_takes_part_in_backward() -> None:
    with EPGroup() as group:
        dispatcher = StandardDispatcher(group, SPEC, CONFIG)
        call = good_call(group)
        mine = call if group.rank == FAULTY else replace(call, x=call.x.detach())
        run(dispatcher, mine).sum().backward()
        assert (mine.x.grad is not None) == (group.rank == FAULTY)
        check_works(dispatcher, good_call(group))


@pytest.mark.ranks(NUM_RANKS)
def test_received_rows_have_no_history_of_the_callers_tensor() -> None:
    with EPGroup() as group:
        dispatcher = StandardDispatcher(group, SPEC, CONFIG)
        call = good_call(group)
        with torch.no_grad():
            out = dispatcher.dispatch(call.x, call.topk)
        assert not out.hidden_states.data.requires_grad
        # The tensor of the caller stays as it is where only the router weights need a gradient.
        x = call.x.detach()
        run(dispatcher, replace(call, x=x, weights=call.weights.requires_grad_()))
        assert not x.requires_grad
