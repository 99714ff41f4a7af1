from dataclasses import dataclass, replace

import pytest
import torch

from epcomm import (
    DeepEPLowLatencyDispatcher,
    EPConfig,
    EPGroup,
    MaskedDispatchOutput,
    Mode,
    MoESpec,
    ShapeError,
    TopKOutput,
    WireDtype,
)
from epcomm.calls.call import DispatchCall
from epcomm.protocol import BatchFlags
from epcomm.quantization import FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES, quantize
from epcomm.registry import buffer_class
from epcomm.testing import buffer_suite, layer_suite
from epcomm.testing.buffer_suite import BufferEnv
from epcomm.testing.layer_suite import LayerEnv
from fakes.deep_ep import install
from fakes.deep_ep.strict_v1 import buffer as strict_buffer
from tests.cases.specs import buffer_spec

pytestmark = pytest.mark.ranks(2)


@dataclass(frozen=True)
class Case:
    """A buffer: its package and mode, and sizes that the package takes."""

    package: str
    mode: Mode
    hidden_size: int = 256
    token_multiple: int | None = None


CASES = {
    "DeepEPV1Buffer": Case("v1", Mode.NORMAL),
    "DeepEPV1StaticBuffer": Case("v1", Mode.NORMAL),
    "DeepEPV1LowLatencyBuffer": Case("v1", Mode.LOW_LATENCY, 2048, token_multiple=4),
    "DeepEPV2Buffer": Case("v2", Mode.NORMAL, token_multiple=1),
    "DeepEPV2StaticBuffer": Case("v2", Mode.NORMAL),
    "DeepEPV2LowLatencyBuffer": Case("v2", Mode.LOW_LATENCY),
}
WIRES = {"bf16": None, "fp8": FP8_FLOAT32_SCALES, "fp8_powers_of_two": FP8_POWER_OF_TWO_SCALES}
# The rows of this backend have one size and are bfloat16, in all batches.
SCENARIOS = [name for name in buffer_suite.SCENARIOS if name not in ("fp16", "bf16", "odd_hidden")]


