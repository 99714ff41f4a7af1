from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from epcomm import ConfigError, EPConfig, EPGroup, ExpertParallelExperts, ScaleDtype, WireDtype
from epcomm.records import DispatchOutput, MaskedDispatchOutput
from epcomm.testing.buffer_suite import BATCH_SPECS
from epcomm.testing.data import BatchSpec, RankBatch, make_batch, make_weights
from epcomm.testing.oracle import relative_error
from epcomm.weights.quantized import QUANTIZED_KINDS, QuantizedWeights
from fakes.deep_ep import install
from fakes.deep_ep.strict_v1 import buffer as strict_buffer
from tests.cases.quantized_model import HALVES_UP, POWERS_OF_TWO, assert_within, model
from tests.runners import fake_deep_gemm

pytestmark = pytest.mark.ranks(2)

INNER = 144
CONFIGS = {
    "normal": EPConfig(mode="normal"),
    "budget": EPConfig(mode="normal", max_tokens_per_rank=16, max_recv_slots=128),
    "standard": EPConfig(mode="standard"),
    "low_latency": EPConfig(mode="low_latency", max_tokens_per_rank=16),
}
SPECS = {
    name: replace(BATCH_SPECS[name], hidden_size=200) for name in ("uneven", "empty_rank", "holes")
}


def weights_of(
    kind: str,
    spec: BatchSpec,
    group: EPGroup,
    inner: int = INNER,
    scales: ScaleDtype = ScaleDtype.FLOAT32,
) -> QuantizedWeights:
    plain = make_weights(spec, group.world_size, intermediate_size=inner, device=group.device)
    return QUANTIZED_KINDS[kind].from_unquantized(plain, scales=scales)


def layer_of(
    weights: QuantizedWeights, spec: BatchSpec, group: EPGroup, config: EPConfig
) -> ExpertParallelExperts:
    return ExpertParallelExperts(weights, group, config, top_k=spec.num_topk(group.world_size))


def y_of(layer: ExpertParallelExperts, batch: RankBatch, group: EPGroup) -> Tensor:
    mine = batch.to(group.device)
    y = layer(mine.x, mine.topk)
    layer.check()
    return y


