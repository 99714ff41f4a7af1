"""The refusals of plan() for fused operators; test_limits.py has the exact limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

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


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a tensor of one expert, without values."""
    return torch.empty(1, *shape, dtype=dtype, device="meta")


def w8a8(
    hidden: int = H, inner: int = I, dtype: torch.dtype = torch.bfloat16
) -> Int8ChannelWeights:
    return Int8ChannelWeights(
        gate_up_proj=empty(2 * inner, hidden, dtype=torch.int8),
        gate_up_scale=empty(2 * inner),
        down_proj=empty(hidden, inner, dtype=torch.int8),
        down_scale=empty(hidden),
        hidden_dtype=dtype,
    )


BF16 = ExpertWeights(
    gate_up_proj=empty(2 * I, H, dtype=torch.bfloat16),
    down_proj=empty(H, I, dtype=torch.bfloat16),
)


def planned(
    operator: str,
    *,
    layer: MoESpec = LAYER,
    weights: ExpertTensors | None = None,
    world_size: int = WORLD_SIZE,
    **changes: Any,  # noqa: ANN401 (fields of EPConfig)
) -> EPPlan:
    config = EPConfig(mode="fuseep", backend=operator, max_tokens_per_rank=128)
    weights = w8a8(hidden=layer.hidden_size, dtype=layer.dtype) if weights is None else weights
    return plan(replace(config, **changes), layer, world_size=world_size, weights=weights)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A specification that operators refuse, and their reasons.

    arguments: the arguments of planned().
    """

    id: str
    operators: tuple[str, ...] = OPERATORS
    arguments: Mapping[str, Any] = field(default_factory=dict)
    chip: str = "A3"
    variables: Mapping[str, str] = field(default_factory=dict)
    reason: str


def layer(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 (fields of MoESpec)
    return {"layer": replace(LAYER, **changes)}


ALL = (*OPERATORS, REFERENCE)
REFUSALS = [
    Refusal(
        id="bf16 weights",
        operators=ALL,
        arguments={"weights": BF16},
        reason="computes W8A8 experts, Int8ChannelWeights, not ExpertWeights; quantise them",
    ),
    Refusal(
        id="hidden states",
        arguments=layer(dtype=torch.float16),
        reason="returns bf16, not fp16",
    ),
    Refusal(
        id="bf16 rows",
        operators=ALL,
        arguments={"dispatch_dtype": WireDtype.BF16},
        reason="carries ['int8'], not bf16",
    ),
    Refusal(id="chip", chip="A2", reason="the chip is A2, expected A3: FuseEP is not built"),
    Refusal(
        id="no limit of tokens",
        arguments={"max_tokens_per_rank": None},
        reason="has static sizes; set max_tokens_per_rank",
    ),
    Refusal(
        id="other operators",
        variables={"DEEP_USE_MODE": "alltoall"},
        reason="DEEP_USE_MODE is alltoall, expected default; unset it",
    ),
    Refusal(
        id="runner",
        operators=ALL,
        arguments={"runner": "ascend"},
        reason="computes experts itself, without runner ascend; leave it auto",
    ),
    Refusal(
        id="profile of mode 2 in mode 1",
        operators=(MODE_1, REFERENCE),
        arguments={"int8_profile": Int8Profile.DIVTRUNC16},
        reason="rounds INT8 by rint127, not divtrunc16",
    ),
    Refusal(
        id="profile of mode 1 in mode 2",
        operators=(MODE_2,),
        arguments={"int8_profile": Int8Profile.RINT127},
        reason="rounds INT8 by divtrunc16, not rint127",
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_plan_says_why(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    for operator in refusal.operators:
        assert planned(operator).prefill.backend == operator
    for name, value in refusal.variables.items():
        monkeypatch.setenv(name, value)
    for operator in refusal.operators:
        with limits.soc(refusal.chip), pytest.raises(BackendUnavailable) as caught:
            planned(operator, **refusal.arguments)
        assert f"plan: backend {operator} cannot serve this layer: " in str(caught.value)
        assert refusal.reason in str(caught.value)


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
        "router weights applied by combine; trainable: False; host syncs a dispatch: 0",
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
