import json
from dataclasses import asdict

import pytest

from epcomm.errors import ConfigError
from epcomm.routing import RoutingSpec, ScoreFunction, route
from epcomm.routing.presets import deepseek_v3, ernie4_5_moe, gpt_oss

BAD_VALUES = [
    ({"top_k": 0}, "top_k is 0, expected an integer of at least 1"),
    ({"top_k": None}, "top_k is None"),
    ({"top_k": True}, "top_k is True"),
    ({"num_groups": 0}, "num_groups is 0"),
    ({"topk_groups": 2}, "topk_groups is 2, expected at most num_groups=1"),
    ({"group_score_top_n": 0}, "group_score_top_n is 0"),
    ({"score_function": "tanh"}, r"score_function is 'tanh', expected one of \['softmax', "),
    ({"correction_bias": None}, "correction_bias is None, expected one of"),
    ({"softcap": 0.0}, "softcap is 0.0, expected a finite number above 0"),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor is nan"),
    ({"renormalize": None}, "renormalize is None, expected True or False"),
    ({"routed_scaling_factor": None}, "routed_scaling_factor is None"),
    (
        {"score_function": "sigmoid", "softmax_order": "after_topk"},
        "softmax_order is 'after_topk' with score_function 'sigmoid', expected 'softmax'",
    ),
    ({"epsilon": 1e-6, "renormalize": True}, "epsilon is 1e-06 with epsilon_mode 'none'"),
    ({"epsilon_mode": "added", "renormalize": True}, "epsilon is 0.0, expected a finite number"),
    ({"epsilon_mode": "clamp", "epsilon": 1e-6}, "epsilon_mode is 'clamp' with renormalize=False"),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES, ids=lambda value: str(value)[:40])
def test_bad_value_is_named_with_what_was_expected(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoutingSpec(**{"top_k": 2, **values})


@pytest.mark.parametrize(
    ("top_k", "num_experts", "message"),
    [
        (4, 3, "top_k is 4, expected at most 3, the number of experts"),
        (4, 6, "num_groups is 4, expected a divisor of 6"),
        (4, 4, "group_score_top_n is 2, expected at most 1, the experts of a group"),
        (5, 8, "top_k is 5, expected at most 4, the experts of topk_gr"),
    ],
)
def test_number_of_experts_must_fit(top_k: int, num_experts: int, message: str) -> None:
    spec = deepseek_v3(top_k=top_k, num_groups=4, topk_groups=2, routed_scaling_factor=1.0)
    spec.check_num_experts(12)
    with pytest.raises(ConfigError, match=message):
        spec.check_num_experts(num_experts)


def test_custom_function_stands_alone() -> None:
    with pytest.raises(ConfigError, match="renormalize is set with custom_function"):
        RoutingSpec(top_k=2, custom_function=route, renormalize=True)


@pytest.mark.parametrize(
    "spec",
    [
        RoutingSpec(top_k=1),
        gpt_oss(top_k=4),
        ernie4_5_moe(top_k=6),
        deepseek_v3(top_k=8, num_groups=8, topk_groups=4, routed_scaling_factor=2.5),
    ],
    ids=["default", "gpt_oss", "ernie4_5_moe", "deepseek_v3"],
)
def test_spec_survives_json(spec: RoutingSpec) -> None:
    assert RoutingSpec(**json.loads(json.dumps(asdict(spec)))) == spec


def test_plain_strings_become_enums() -> None:
    spec = RoutingSpec(top_k=1, score_function="sigmoid")
    assert spec.score_function is ScoreFunction.SIGMOID
    assert hash(spec) == hash(RoutingSpec(top_k=1, score_function=ScoreFunction.SIGMOID))
