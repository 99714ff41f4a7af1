"""Low latency: check() raises faults on every rank, and the group stays usable."""

import pytest
import torch

from epcomm import (
    CapacityError,
    ConfigError,
    DeepEPLowLatencyDispatcher,
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    MoESpec,
    RowsDispatchOutput,
    TopKOutput,
)
from epcomm.testing.data import BatchSpec, make_batch, make_weights, random_ids
from epcomm.testing.oracle import relative_error, run_oracle

NUM_RANKS, MAX_TOKENS = 3, 6
SPEC = BatchSpec(tokens_of_rank=lambda rank, size: MAX_TOKENS, choose_ids=random_ids)
CONFIG = EPConfig(backend="collective", max_tokens_per_rank=MAX_TOKENS)


def open_dispatcher(group: EPGroup, config: EPConfig = CONFIG) -> DeepEPLowLatencyDispatcher:
    spec = MoESpec(
        hidden_size=SPEC.hidden_size,
        num_experts=SPEC.num_experts(group.world_size),
        top_k=SPEC.top_k,
        dtype=torch.float32,
    )
    return DeepEPLowLatencyDispatcher(group, spec, config)


def run_batch(
    dispatcher: DeepEPLowLatencyDispatcher, x: torch.Tensor, topk: TopKOutput
) -> torch.Tensor:
    """Dispatch and combine with experts that return zeros."""
    out = dispatcher.dispatch(x, topk)
    assert isinstance(out, RowsDispatchOutput)
    results = torch.zeros(out.num_slots, SPEC.hidden_size)
    return dispatcher.combine(out.combine_input(results))


def good_inputs(group: EPGroup) -> tuple[torch.Tensor, TopKOutput]:
    batch = make_batch(SPEC, group.rank, group.world_size)
    return batch.x, TopKOutput(topk_ids=batch.topk_ids, topk_weights=batch.topk_weights)


def too_many_tokens(x: torch.Tensor, topk: TopKOutput) -> tuple[torch.Tensor, TopKOutput]:
    return torch.cat([x, x[:1]]), TopKOutput(
        topk_ids=torch.cat([topk.topk_ids, topk.topk_ids[:1]]),
        topk_weights=torch.cat([topk.topk_weights, topk.topk_weights[:1]]),
    )


@pytest.mark.ranks(NUM_RANKS)
def test_after_a_fault_of_one_rank_y_is_nan_on_all() -> None:
    with EPGroup() as group, torch.no_grad():
        dispatcher = open_dispatcher(group)
        x, topk = good_inputs(group)
        if group.rank == 2:
            x, topk = too_many_tokens(x, topk)
        y = run_batch(dispatcher, x, topk)
        assert y.shape == (x.shape[0], SPEC.hidden_size)
        assert y.isnan().all()
        with pytest.raises(CapacityError, match="7 tokens" if group.rank == 2 else "rank 2"):
            dispatcher.check()
        assert (run_batch(dispatcher, *good_inputs(group)) == 0).all()
        dispatcher.check()


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("asks", ["inputs", "experts"])
def test_gradients_that_one_rank_asks_for_are_told_to_all(asks: str) -> None:
    with EPGroup() as group:
        dispatcher = open_dispatcher(group)
        x, topk = good_inputs(group)
        own = "low latency has no gradients, but some are needed (rank 2 of 3)"
        others = "gradients or decode in a mode without them on rank 2"
        mine = x.clone().requires_grad_(group.rank == 2 and asks == "inputs")
        needs = group.rank == 2 and asks == "experts"
        with pytest.raises(ConfigError) as caught:
            dispatcher.dispatch(mine, topk, experts_need_grad=needs)
        assert (own if group.rank == 2 else others) in str(caught.value)
        assert (run_batch(dispatcher, x, topk) == 0).all()
        dispatcher.check()


@pytest.mark.ranks(NUM_RANKS)
def test_grad_mode_may_differ_where_there_are_no_gradients() -> None:
    with EPGroup() as group:
        dispatcher = open_dispatcher(group)
        with torch.set_grad_enabled(group.rank == 1):
            assert (run_batch(dispatcher, *good_inputs(group)) == 0).all()
        dispatcher.check()


@pytest.mark.ranks(NUM_RANKS)
def test_decode_over_collective_has_exact_sizes_and_the_sums_of_prefill() -> None:
    """Check decode on CPU ranks; selected by name, the mode has static sizes: open_dispatcher()."""
    with EPGroup() as group, torch.no_grad():
        weights = make_weights(SPEC, group.world_size)
        experts = ExpertParallelExperts(weights, group, CONFIG, top_k=SPEC.top_k)
        decode = experts.phases.of_phase(decode=True).plan
        assert (decode.buffer, decode.caps.is_static) == ("CollectiveBuffer", False)
        assert open_dispatcher(group).plan.buffer == "StaticCollectiveBuffer"
        x, topk = good_inputs(group)
        assert torch.equal(experts(x, topk, decode=True), experts(x, topk))
        bad = too_many_tokens(x, topk) if group.rank == 2 else (x, topk)
        with pytest.raises(CapacityError, match="rank 2"):
            experts(*bad, decode=True)
        assert torch.equal(experts(x, topk, decode=True), experts(x, topk))


@pytest.mark.ranks(NUM_RANKS)
def test_auto_takes_low_latency_for_decode_alone() -> None:
    with EPGroup() as group:
        weights = make_weights(SPEC, group.world_size)
        experts = ExpertParallelExperts(weights, group, CONFIG, top_k=SPEC.top_k)
        batches = [make_batch(SPEC, rank, group.world_size) for rank in range(group.world_size)]
        expected = run_oracle(batches, weights).y[group.rank]
        x, topk = good_inputs(group)
        with torch.no_grad():
            assert relative_error(experts(x, topk, decode=True), expected) < 1e-5
        before = experts.phases.prefill.traffic()
        # Prefill has no token limit and is trainable.
        long_x, long_topk = too_many_tokens(x, topk)
        y = experts(long_x, long_topk)
        y.sum().backward()
        assert relative_error(y[:MAX_TOKENS], expected) < 1e-5
        assert experts.phases.prefill.traffic() != before
        assert experts.phases.decode is not experts.phases.prefill
