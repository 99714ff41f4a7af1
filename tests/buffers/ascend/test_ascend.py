from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from epcomm import (
    BackendUnavailable,
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    TopKOutput,
    WireDtype,
)
from epcomm.buffers.ascend import packed
from epcomm.platforms.ascend import limits as ascend_limits
from epcomm.platforms.ascend.chip import Soc
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.registry import buffer_class
from epcomm.testing import buffer_suite, layer_suite
from epcomm.testing.data import make_batch, make_weights
from fakes.ascend import limits
from fakes.deep_ep import install
from tests.runners.test_ascend_layers import check_w8a8_layer

pytestmark = pytest.mark.ranks(2)

CONFIGS = {
    "AscendNormalBuffer": EPConfig(mode="normal"),
    "AscendLowLatencyBuffer": EPConfig(mode="low_latency", max_tokens_per_rank=16),
    "AscendStandardBuffer": EPConfig(mode="standard"),
}
HIDDEN, SMALL_HIDDEN = 1024, 64
WIRES = {"bf16": None, "int8": INT8_PER_TOKEN}
# The rows of this backend have one size, are bfloat16, and are packed.
SCENARIOS = [
    name
    for name in buffer_suite.SCENARIOS
    if name not in ("fp16", "bf16", "odd_hidden", "aligned", "aligned_holes")
]
# In bfloat16 a clamped activation may fall to either side of its limit, where its slope jumps.
LAYER_SCENARIOS = [name for name in layer_suite.SCENARIOS if name != "clamped_swiglu"]


@pytest.fixture(autouse=True)
def machine(npu_operators: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Normal mode needs 416 MiB and its rows; the default is 200. By hand, of H = 1024, K = 2 and
    # M = 8192: 2 * (8192 * 2 * (2048 + 2560) B + 208 MiB) = 560 MiB.
    monkeypatch.setenv("HCCL_BUFFSIZE", "2000")
    with install("ascend"):
        yield


@contextmanager
def hidden_size_of(group: EPGroup) -> Iterator[int]:
    """Return H: a size that kernels take on 2 ranks, and a smaller one on more, to save time."""
    if group.world_size == 2:
        yield HIDDEN
        return
    anything = {"hidden": (SMALL_HIDDEN, HIDDEN)}
    with pytest.MonkeyPatch.context() as patch, limits.soc("A3", size_limits=False):
        for name in ("_NORMAL", "_LOW_LATENCY"):
            patch.setattr(ascend_limits, name, replace(getattr(ascend_limits, name), **anything))
        yield SMALL_HIDDEN


RUNS = [
    (scenario, backend)
    for scenario in SCENARIOS
    for backend, config in CONFIGS.items()
    if buffer_suite.tests_anything(scenario, buffer_class(backend).caps(config.mode))
]


@pytest.mark.parametrize(("scenario", "backend"), RUNS)
def test_ascend_buffer_keeps_its_contract(scenario: str, backend: str) -> None:
    run_buffer(scenario, backend, "bf16")


@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize("scenario", ["empty_rank", "holes", "traffic"])
def test_int8_rows_keep_the_contract(scenario: str, backend: str) -> None:
    run_buffer(scenario, backend, "int8")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("backend", ["AscendNormalBuffer", "AscendLowLatencyBuffer"])
def test_flags_of_newer_releases_name_the_rows(backend: str, wire: str) -> None:
    with install("ascend_flags"):
        run_buffer("uneven", backend, wire)


def test_int8_rows_are_refused_where_flags_mean_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "current_soc", lambda: Soc.A5)
    with install("ascend_flags"), pytest.raises(BackendUnavailable, match="has no INT8 rows on A5"):
        run_buffer("uneven", "AscendNormalBuffer", "int8")


# Scenarios that need more than 2 ranks.
@pytest.mark.ranks(4)
@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize("scenario", ["uneven", pytest.param("faults", marks=pytest.mark.slow)])
def test_ascend_buffer_of_four_ranks_keeps_its_contract(scenario: str, backend: str) -> None:
    run_buffer(scenario, backend, "bf16")


def run_buffer(scenario: str, backend: str, wire: str) -> None:
    with EPGroup() as group, hidden_size_of(group) as hidden_size:
        env = buffer_suite.BufferEnv(
            group=group,
            backend=backend,
            mode=CONFIGS[backend].mode,
            wire=WIRES[wire],
            hidden_size=hidden_size,
            dtype=torch.bfloat16,
            fills_batches=backend != "AscendStandardBuffer",
        )
        buffer_suite.run_scenario(scenario, env)


# Scenarios in which the buffer matters; other buffers run the rest.
@pytest.mark.parametrize("wire", [None, WireDtype.INT8])
@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize("scenario", ["empty_rank", "interleaved"])
def test_layer_on_ascend_equals_the_oracle(
    scenario: str, backend: str, wire: WireDtype | None, group: EPGroup
) -> None:
    with hidden_size_of(group) as hidden_size:
        config = replace(CONFIGS[backend], backend="ascend", dispatch_dtype=wire)
        env = layer_suite.pipeline_env(group, config, hidden_size=hidden_size, dtype=torch.bfloat16)
        layer_suite.run_scenario(scenario, replace(env, has_gradients=False))


@pytest.mark.parametrize("backend", CONFIGS)
def test_w8a8_experts_equal_a_float64_model(backend: str, group: EPGroup) -> None:
    """The vendor's operators through all buffers, each store in bfloat16 followed."""
    config = replace(CONFIGS[backend], backend="ascend", runner="ascend")
    check_w8a8_layer(group, config, HIDDEN)


@pytest.mark.parametrize("backend", CONFIGS)
def test_unquantised_experts_equal_the_oracle(backend: str, group: EPGroup) -> None:
    config = replace(CONFIGS[backend], backend="ascend", runner="ascend")
    env = layer_suite.pipeline_env(group, config, hidden_size=HIDDEN, dtype=torch.bfloat16)
    layer_suite.run_scenario("holes", replace(env, has_gradients=False))


@pytest.mark.parametrize("backend", CONFIGS)
def test_what_lies_in_padding_does_not_matter(backend: str, group: EPGroup) -> None:
    """A token without an expert is sent, and its y is zero."""
    spec = replace(buffer_suite.BATCH_SPECS["uneven"], hidden_size=HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        batch = make_batch(spec, group.rank, group.world_size)
        config = replace(CONFIGS[backend], backend="ascend", dispatch_dtype=WireDtype.INT8)
        weights = make_weights(spec, group.world_size, intermediate_size=16)
        layer = ExpertParallelExperts(weights, group, config, top_k=spec.num_topk(group.world_size))
        ids, x = batch.topk_ids.clone(), batch.x.clone()
        ids[:1] = -1
        topk = TopKOutput(topk_ids=ids, topk_weights=batch.topk_weights)
        expected = layer(x, topk)
        x[:1] = float("nan")
        y = layer(x, topk)
        layer.check()
        assert not y[:1].any()
        assert torch.equal(y, expected)
