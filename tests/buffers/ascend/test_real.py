"""The suites on the installed torch_npu and deep_ep instead of the imitations.

    HCCL_BUFFSIZE=2000 MULTI_RANK_BACKEND=hccl scripts/launch_multi_rank.sh 2 \
        tests/buffers/ascend/test_real.py

runs them on the NPUs of this machine; without MULTI_RANK_BACKEND there are no such tests.
"""

import os
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from epcomm import EPGroup, WireDtype
from epcomm.platforms.machine import this_machine
from epcomm.registry import buffer_class
from epcomm.testing import buffer_suite, layer_suite
from tests.buffers.ascend.test_ascend import CONFIGS, HIDDEN, LAYER_SCENARIOS, SCENARIOS, WIRES
from tests.multi_rank import BACKEND_ENV
from tests.runners.test_ascend_layers import RUNNERS, check_w8a8_layer


def why_not() -> str:
    if os.environ.get(BACKEND_ENV) != "hccl":
        return f"{BACKEND_ENV} is not hccl"
    if find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    npu = import_module("torch_npu").npu
    if not npu.is_available():
        return "there is no NPU"
    # ascend_nz needs this setting, which applies to the process.
    npu.config.allow_internal_format = True
    return "; ".join(buffer_class("AscendNormalBuffer").probe(this_machine()).reasons)


REASON = why_not()
pytestmark = [pytest.mark.real_npu, pytest.mark.skipif(bool(REASON), reason=REASON)]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_buffer_keeps_its_contract(scenario: str, backend: str, wire: str, group: EPGroup) -> None:
    env = buffer_suite.BufferEnv(
        group=group,
        backend=backend,
        mode=CONFIGS[backend].mode,
        wire=WIRES[wire],
        hidden_size=HIDDEN,
        dtype=torch.bfloat16,
        poisons=False,
        fills_batches=backend != "AscendStandardBuffer",
    )
    buffer_suite.run_scenario(scenario, env)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("wire", [None, WireDtype.INT8])
@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize("scenario", LAYER_SCENARIOS)
def test_layer_equals_the_oracle(
    scenario: str, backend: str, wire: WireDtype | None, group: EPGroup
) -> None:
    config = replace(CONFIGS[backend], backend="ascend", dispatch_dtype=wire)
    env = layer_suite.pipeline_env(group, config, hidden_size=HIDDEN, dtype=torch.bfloat16)
    layer_suite.run_scenario(scenario, replace(env, has_gradients=False, poisons=False))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("backend", CONFIGS)
def test_w8a8_layer_equals_a_float64_model(backend: str, runner: str, group: EPGroup) -> None:
    own = RUNNERS[runner]
    config = replace(
        CONFIGS[backend],
        backend=backend,
        runner=runner,
        dispatch_dtype=own.dispatch_dtype,
        int8_profile=own.int8_profile,
    )
    check_w8a8_layer(group, config, HIDDEN)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("runner", ["ascend", "ascend_nz"])
@pytest.mark.parametrize("backend", CONFIGS)
def test_unquantised_layer_equals_the_oracle(backend: str, runner: str, group: EPGroup) -> None:
    config = replace(CONFIGS[backend], backend="ascend", runner=runner)
    env = layer_suite.pipeline_env(group, config, hidden_size=HIDDEN, dtype=torch.bfloat16)
    layer_suite.run_scenario("holes", replace(env, has_gradients=False, poisons=False))
