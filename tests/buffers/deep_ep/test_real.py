"""The suites on the installed deep_ep instead of the imitations.

    MULTI_RANK_BACKEND=nccl scripts/launch_multi_rank.sh 2 tests/buffers/deep_ep/test_real.py

runs them on the GPUs of this machine; without MULTI_RANK_BACKEND there are no such tests.
"""

import os
from dataclasses import replace

import pytest
import torch

from epcomm import BackendUnavailable, EPGroup, WireDtype
from epcomm.platforms.deep_ep import DeepEPKind
from epcomm.platforms.deep_ep_package import load_deep_ep
from epcomm.platforms.machine import this_machine
from epcomm.registry import buffer_class
from epcomm.testing import buffer_suite, layer_suite
from tests.buffers.deep_ep.test_deep_ep import (
    CASES,
    LAYER_SCENARIOS,
    RUNS,
    WIRES,
    buffer_env,
    layer_env,
)
from tests.multi_rank import BACKEND_ENV


def why_not() -> str:
    if os.environ.get(BACKEND_ENV) != "nccl":
        return f"{BACKEND_ENV} is not nccl"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        package = load_deep_ep(frozenset(DeepEPKind))
    except BackendUnavailable as error:
        return str(error)
    return "deep_ep is a stand-in" if getattr(package, "CPU_RANKS", False) else ""


REASON = why_not()
# A skip under the launcher is a failure, so the cases for another kind of deep_ep are left out.
SERVED = tuple(name for name in CASES if buffer_class(name).probe(this_machine()).ok)
BACKENDS = tuple(CASES) if REASON else SERVED
TRAINABLE = tuple(name for name in BACKENDS if buffer_class(name).caps(CASES[name].mode).trainable)

pytestmark = [pytest.mark.real_deep_ep, pytest.mark.skipif(bool(REASON), reason=REASON)]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("backend", "scenario"), [run for run in RUNS if run[0] in BACKENDS])
def test_buffer_keeps_its_contract(backend: str, scenario: str, wire: str, group: EPGroup) -> None:
    env = replace(buffer_env(backend, group, wire), poisons=False)
    buffer_suite.run_scenario(scenario, env)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("wire", [None, WireDtype.FP8_E4M3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scenario", LAYER_SCENARIOS)
def test_layer_equals_the_oracle(
    scenario: str, backend: str, wire: WireDtype | None, group: EPGroup
) -> None:
    env = replace(layer_env(backend, group, wire), poisons=False)
    layer_suite.run_scenario(scenario, env)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("scenario", layer_suite.GRADIENT_SCENARIOS)
def test_layer_trains_like_the_oracle(scenario: str, backend: str, group: EPGroup) -> None:
    env = replace(layer_env(backend, group), poisons=False)
    layer_suite.run_scenario(scenario, env)
