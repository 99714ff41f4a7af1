from dataclasses import replace

import pytest
import torch

from epcomm import (
    BackendUnavailable,
    ConfigError,
    EPConfig,
    EPGroup,
    EPPlan,
    ExpertWeights,
    Fp8BlockWeights,
    MoESpec,
    Mxfp8Weights,
    plan,
)
from epcomm.platforms.assumed import DEVICES, AssumedMachine
from epcomm.platforms.deep_ep import DeepEPKind

SPEC = MoESpec(hidden_size=2048, num_experts=32, top_k=4)
CONFIG = EPConfig(max_tokens_per_rank=64)
HOSTS = "ranks are on 2 hosts, expected one whose memory they share"


def experts() -> ExpertWeights:
    gate_up = torch.empty(1, 512, 2048, dtype=torch.bfloat16, device="meta")
    down = torch.empty(1, 2048, 256, dtype=torch.bfloat16, device="meta")
    return ExpertWeights(gate_up_proj=gate_up, down_proj=down)


NVLINK = ("NVLinkBuffer", "NVLinkLowLatencyBuffer")
BETWEEN_HOSTS = ("HierarchicalBuffer", "StaticCollectiveBuffer")
ON_CPUS = ("SharedMemoryBuffer", "SharedMemoryBuffer")


@pytest.mark.parametrize(
    ("device", "ranks", "buffers", "runner", "no_nvlink"),
    [
        ("h100", 8, NVLINK, "fp8_wgmma", None),
        ("h200", 4, NVLINK, "fp8_wgmma", None),
        ("h200", 16, BETWEEN_HOSTS, "fp8_wgmma", HOSTS),
        # Blackwell has no wgmma instructions.
        ("b200", 8, NVLINK, "fp8_triton", None),
        ("cpu", 16, ON_CPUS, "quantized_reference", "there is no CUDA device"),
    ],
)
def test_it_chooses_as_there(
    device: str,
    ranks: int,
    buffers: tuple[str, str],
    runner: str,
    no_nvlink: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Neither devices nor variables of this machine count.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    fp8 = Fp8BlockWeights.from_unquantized(experts())
    chosen = plan(CONFIG, SPEC, world_size=ranks, weights=fp8, machine=DEVICES[device])
    assert (chosen.prefill.buffer, chosen.decode.buffer) == buffers
    assert chosen.runner == runner
    rejected = {each.name: each.reasons for each in chosen.prefill.rejected}
    reasons = rejected.get("nvlink")
    assert (reasons is None) == (no_nvlink is None)
    assert reasons is None or no_nvlink in reasons
    num_hosts = 2 if no_nvlink == HOSTS else 1
    place = f"{ranks} ranks on {num_hosts} host{'s' * (num_hosts - 1)} of {device}, "
    assert chosen.assumed[0].startswith(place)
    assert chosen.explain().startswith(f"assumed: {chosen.assumed[0]}\nassumed: ")
    assert plan(CONFIG, SPEC, world_size=2).assumed == ()
    config, there = replace(CONFIG, sum_groups=ranks), DEVICES[device]
    found = plan(config, SPEC, world_size=ranks, weights=experts(), machine=there)
    assert found.rests_on.startswith("the version of torch, the ")


def test_runners_that_exceed_product_sms_are_refused() -> None:
    ampere = replace(DEVICES["h200"], capability=(8, 0))

    def planned(machine: AssumedMachine, runner: str) -> EPPlan:
        config = replace(CONFIG, product_sms=100, runner=runner)
        return plan(config, SPEC, world_size=2, weights=experts(), machine=machine)

    assert "\nproducts on at most 100 SMs of a GPU\n" in planned(DEVICES["h200"], "auto").explain()
    assert "products on" not in planned(DEVICES["cpu"], "reference").explain()
    with pytest.raises(BackendUnavailable, match=r"its products cannot obey EPConfig\.product_sms"):
        planned(DEVICES["h200"], "reference")
    with pytest.raises(BackendUnavailable, match=r"torch's products obey EPConfig\.product_sms in"):
        planned(ampere, "grouped_mm")


@pytest.mark.parametrize(
    ("device", "line"),
    [("h200", "runner mxfp8_triton: dequantises to BF16"), ("b200", "runner quantized_reference")],
)
def test_the_runner_of_mxfp8_is_explained(device: str, line: str) -> None:
    weights = Mxfp8Weights.from_unquantized(experts())
    chosen = plan(CONFIG, SPEC, world_size=8, weights=weights, machine=DEVICES[device])
    assert f"\n{line}" in chosen.explain()


@pytest.mark.parametrize("variable", ["2", None])
def test_variables_of_this_machine_do_not_count(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queues of DeepEP V1 of depth 2 hold no token."""
    if variable is not None:
        monkeypatch.setenv("NVSHMEM_QP_DEPTH", variable)
    config = EPConfig(mode="low_latency", backend="deep_ep_v1", max_tokens_per_rank=64)
    there = replace(DEVICES["h200"], deep_ep=DeepEPKind.V1)
    assert plan(config, SPEC, world_size=8, machine=there).prefill.backend == "deep_ep_v1"
    with pytest.raises(BackendUnavailable, match="deep_ep is not installed"):
        plan(config, SPEC, world_size=8, machine=DEVICES["h200"])


def test_sums_of_deep_ep_v1_are_those_of_decode() -> None:
    config = EPConfig(backend="deep_ep", combine_dtype="logfmt10", max_tokens_per_rank=64)
    there = replace(DEVICES["h200"], deep_ep=DeepEPKind.V1)
    chosen = plan(config, SPEC, world_size=8, machine=there)
    sums = [str(each.buffer_spec.combine_format) for each in (chosen.prefill, chosen.decode)]
    assert sums == ["None", "logfmt10"]


@pytest.mark.ranks(2)
def test_a_plan_for_cpus_is_that_of_a_group_on_cpus(group: EPGroup) -> None:
    found = plan(CONFIG, SPEC, group, weights=experts())
    with pytest.raises(ConfigError, match="got group and machine"):
        plan(CONFIG, SPEC, group, machine=DEVICES["cpu"])
    assumed = plan(CONFIG, SPEC, world_size=2, weights=experts(), machine=DEVICES["cpu"])
    for here, there in zip(found.phases().values(), assumed.phases().values(), strict=True):
        assert replace(here, rejected=()) == replace(there, rejected=())
        assert [each.name for each in here.rejected] == [each.name for each in there.rejected]
    assert found.runner == assumed.runner
