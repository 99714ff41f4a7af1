"""The refusals of plan() for fused operators; test_limits.py has the exact limits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from epcomm import (
    BackendUnavailable,
    ConfigError,
    EPConfig,
    EPPlan,
    ExpertWeights,
    Int8ChannelWeights,
    MoESpec,
    WireDtype,
    plan,
)
from epcomm.types import Int8Profile
from epcomm.weights.unquantized import ExpertTensors
from fakes.ascend import limits

MODE_1, MODE_2, REFERENCE = "fused_deep_moe", "dispatch_ffn_combine", "fuseep_reference"
OPERATORS = (MODE_1, MODE_2)
H, I, WORLD_SIZE = 1024, 1024, 8  # noqa: E741 (the letter of the intermediate size)
LAYER = MoESpec(hidden_size=H, num_experts=32, top_k=4)

pytestmark = pytest.mark.usefixtures("a3")


def plain(hidden: int = H, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    return ExpertWeights(
        gate_up_proj=torch.empty(1, 2 * I, hidden, dtype=dtype, device="meta"),
        down_proj=torch.empty(1, hidden, I, dtype=dtype, device="meta"),
    )


BF16 = plain()


def planned(
    operator: str,
    *,
    layer: MoESpec = LAYER,
    weights: ExpertTensors | None = None,
    world_size: int = WORLD_SIZE,
    **changes: Any,  # noqa: ANN401 (fields of EPConfig)
) -> EPPlan:
    config = EPConfig(mode="fuseep", backend=operator, max_tokens_per_rank=128)
    if weights is None:
        weights = Int8ChannelWeights.from_unquantized(plain(layer.hidden_size, layer.dtype))
    return plan(replace(config, **changes), layer, world_size=world_size, weights=weights)


ALL = (*OPERATORS, REFERENCE)
# Operators, arguments of planned(), and the reason why they refuse.
REFUSALS: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "bf16 weights": (
        ALL,
        {"weights": BF16},
        "computes W8A8 experts, Int8ChannelWeights, not ExpertWeights; quantise them",
    ),
    "hidden states": (
        OPERATORS,
        {"layer": replace(LAYER, dtype=torch.float16)},
        "returns bf16, not fp16",
    ),
    "bf16 rows": (ALL, {"dispatch_dtype": WireDtype.BF16}, "carries ['int8'], not bf16"),
    "no limit of tokens": (OPERATORS, {"max_tokens_per_rank": None}, "has static sizes; set max"),
    "runner": (ALL, {"runner": "ascend"}, "computes experts itself, without runner ascend"),
    "limit": (ALL, {"product_sms": 7}, "without the limit of EPConfig.product_sms"),
    "profile of mode 2 in mode 1": (
        (MODE_1, REFERENCE),
        {"int8_profile": Int8Profile.DIVTRUNC16},
        "rounds INT8 by rint127, not divtrunc16",
    ),
    "profile of mode 1 in mode 2": (
        (MODE_2,),
        {"int8_profile": Int8Profile.RINT127},
        "rounds INT8 by divtrunc16, not rint127",
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_plan_says_why(refusal: str) -> None:
    operators, arguments, reason = REFUSALS[refusal]
    for operator in operators:
        assert planned(operator).prefill.backend == operator
        with pytest.raises(BackendUnavailable) as caught:
            planned(operator, **arguments)
        assert f"plan: backend {operator} cannot serve this layer: " in str(caught.value)
        assert reason in str(caught.value)


def test_the_profile_of_an_operator_may_be_asked_for() -> None:
    for operator, profile in ((MODE_1, Int8Profile.RINT127), (MODE_2, Int8Profile.DIVTRUNC16)):
        assert planned(operator, int8_profile=profile).prefill.int8_profile is profile


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_plan_without_weights_asks_for_them(operator: str) -> None:
    config = EPConfig(mode="fuseep", backend=operator, max_tokens_per_rank=128)
    with pytest.raises(BackendUnavailable, match="limits for the experts' sizes; plan with their"):
        plan(config, LAYER, world_size=WORLD_SIZE)


def test_the_first_that_can_is_chosen_and_the_others_are_explained() -> None:
    """Nothing serves BF16 experts: then all reasons are in one error."""
    assert planned("auto").prefill.backend == MODE_1
    assert planned("auto", layer=replace(LAYER, hidden_size=7680)).prefill.backend == MODE_2
    with limits.soc("A2"):
        chosen = planned("auto", max_tokens_per_rank=None)
    assert [rejection.name for rejection in chosen.prefill.rejected] == ["mega_moe", *OPERATORS]
    assert chosen.prefill.backend == REFERENCE
    with pytest.raises(ConfigError, match="no backend serves mode fuseep: ") as caught:
        planned("auto", weights=BF16)
    assert f"mega_moe, {', '.join(ALL)}: computes W8A8 experts" in str(caught.value)


def test_explain_names_operator_bytes_and_limits() -> None:
    lines = planned(MODE_2, max_recv_slots=5000).explain().split("\n")
    row = H + 4 + 12
    for line in (
        f"mode fuseep on backend {MODE_2} (DispatchFFNCombine), 8 ranks with 4 experts each",
        "int8 profile: divtrunc16",
        "router weights applied by combine; trainable: False; is capturable: False; "
        "host syncs a dispatch: 0",
        f"at most {4 * row} B a token in dispatch, {4 * 2 * H} B in combine, and 0 B of headers a "
        "dispatch",
        "tokens a rank: at most 128",
        "received slots a rank: at most 5000",
        f"memory of window of the process group: {3 * 128 * 4 * H + 10 * 2**20} B",
        f"memory of packed experts: {4 * (3 * H * I + 8 * (2 * I + H))} B",
        f"experts computed by {MODE_2} itself; y is reduced",
    ):
        assert line in lines, lines
    assert not any(line.startswith("runner") for line in lines)
