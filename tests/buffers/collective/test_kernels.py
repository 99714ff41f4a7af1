"""The buffers over collectives with interpreted kernels in place of plain torch, on CPU ranks.

The other tests of these buffers run plain torch; the contract is the same. On GPUs these
buffers use only kernels, and the buffer suite runs them there.
"""

from dataclasses import replace

import pytest
import torch

from epcomm import DeepEPNormalDispatcher, EPConfig, EPGroup, Mode, MoESpec, WireDtype, WireFormat
from epcomm.buffers.collective.all_to_all import CollectiveExchangePlan
from epcomm.ops import slots as kernels_by_device
from epcomm.ops.slots import MemberTable, slots_by_row
from epcomm.quantization import FP8_FLOAT32_SCALES
from epcomm.testing import buffer_suite, layer_suite
from epcomm.testing.data import make_batch

pytest.importorskip("triton")

pytestmark = pytest.mark.ranks(2)

MODES = {
    "CollectiveBuffer": Mode.NORMAL,
    "AllGatherBuffer": Mode.STANDARD,
    "StaticCollectiveBuffer": Mode.LOW_LATENCY,
}


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels of CUDA tensors for CPU tensors."""
    monkeypatch.setitem(kernels_by_device._LOADERS, "cpu", kernels_by_device._LOADERS["cuda"])


def env_of(group: EPGroup, backend: str) -> buffer_suite.BufferEnv:
    return buffer_suite.BufferEnv(group=group, backend=backend, mode=MODES[backend])


# The scenarios in which kernels differ most; all others of normal mode are slow tests.
FEW = ("uneven", "aligned_holes", "stand_alone", "ids_out_of_range")
RUNS = [
    *(
        pytest.param(name, "CollectiveBuffer", marks=[] if name in FEW else pytest.mark.slow)
        for name in buffer_suite.SCENARIOS
    ),
    ("aligned_holes", "AllGatherBuffer"),
    ("aligned_holes", "StaticCollectiveBuffer"),
]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("scenario", "backend"), RUNS)
def test_buffer_keeps_its_contract(scenario: str, backend: str, group: EPGroup) -> None:
    buffer_suite.run_scenario(scenario, env_of(group, backend))


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("backend", MODES)
def test_four_bit_rows_and_quantised_sums_keep_the_contract(backend: str, group: EPGroup) -> None:
    wire, combine = (WireFormat(dtype=dtype) for dtype in (WireDtype.NVFP4, WireDtype.MXFP8))
    env = replace(env_of(group, backend), wire=wire, combine=combine)
    if combine.dtype in env.caps.backward_dtypes:
        env = replace(env, backward=combine)
    buffer_suite.run_scenario("holes", env)


@pytest.mark.usefixtures("_kernels")
def test_quantised_rows_of_several_blocks_arrive(group: EPGroup) -> None:
    spec = replace(buffer_suite.BATCH_SPECS["holes"], hidden_size=300, dtype=torch.bfloat16)
    env = replace(env_of(group, "CollectiveBuffer"), wire=FP8_FLOAT32_SCALES)
    buffer_suite.check_batch(env, spec)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("mode", "scenario"),
    [
        (Mode.NORMAL, "checkpointing"),
        pytest.param(Mode.NORMAL, "uneven", marks=pytest.mark.slow),
        pytest.param(Mode.STANDARD, "uneven", marks=pytest.mark.slow),
    ],
)
def test_gradients_pass_the_same_kernels(mode: Mode, scenario: str, group: EPGroup) -> None:
    config = EPConfig(mode=mode, backend="collective")
    layer_suite.run_scenario(scenario, layer_suite.pipeline_env(group, config))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("has_kernels", [False, True])
def test_the_table_decides_who_plans(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_kernels:
        monkeypatch.setitem(kernels_by_device._LOADERS, "cpu", kernels_by_device._LOADERS["cuda"])
    spec = buffer_suite.BATCH_SPECS["uneven"]
    with EPGroup() as group:
        batch = make_batch(spec, 0, 1).to(group.device)
        moe = MoESpec(hidden_size=spec.hidden_size, num_experts=2, top_k=2, dtype=spec.dtype)
        dispatcher = DeepEPNormalDispatcher(group, moe, EPConfig(backend="collective"))
        exchange_plan = dispatcher.dispatch(batch.x, batch.topk).handle.exchange_plan
    assert isinstance(exchange_plan, CollectiveExchangePlan)
    for members in (exchange_plan.sends.rows_of_token, slots_by_row(exchange_plan.index)):
        assert isinstance(members, MemberTable) == (has_kernels or group.device.type == "cuda")
