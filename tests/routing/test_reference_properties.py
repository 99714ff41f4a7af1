"""Properties of every spec and batch; hypothesis searches for counterexamples."""

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from epcomm.records import TopKOutput
from epcomm.routing import RoutingSpec, route
from tests.routing.cases import pick_spec
from tests.routing.oracle import route_rows

NUM_EXPERTS = 12
# Two float32 scores closer than this may trade places under rounding.
DECISIVE_GAP = 1e-5
FLOAT32_RTOL = 2e-6

quick = settings(max_examples=25, deadline=None, derandomize=True)
# Multiples of 1/4, so that ties are common and a shift is exact.
logit_values = st.integers(-16, 16).map(lambda quarter: quarter / 4)


@st.composite
def specs(draw: st.DrawFn) -> RoutingSpec:
    return pick_spec(lambda options: draw(st.sampled_from(options)), NUM_EXPERTS, NUM_EXPERTS)


def batches(values: st.SearchStrategy[float] = logit_values) -> st.SearchStrategy[Tensor]:
    row = st.lists(values, min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)
    return st.lists(row, max_size=3).map(lambda rows: torch.tensor(rows).view(-1, NUM_EXPERTS))


biases = st.lists(
    st.integers(-8, 8).map(lambda part: part / 13), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS
).map(torch.tensor)


def route_with(spec: RoutingSpec, logits: Tensor, bias: Tensor) -> TopKOutput:
    return route(logits, spec, correction_bias=None if spec.correction_bias == "none" else bias)


@quick
@given(specs(), batches(), biases)
def test_route_equals_the_oracle(spec: RoutingSpec, logits: Tensor, bias: Tensor) -> None:
    rows = route_rows(logits, spec, bias)
    assume(all(row.gap > DECISIVE_GAP for row in rows))
    topk = route_with(spec, logits, bias)
    assert topk.topk_ids.tolist() == [row.ids for row in rows]
    expected = torch.tensor([row.weights for row in rows]).view(-1, spec.top_k)
    torch.testing.assert_close(topk.topk_weights, expected, rtol=FLOAT32_RTOL, atol=1e-30)


@quick
@given(specs(), batches(st.floats(width=32)), biases)
def test_any_float_gives_distinct_ids_and_finite_weights(
    spec: RoutingSpec, logits: Tensor, bias: Tensor
) -> None:
    topk = route_with(spec, logits, bias)
    ordered = topk.topk_ids.sort(dim=-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    assert ((topk.topk_ids >= 0) & (topk.topk_ids < NUM_EXPERTS)).all()
    assert torch.isfinite(topk.topk_weights).all()
    assert (topk.topk_weights >= 0).all()


@quick
@given(specs(), batches(), biases)
def test_a_token_is_routed_alike_alone_and_in_a_batch(
    spec: RoutingSpec, logits: Tensor, bias: Tensor
) -> None:
    whole = route_with(spec, logits, bias)
    for token in range(logits.shape[0]):
        alone = route_with(spec, logits[token : token + 1], bias)
        assert torch.equal(alone.topk_ids[0], whole.topk_ids[token])
        assert torch.equal(alone.topk_weights[0], whole.topk_weights[token])
