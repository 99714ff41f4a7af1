"""The choice of a router: from configuration, routing and device, with reasons to read."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from epcomm import BackendUnavailable, ConfigError, TopKOutput
from epcomm.config import Router
from epcomm.routing import RoutingSpec, presets, route
from epcomm.routing.ascend_gating import OPERATOR
from epcomm.routing.choose import RouterChoice, choose_router
from fakes.ascend import limits, registry
from fakes.ascend.operators.gating import moe_gating_top_k
from tests.routing.calls import expect_gating_calls

NUM_EXPERTS = 32
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Without torch_npu torch knows no device of this name.
NPU = cast(torch.device, SimpleNamespace(type="npu"))
SAID = presets.afmoe(top_k=4, routed_scaling_factor=1.5)
UNSAID = RoutingSpec.from_mapping({"top_k": 4, "score_function": "sigmoid", "softcap": 2.0})
BY_OPERATOR = ("routing by npu_moe_gating_top_k, with gradients by the reference",)
WHY_UNSAID = (
    "routing by the reference: npu_moe_gating_top_k always renormalises sigmoid weights; "
    "npu_moe_gating_top_k has no softcap",
)


@pytest.fixture(autouse=True)
def npu_operators() -> Iterator[None]:
    registry.register()
    with limits.soc("A3"):
        yield


@pytest.fixture
def npu_has_the_operator() -> Iterator[None]:
    library = torch.library.Library("npu", "IMPL")
    library.impl(OPERATOR, moe_gating_top_k, "PrivateUse1")
    yield
    library._destroy()


def choose(router: Router, spec: RoutingSpec, device: torch.device) -> RouterChoice:
    return choose_router(router, spec, num_experts=NUM_EXPERTS, device=device, where="rank 3 of 8")


@pytest.mark.parametrize("router", [Router.AUTO, Router.REFERENCE])
@pytest.mark.parametrize("spec", [SAID, UNSAID])
def test_elsewhere_the_reference_routes_and_nobody_reads_why(
    router: Router, spec: RoutingSpec
) -> None:
    choice = choose(router, spec, CPU)
    assert choice.name is Router.REFERENCE
    assert choice.explain() == ()


def test_operator_asked_for_by_name_routes_what_it_can_say() -> None:
    choice = choose(Router.ASCEND, SAID, CPU)
    assert choice.name is Router.ASCEND
    assert choice.explain() == BY_OPERATOR
    choice = choose(Router.ASCEND, UNSAID, CPU)
    assert choice.name is Router.REFERENCE
    assert choice.explain() == WHY_UNSAID


@pytest.mark.usefixtures("npu_has_the_operator")
def test_on_an_npu_auto_takes_the_operator_where_it_can() -> None:
    assert choose(Router.AUTO, SAID, NPU).explain() == BY_OPERATOR
    assert choose(Router.AUTO, UNSAID, NPU).explain() == WHY_UNSAID
    asked = choose(Router.REFERENCE, SAID, NPU)
    assert asked.name is Router.REFERENCE
    assert asked.explain() == ("routing by the reference: EPConfig.router asks for it",)


def test_npu_without_the_operator_routes_by_the_reference_and_says_why() -> None:
    choice = choose(Router.AUTO, SAID, NPU)
    assert choice.name is Router.REFERENCE
    assert choice.explain() == (
        "routing by the reference: npu_moe_gating_top_k is not on npu; import torch_npu",
    )


@pytest.mark.parametrize("spec", [SAID, UNSAID])
@pytest.mark.parametrize("device", [CUDA, NPU])
def test_operator_that_is_not_there_is_refused_by_name(
    device: torch.device, spec: RoutingSpec
) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        choose(Router.ASCEND, spec, device)
    assert str(caught.value) == (
        f"choose_router: router is 'ascend', but npu_moe_gating_top_k is not on {device.type}; "
        "import torch_npu first, or set EPConfig.router to 'auto' (rank 3 of 8)"
    )


def test_impossible_routing_is_refused_when_the_layer_is_made() -> None:
    spec = RoutingSpec.from_mapping({"top_k": 1, "num_groups": 64, "topk_groups": 2})
    for router in Router:
        with pytest.raises(ConfigError, match="num_groups is 64, expected a divisor of 32"):
            choose(router, spec, CPU)


def test_gradients_run_the_reference_and_only_where_they_are_needed() -> None:
    choice = choose(Router.ASCEND, SAID, CPU)
    logits = torch.randn(5, NUM_EXPERTS, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(0, 0.5, NUM_EXPERTS)

    def run() -> TopKOutput:
        return choice.route(logits, correction_bias=bias, hidden_states=logits)

    with expect_gating_calls(1):
        frozen = run()
    logits.requires_grad_()
    with expect_gating_calls(1), torch.no_grad():
        run()
    with expect_gating_calls(0):
        trained = run()
        trained.topk_weights.square().sum().backward()
    assert torch.equal(frozen.topk_ids, trained.topk_ids)
    assert logits.grad is not None
    actual, logits.grad = logits.grad, None
    route(logits, SAID, correction_bias=bias).topk_weights.square().sum().backward()
    assert torch.equal(actual, logits.grad)  # type: ignore[arg-type]
    logits, bias = logits.detach(), bias.requires_grad_()
    with expect_gating_calls(0):
        run()


def test_arguments_of_the_operator_are_checked_as_those_of_the_reference() -> None:
    logits = torch.zeros(2, NUM_EXPERTS)
    for router in (Router.ASCEND, Router.REFERENCE):
        with pytest.raises(ConfigError, match="correction_bias is None, expected"):
            choose(router, SAID, CPU).route(logits, correction_bias=None, hidden_states=logits)