@pytest.mark.parametrize("batch", ["empty_rank", "holes"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_layer_equals_the_model(kind: str, config: str, batch: str, group: EPGroup) -> None:
    spec = SPECS[batch]
    with torch.no_grad():
        weights = weights_of(kind, spec, group)
        layer = layer_of(weights, spec, group, CONFIGS[config])
        assert f"wire: dispatch {weights.wire_format}, combine fp32" in layer.explain()
        on_cpu = make_batch(spec, group.rank, group.world_size)
        assert_within(y_of(layer, on_cpu, group), model(on_cpu, weights, kind))


@pytest.mark.parametrize("name", ["gate_up_proj", "down_scale"])
def test_bytes_are_not_loaded_as_numbers(name: str, group: EPGroup) -> None:
    weights = weights_of("mxfp8", SPECS["uneven"], group)
    layer = ExpertParallelExperts(weights, group, CONFIGS["normal"], top_k=2)
    state = layer.state_dict()
    value = weights.tensors()[name]
    with pytest.raises(ConfigError, match=f"{name} is torch.uint8, expected {value.dtype}"):
        layer.load_state_dict({**state, name: value.view(torch.uint8)})
    layer.load_state_dict({**state, name: value})


# Relative to the largest y. Rows in bfloat16 and, on a GPU, sums of FP8 products with 14 bits move
# one activation in some hundred to the next code, 1/14 of the largest at most, which is what
# tests/kernels/gemm/test_fp8.py counts. The rest is the rounding of results and sums to bfloat16.
BLOCK_TOLERANCE = 0.035


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["fp8", "int8", "mxfp8"])
def test_layer_of_whole_blocks_equals_the_model(kind: str, config: str, group: EPGroup) -> None:
    """Use sizes that the GPU kernels support, if there are GPUs."""
    spec = replace(SPECS["holes"], hidden_size=256, dtype=torch.bfloat16)
    with torch.no_grad():
        weights = weights_of(kind, spec, group, 128)
        layer = layer_of(weights, spec, group, CONFIGS[config])
        on_gpu = ("fp8_wgmma", "fp8_triton") if kind == "fp8" else (f"{kind}_triton",)
        is_gpu = group.device.type == "cuda"
        assert layer.plan.runner in (on_gpu if is_gpu else ("quantized_reference",))
        on_cpu = make_batch(spec, group.rank, group.world_size)
        expected = model(on_cpu, weights, kind).values
        y = y_of(layer, on_cpu, group).cpu().double()
        assert relative_error(y, expected) <= BLOCK_TOLERANCE


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_each_rank_holds_its_share_of_codes_and_scales(kind: str, group: EPGroup) -> None:
    weights = weights_of(kind, SPECS["uneven"], group)
    layer = ExpertParallelExperts(weights, group, top_k=3)
    for name, tensor in weights.tensors().items():
        parameter, mine = layer.get_parameter(name), tensor.chunk(2)[group.rank]
        assert not parameter.requires_grad
        assert torch.equal(parameter.view(torch.uint8), mine.view(torch.uint8)), name


@pytest.mark.parametrize("kind", [None, *QUANTIZED_KINDS])
def test_share_of_its_own_is_copied_contiguous(kind: str | None, group: EPGroup) -> None:
    """Imitate a checkpoint that stores matrices transposed."""
    plain = make_weights(SPECS["uneven"], 1, intermediate_size=INNER, device=group.device)
    given = plain.with_tensors(
        {
            name: tensor.detach().mT.clone(memory_format=torch.contiguous_format).mT
            for name, tensor in plain.tensors().items()
        }
    )
    assert not given.gate_up_proj.is_contiguous()
    weights = given if kind is None else QUANTIZED_KINDS[kind].from_unquantized(given)
    layer = ExpertParallelExperts(weights, group, top_k=2, is_local=True)
    for name, tensor in weights.tensors().items():
        parameter = layer.get_parameter(name)
        assert parameter.is_contiguous()
        same = tensor.contiguous().view(torch.uint8)
        assert torch.equal(parameter.detach().view(torch.uint8), same)


@dataclass(frozen=True)
class Rounding:
    """An unusual rounding: of the scales of the experts, or of the INT8 arithmetic."""

    id: str
    kind: str
    rounding: str
    wire: str
    settings: Mapping[str, object]
    scales: ScaleDtype = ScaleDtype.FLOAT32


POWERS = "fp8_e4m3/128/ue8m0"
TRITON = {"int8_profile": "triton"}
ROUNDINGS = [
    Rounding("powers of two", "fp8", POWERS_OF_TWO, POWERS, {}, ScaleDtype.POWER_OF_TWO),
    Rounding("configured", "fp8", POWERS_OF_TWO, POWERS, {"dispatch_scales": "power_of_two"}),
    Rounding("halves up", "int8", HALVES_UP, "int8/0", TRITON),
    Rounding("other rows", "nvfp4", "mxfp8", "mxfp8", {"dispatch_dtype": WireDtype.MXFP8}),
    Rounding(
        "halves up on arrival", "int8", HALVES_UP, "fp32", {**TRITON, "dispatch_dtype": "fp32"}
    ),
]


@pytest.mark.parametrize("case", ROUNDINGS, ids=lambda case: case.id)
@pytest.mark.parametrize("config", ["normal", "low_latency"])
def test_layer_rounds_as_experts_or_config_say(config: str, case: Rounding, group: EPGroup) -> None:
    spec = SPECS["uneven"]
    with torch.no_grad():
        weights = weights_of(case.kind, spec, group, scales=case.scales)
        layer = layer_of(weights, spec, group, replace(CONFIGS[config], **case.settings))
        assert f"wire: dispatch {case.wire}, combine fp32" in layer.explain()
        on_cpu = make_batch(spec, group.rank, group.world_size)
        on_cpu = replace(on_cpu, x=half_integers(on_cpu.x))
        actual = y_of(layer, on_cpu, group).cpu()
        assert_within(actual, model(on_cpu, weights, case.rounding))
        with pytest.raises(AssertionError, match="beyond their bounds"):
            assert_within(actual, model(on_cpu, weights, case.kind))


def half_integers(like: Tensor) -> Tensor:
    """Return rows in the middle between INT8 codes, of which the largest is 127."""
    generator = torch.Generator().manual_seed(len(like))
    x = torch.randint(-4, 4, like.shape, generator=generator).to(like.dtype) + 0.5
    x[:, 0] = 127
    return x


def run_as_deep_gemm(
    spec: BatchSpec, group: EPGroup, config: EPConfig, scales: ScaleDtype = ScaleDtype.FLOAT32
) -> Iterator[tuple[str, ExpertParallelExperts, DispatchOutput]]:
    """Compare an imitation of DeepGEMM, which refuses other strides, with the plain runner.

    Yields the name of each runner, its layer, and what the layer dispatched. Collective.
    """
    weights, batch = weights_of("fp8", spec, group, 128, scales), make_batch(spec, group.rank, 2)
    mine, results = batch.to(group.device), []
    for runner in ("deep_gemm", "quantized_reference"):
        layer = layer_of(weights, spec, group, replace(config, runner=runner))
        out = layer.phases.prefill.dispatch(mine.x, mine.topk)
        layer.phases.prefill.combine(layer.runner.run(out, layer.weights))
        yield runner, layer, out
        results.append(y_of(layer, batch, group))
    # The tolerance of tests/runners/test_deep_gemm.py.
    assert relative_error(*results) <= 0.042


@pytest.mark.parametrize("scales", ScaleDtype)
@pytest.mark.parametrize("config", CONFIGS)
def test_scales_come_as_the_runner_reads_them(
    config: str, scales: ScaleDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_packed = scales is ScaleDtype.POWER_OF_TWO
    fake_deep_gemm.install(monkeypatch, architecture=10 if is_packed else 9)
    spec = replace(SPECS["holes"], hidden_size=256, dtype=torch.bfloat16)
    wide = CONFIGS[config]
    if wide.max_recv_slots is not None:
        wide = replace(wide, max_recv_slots=1000)
    with EPGroup() as group, torch.no_grad():
        for runner, layer, out in run_as_deep_gemm(spec, group, wide, scales):
            layout = out.hidden_states.scale_layout
            assert layout == layer.plan.prefill.scale_layout
            assert str(layout).startswith("column-major") == (runner == "deep_gemm")


def test_capacity_of_v1_is_whole_tiles_of_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send 36 rows to one expert; without whole tiles a tile of 128 would overwrite the next."""
    fake_deep_gemm.install(monkeypatch)
    monkeypatch.setattr(strict_buffer, "_check_torch_deterministic", lambda: None)
    spec = replace(SPECS["uneven"], hidden_size=2048, dtype=torch.bfloat16)
    config = EPConfig(mode="low_latency", backend="deep_ep_v1", max_tokens_per_rank=18)
    with install("v1"), EPGroup() as group, torch.no_grad():
        num_slots = len(make_batch(spec, group.rank, 2).x) * spec.num_topk(2)
        for runner, _, out in run_as_deep_gemm(spec, group, config):
            assert isinstance(out, MaskedDispatchOutput)
            assert out.hidden_states.data.shape[1] == (128 if runner == "deep_gemm" else 36)
            assert out.mean_tokens_per_expert == -(-num_slots // spec.num_local_experts)