@pytest.fixture(autouse=True)
def poison_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow poisoned memory, which the real package refuses: torch fills it on another stream."""
    monkeypatch.setattr(strict_buffer, "_check_torch_deterministic", lambda: None)


RUNS = [
    (backend, scenario)
    for backend, case in CASES.items()
    for scenario in SCENARIOS
    if buffer_suite.tests_anything(scenario, buffer_class(backend).caps(case.mode))
]


@pytest.mark.parametrize(("backend", "scenario"), RUNS)
def test_deep_ep_buffer_keeps_its_contract(backend: str, scenario: str) -> None:
    run_buffer(backend, scenario, "bf16")


# Scenarios that need more than 2 ranks.
@pytest.mark.ranks(4)
@pytest.mark.parametrize("backend", CASES)
@pytest.mark.parametrize("scenario", ["uneven", pytest.param("faults", marks=pytest.mark.slow)])
def test_deep_ep_buffer_of_four_ranks_keeps_its_contract(scenario: str, backend: str) -> None:
    run_buffer(backend, scenario, "bf16")


# Eight-bit formats change rows, and what an empty rank or a token without experts sends.
@pytest.mark.parametrize("backend", CASES)
@pytest.mark.parametrize(
    ("scenario", "wire"),
    [("empty_rank", "fp8"), ("holes", "fp8_powers_of_two"), ("traffic", "fp8")],
)
def test_quantized_rows_keep_the_contract(scenario: str, wire: str, backend: str) -> None:
    run_buffer(backend, scenario, wire)


@pytest.mark.parametrize(
    "backend", [name for name in CASES if buffer_class(name).takes_wire_tensors]
)
def test_rows_that_are_quantised_already_travel_as_they_are(backend: str) -> None:
    with install(CASES[backend].package), EPGroup() as group:
        env = buffer_env(backend, group, "fp8_powers_of_two")
        buffer_suite.check_wire_tensors(env, buffer_suite.BATCH_SPECS["holes"])


def test_low_latency_of_v1_refuses_rows_that_are_quantised_already() -> None:
    spec = MoESpec(hidden_size=2048, num_experts=4, top_k=1)
    config = EPConfig(
        mode="low_latency",
        backend="deep_ep_v1",
        dispatch_dtype=WireDtype.FP8_E4M3,
        max_tokens_per_rank=16,
    )
    with install(CASES["DeepEPV1LowLatencyBuffer"].package), EPGroup() as group, torch.no_grad():
        dispatcher = DeepEPLowLatencyDispatcher(group, spec, config)
        wire = quantize(torch.ones(2, 2048), FP8_FLOAT32_SCALES)
        ids = torch.zeros(2, 1, dtype=torch.int64)
        out = dispatcher.dispatch(wire, TopKOutput(topk_ids=ids, topk_weights=torch.ones(2, 1)))
        assert isinstance(out, MaskedDispatchOutput)
        y = dispatcher.combine(out.combine_input(torch.zeros(out.hidden_states.data.shape)))
        assert y.isnan().all()
        with pytest.raises(ShapeError, match="expected a tensor, because kernels of deep_ep_v1"):
            dispatcher.check()


def run_buffer(backend: str, scenario: str, wire: str) -> None:
    with install(CASES[backend].package), EPGroup() as group:
        buffer_suite.run_scenario(scenario, buffer_env(backend, group, wire))


def buffer_env(backend: str, group: EPGroup, wire: str) -> BufferEnv:
    case = CASES[backend]
    return BufferEnv(
        group=group,
        backend=backend,
        mode=case.mode,
        wire=WIRES[wire],
        hidden_size=case.hidden_size,
        dtype=torch.bfloat16,
        token_multiple=case.token_multiple,
    )


CONFIGS = {
    "DeepEPV1Buffer": EPConfig(mode="normal"),
    "DeepEPV1StaticBuffer": EPConfig(mode="normal", max_tokens_per_rank=16, max_recv_slots=256),
    "DeepEPV1LowLatencyBuffer": EPConfig(mode="low_latency", max_tokens_per_rank=16),
    "DeepEPV2Buffer": EPConfig(mode="normal", max_tokens_per_rank=16),
    "DeepEPV2StaticBuffer": EPConfig(mode="normal", max_tokens_per_rank=16, max_recv_slots=256),
    "DeepEPV2LowLatencyBuffer": EPConfig(mode="low_latency", max_tokens_per_rank=16),
}


# In bfloat16 a clamped activation may fall to either side of its limit, where its slope jumps.
LAYER_SCENARIOS = [name for name in layer_suite.SCENARIOS if name != "clamped_swiglu"]


def layer_env(backend: str, group: EPGroup, wire: WireDtype | None = None) -> LayerEnv:
    config = replace(CONFIGS[backend], backend=buffer_class(backend).name, dispatch_dtype=wire)
    env = layer_suite.pipeline_env(
        group, config, hidden_size=CASES[backend].hidden_size, dtype=torch.bfloat16
    )
    return replace(env, has_gradients=buffer_class(backend).caps(CASES[backend].mode).trainable)


# Scenarios in which the buffer matters, also to gradients; other buffers run the rest.
LAYERS = [
    (backend, scenario)
    for backend, case in CASES.items()
    for scenario in ("holes", "interleaved", "checkpointing", "rank_without_gradients")
    if scenario in layer_suite.SCENARIOS or buffer_class(backend).caps(case.mode).trainable
]


@pytest.mark.parametrize(("backend", "scenario"), LAYERS)
def test_layer_on_deep_ep_equals_the_oracle(scenario: str, backend: str) -> None:
    with install(CASES[backend].package), EPGroup() as group:
        layer_suite.run_scenario(scenario, layer_env(backend, group))


@pytest.mark.parametrize("backend", CASES)
def test_layer_with_quantized_dispatch_on_deep_ep_equals_the_oracle(backend: str) -> None:
    with install(CASES[backend].package), EPGroup() as group:
        layer_suite.run_scenario("two_batches", layer_env(backend, group, WireDtype.FP8_E4M3))


def test_gradients_of_fp8_rows_fit_into_a_large_v2_buffer() -> None:
    """Rows of FP8 are half as long as the bfloat16 gradients that are sent along the same plan."""
    spec = buffer_spec(7168, 1, 2, 4096, dispatch_format=FP8_FLOAT32_SCALES)
    with install("v2"), EPGroup() as group:
        buffer = group.open_buffer("DeepEPV2Buffer", spec)
        out = buffer.dispatch(
            DispatchCall(
                hidden_states=torch.ones(2, 7168, dtype=torch.bfloat16),
                topk_ids=torch.tensor([[0], [2]]),
                topk_weights=torch.ones(2, 1),
                flags=BatchFlags.NONE,
            )
        )
        rows = buffer.cached_dispatch(
            torch.full((2, 7168), 3.0, dtype=torch.bfloat16), out.exchange_plan
        )
        assert (rows == 3).all()
