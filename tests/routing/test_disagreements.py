"""Check each point where implementations of one routing differ: an option or a stated choice."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.routing import RoutingSpec, route
from epcomm.routing.presets import afmoe, ernie4_5_moe, gpt_oss, lfm2_moe, mixtral

NAN = math.nan


def logit(probability: float) -> float:
    """Return the logit whose sigmoid is `probability`."""
    return math.log(probability / (1 - probability))


def scatter(logits: Tensor, spec: RoutingSpec) -> Tensor:
    """Return the weights on [T, E], which do not depend on the order within the k."""
    topk = route(logits, spec)
    return torch.zeros(logits.shape).scatter(1, topk.topk_ids, topk.topk_weights)


def test_1_softmax_bias_acts_where_the_spec_says_and_is_never_dropped() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    bias = torch.tensor([0.0, 0.0, 1.0])
    selection = RoutingSpec.from_mapping({"top_k": 1, "correction_bias": "selection"})
    score = RoutingSpec.from_mapping({"top_k": 1, "correction_bias": "score"})

    by_selection = route(logits, selection, correction_bias=bias)
    by_score = route(logits, score, correction_bias=bias)

    assert by_selection.topk_ids.item() == by_score.topk_ids.item() == 2
    assert by_selection.topk_weights.item() == pytest.approx(0.2)
    assert by_score.topk_weights.item() == pytest.approx(0.2 * math.e / (0.8 + 0.2 * math.e))
    with pytest.raises(ConfigError, match="correction_bias is given, expected None"):
        route(logits, RoutingSpec(top_k=1), correction_bias=bias)
    for spec in (selection, score):
        with pytest.raises(ConfigError, match="correction_bias is None, expected"):
            route(logits, spec)


def test_1_softcap_comes_before_the_bias() -> None:
    spec = RoutingSpec.from_mapping({"top_k": 1, "softcap": 1.0, "correction_bias": "score"})
    # Capped first: 0.76, 0.96 + 1. Biased first, both logits would end near the cap of 1.
    logits, bias = torch.tensor([[1.0, 2.0]]), torch.tensor([0.0, 1.0])

    topk = route(logits, spec, correction_bias=bias)

    difference = math.tanh(2.0) + 1.0 - math.tanh(1.0)
    assert topk.topk_weights.item() == pytest.approx(1 / (1 + math.exp(-difference)))


def test_2_tied_pair_counts_twice_in_the_sum_of_the_top_2() -> None:
    spec = RoutingSpec.from_mapping(
        {
            "top_k": 1,
            "score_function": "sigmoid",
            "num_groups": 2,
            "topk_groups": 1,
            "group_score_top_n": 2,
        }
    )
    # 0.9 + 0.9 beats 0.95 + 0.8; dropping both tied values would leave 0.9 + 0.1.
    logits = torch.tensor([[logit(p) for p in (0.9, 0.9, 0.1, 0.95, 0.8, 0.1)]])

    assert route(logits, spec).topk_ids.item() == 0


@pytest.mark.parametrize(("fill", "expected"), [("neg_inf", [0, 1]), ("zero", [0, 2])])
def test_3_fill_decides_whether_a_dropped_expert_can_pass_a_negative_one(
    fill: str, expected: list[int]
) -> None:
    spec = RoutingSpec.from_mapping(
        {
            "top_k": 2,
            "score_function": "sigmoid",
            "correction_bias": "selection",
            "num_groups": 2,
            "topk_groups": 1,
            "dropped_groups": fill,
        }
    )
    logits = torch.tensor([[logit(p) for p in (0.9, 0.2, 0.3, 0.25)]])
    bias = torch.tensor([0.0, -0.5, 0.0, 0.0])

    topk = route(logits, spec, correction_bias=bias)

    assert topk.topk_ids.tolist() == [expected]
    # The dropped expert 2 keeps its own score under the zero fill with a bias.
    assert topk.topk_weights[0, 1].item() == pytest.approx(0.3 if fill == "zero" else 0.2)


def test_3_dropped_expert_weighs_zero_where_the_filled_score_is_the_weight() -> None:
    spec = RoutingSpec.from_mapping(
        {"top_k": 2, "num_groups": 2, "topk_groups": 1, "dropped_groups": "zero"}
    )
    # exp(-200) underflows: kept expert 3 ties with the zeros of the dropped group, lowest id wins.
    logits = torch.tensor([[-1.0, -1.0, 0.0, -200.0]])

    topk = route(logits, spec)

    assert topk.topk_ids.tolist() == [[2, 0]]
    assert topk.topk_weights[0, 1].item() == 0.0


@pytest.mark.parametrize(("top_n", "group"), [(1, 0), (2, 1), (4 // 1, 2)], ids=str)
def test_4_group_score_is_the_sum_of_the_top_n(top_n: int, group: int) -> None:
    spec = RoutingSpec.from_mapping(
        {
            "top_k": 4,
            "score_function": "sigmoid",
            "num_groups": 3,
            "topk_groups": 1,
            "group_score_top_n": top_n,
        }
    )
    groups = [(0.9, 0.1, 0.1, 0.1), (0.8, 0.8, 0.1, 0.1), (0.6, 0.6, 0.6, 0.6)]
    logits = torch.tensor([[logit(p) for scores in groups for p in scores]])

    topk = route(logits, spec)

    assert (topk.topk_ids // 4 == group).all()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param(mixtral(top_k=2), [0.75, 0.25], id="none"),
        pytest.param(afmoe(top_k=2, routed_scaling_factor=1.0), [0.75, 0.25], id="added-1e-20"),
        pytest.param(
            lfm2_moe(
                top_k=2, use_correction_bias=True, renormalize=True, routed_scaling_factor=1.0
            ),
            [0.6, 0.2],
            id="added-1e-6",
        ),
        pytest.param(ernie4_5_moe(top_k=2, epsilon=1e-5), [0.3, 0.1], id="clamp-1e-5"),
        pytest.param(ernie4_5_moe(top_k=2), [0.75, 0.25], id="clamp-1e-12"),
    ],
)
def test_5_epsilon_of_the_renormalisation(spec: RoutingSpec, expected: list[float]) -> None:
    # Scores 3e-6 and 1e-6, the sum an epsilon can be seen against; a third expert holds the rest
    # of a softmax and a bias keeps it out.
    probabilities = torch.tensor([[3e-6, 1e-6, 1 - 4e-6]], dtype=torch.float64)
    is_softmax = spec.score_function == "softmax"
    logits = (probabilities.log() if is_softmax else probabilities.logit()).float()
    bias = torch.tensor([0.0, 0.0, -2.0])
    if spec.correction_bias == "none":
        logits, bias = logits[:, :2], None

    topk = route(logits, spec, correction_bias=bias)

    assert topk.topk_ids.tolist() == [[0, 1]]
    # 1e-5: a float32 logit near -13 moves its score by up to 1e-6.
    torch.testing.assert_close(topk.topk_weights, torch.tensor([expected]), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("where", ["selection", "score"])
def test_6_arithmetic_is_float32_whatever_the_narrower_dtype_of_logits_and_bias(
    dtype: torch.dtype, function: str, where: str
) -> None:
    spec = RoutingSpec.from_mapping(
        {"top_k": 3, "score_function": function, "correction_bias": where, "renormalize": True}
    )
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(32, 8, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(8, generator=generator).to(dtype)

    topk = route(logits, spec, correction_bias=bias)

    expected = route(logits.float(), spec, correction_bias=bias.float())
    assert topk.topk_weights.dtype == torch.float32
    assert torch.equal(topk.topk_ids, expected.topk_ids)
    assert torch.equal(topk.topk_weights, expected.topk_weights)


def test_7_order_is_best_selection_score_first() -> None:
    spec = RoutingSpec.from_mapping(
        {"top_k": 3, "score_function": "sigmoid", "correction_bias": "selection"}
    )
    logits = torch.tensor([[logit(p) for p in (0.1, 0.8, 0.5, 0.2)]])
    bias = torch.tensor([0.0, 0.0, 0.4, 0.0])

    topk = route(logits, spec, correction_bias=bias)

    assert topk.topk_ids.tolist() == [[2, 1, 3]]
    torch.testing.assert_close(topk.topk_weights, torch.tensor([[0.5, 0.8, 0.2]]))


def test_8_nan_logit_ranks_last() -> None:
    topk = route(torch.tensor([[NAN, 0.0, 0.0]]), RoutingSpec(top_k=3))

    assert topk.topk_ids.tolist() == [[1, 2, 0]]
    assert topk.topk_weights.tolist() == [[0.5, 0.5, 0.0]]


def test_9_padding_is_minus_one_with_weight_zero() -> None:
    topk = route(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), RoutingSpec(top_k=1), num_valid_tokens=1)

    assert topk.topk_ids.tolist() == [[1], [-1]]
    assert topk.topk_weights[1].item() == 0.0


def test_10_softmax_order_matters_unless_the_weights_are_renormalised() -> None:
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    after = scatter(logits, gpt_oss(top_k=2))

    torch.testing.assert_close(after, scatter(logits, mixtral(top_k=2)))
    assert not torch.isclose(after, scatter(logits, RoutingSpec(top_k=2)))[after > 0].any()
