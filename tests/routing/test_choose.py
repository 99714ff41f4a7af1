from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from epcomm import BackendUnavailable, ConfigError, ShapeError, TopKOutput
from epcomm.config import Router
from epcomm.routing import RoutingSpec, presets, route
from epcomm.routing.ascend_gating import OPERATOR, AscendGate
from epcomm.routing.choose import RouterChoice, choose_router
from epcomm.routing.triton_gating import TritonGate
from fakes.ascend.operators.gating import moe_gating_top_k
from tests.cases.operators import expect_gating_calls

pytestmark = pytest.mark.usefixtures("npu_operators")

NUM_EXPERTS = 32
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Without torch_npu torch knows no device of this name.
NPU = cast(torch.device, SimpleNamespace(type="npu"))
SAID = presets.afmoe(top_k=4, routed_scaling_factor=1.5)
UNSAID = RoutingSpec(top_k=4, score_function="sigmoid", softcap=2.0)
BY_OPERATOR = ("routing by npu_moe_gating_top_k, with gradients by the reference",)
BY_GATE = ("routing by the triton gate; float64 and compiled calls by the reference",)
WHY_UNSAID = (
    "routing by the reference: npu_moe_gating_top_k always renormalises sigmoid weights; "
    "npu_moe_gating_top_k has no softcap",
)


@pytest.fixture
def npu_has_the_operator() -> Iterator[None]:
    library = torch.library.Library("npu", "IMPL")
    library.impl(OPERATOR, moe_gating_top_k, "PrivateUse1")
    yield
    library._destroy()


def choose(
    router: Router, spec: RoutingSpec, device: torch.device, num_experts: int = NUM_EXPERTS
) -> RouterChoice:
    return choose_router(router, spec, num_experts=num_experts, device=device, where="rank 3 of 8")


def test_on_a_gpu_auto_takes_the_gate_where_it_can() -> None:
    pytest.importorskip("triton")
    for spec in (SAID, UNSAID):
        choice = choose(Router.AUTO, spec, CUDA)
        assert isinstance(choice.gate, TritonGate)
        assert choice.explain() == BY_GATE
    asked = choose(Router.REFERENCE, SAID, CUDA)
    assert asked.gate is None
    assert asked.explain() == ("routing by the reference: EPConfig.router asks for it",)
    whole = RoutingSpec(top_k=2, custom_function=route)
    assert choose(Router.AUTO, whole, CUDA).explain() == (
        "routing by the reference: the triton gate has no custom functions",
    )
    assert choose(Router.AUTO, SAID, CUDA, 1025).explain() == (
        "routing by the reference: the triton gate takes at most 1024 experts, not 1025",
    )
    assert choose(Router.AUTO, RoutingSpec(top_k=33), CUDA, 64).explain() == (
        "routing by the reference: the triton gate chooses at most 32 experts a token, not 33",
    )


def test_gate_without_a_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("epcomm.kernels.launch.IS_INTERPRETED", False)
    with pytest.raises(BackendUnavailable) as caught:
        choose(Router.TRITON, SAID, CPU)
    assert str(caught.value) == (
        "choose_router: router is 'triton', but the triton gate is not for cpu; move the layer to "
        "a GPU first, or set EPConfig.router to 'auto' (rank 3 of 8)"
    )
    monkeypatch.setattr(
        "epcomm.routing.triton_gating.triton_reasons",
        lambda machine: ["triton is not installed; install it"],
    )
    with pytest.raises(BackendUnavailable, match="triton is not installed; install it first"):
        choose(Router.TRITON, SAID, CUDA)
    assert choose(Router.AUTO, SAID, CUDA).explain() == (
        "routing by the reference: triton is not installed; install it",
    )


def test_reference_takes_float64_and_compiled_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    choice = choose(Router.TRITON, SAID, CPU)
    logits = torch.randn(5, NUM_EXPERTS, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(0, 0.5, NUM_EXPERTS)

    def run(logits: Tensor) -> TopKOutput:
        return choice.route(logits, correction_bias=bias, hidden_states=logits)

    double = run(logits.double())
    assert double.topk_weights.dtype is torch.float64
    assert torch.equal(run(logits).topk_ids, double.topk_ids)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    compiled, expected = run(logits), route(logits, SAID, correction_bias=bias)
    assert torch.equal(compiled.topk_weights, expected.topk_weights)


@pytest.mark.parametrize("router", [Router.AUTO, Router.REFERENCE])
@pytest.mark.parametrize("spec", [SAID, UNSAID])
def test_elsewhere_the_reference_routes_without_a_reason(router: Router, spec: RoutingSpec) -> None:
    choice = choose(router, spec, CPU)
    assert choice.gate is None
    assert choice.explain() == ()


@pytest.mark.usefixtures("npu_has_the_operator")
@pytest.mark.parametrize(("router", "device"), [(Router.ASCEND, CPU), (Router.AUTO, NPU)])
def test_operator_routes_what_it_can_say(router: Router, device: torch.device) -> None:
    choice = choose(router, SAID, device)
    assert isinstance(choice.gate, AscendGate)
    assert choice.explain() == BY_OPERATOR
    choice = choose(router, UNSAID, device)
    assert choice.gate is None
    assert choice.explain() == WHY_UNSAID


@pytest.mark.parametrize(
    ("router", "why"),
    [
        (Router.AUTO, "npu_moe_gating_top_k is not on npu; import torch_npu"),
        (Router.REFERENCE, "EPConfig.router asks for it"),
    ],
)
def test_npu_without_operator_routes_by_reference_and_says_why(router: Router, why: str) -> None:
    choice = choose(router, SAID, NPU)
    assert choice.gate is None
    assert choice.explain() == (f"routing by the reference: {why}",)


@pytest.mark.parametrize("spec", [SAID, UNSAID])
@pytest.mark.parametrize("device", [CUDA, NPU])
def test_missing_operator_is_refused_by_name(device: torch.device, spec: RoutingSpec) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        choose(Router.ASCEND, spec, device)
    assert str(caught.value) == (
        f"choose_router: router is 'ascend', but npu_moe_gating_top_k is not on {device.type}; "
        "import torch_npu first, or set EPConfig.router to 'auto' (rank 3 of 8)"
    )


def test_impossible_routing_is_refused_when_the_layer_is_made() -> None:
    spec = RoutingSpec(top_k=1, num_groups=64, topk_groups=2)
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
    actual, logits.grad = logits.grad, None
    route(logits, SAID, correction_bias=bias).topk_weights.square().sum().backward()
    assert torch.equal(actual, logits.grad)
    logits, bias = logits.detach(), bias.requires_grad_()
    with expect_gating_calls(0):
        run()


def test_arguments_of_the_operator_are_checked_as_those_of_the_reference() -> None:
    for router in (Router.ASCEND, Router.REFERENCE, Router.TRITON):
        choice = choose(router, SAID, CPU)
        for num_experts, bias, error, message in (
            (NUM_EXPERTS, None, ConfigError, "correction_bias is None, expected"),
            (NUM_EXPERTS, torch.zeros(1, NUM_EXPERTS), ShapeError, "correction_bias is"),
            (2, torch.zeros(2), ConfigError, "top_k is 4, expected at most 2"),
        ):
            logits = torch.zeros(2, num_experts)
            with pytest.raises(error, match=message):
                choice.route(logits, correction_bias=bias, hidden_states=logits)
