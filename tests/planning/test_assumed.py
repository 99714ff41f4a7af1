"""Plans for other machines: their choices, and the assumptions that they report."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from epcomm import (
    BackendUnavailable,
    ConfigError,
    EPConfig,
    EPGroup,
    ExpertWeights,
    Fp8BlockWeights,
    MoESpec,
    plan,
)
from epcomm.platforms.assumed import DEVICES
from epcomm.platforms.deep_ep import DeepEPKind

SPEC = MoESpec(hidden_size=2048, num_experts=32, top_k=4)
CONFIG = EPConfig(max_tokens_per_rank=64)
HOSTS = "ranks are on 2 hosts, expected one whose memory they share"


def experts() -> ExpertWeights:
    gate_up = torch.empty(1, 512, 2048, dtype=torch.bfloat16, device="meta")
    down = torch.empty(1, 2048, 256, dtype=torch.bfloat16, device="meta")
    return ExpertWeights(gate_up_proj=gate_up, down_proj=down)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Ranks on a device: buffers of prefill and decode, the runner, the reason against nvlink."""

    device: str
    ranks: int
    buffers: tuple[str, str]
    runner: str
    no_nvlink: str | None = None


NVLINK = ("NVLinkBuffer", "NVLinkLowLatencyBuffer")
CASES = [
    Case(device="h100", ranks=8, buffers=NVLINK, runner="fp8_wgmma"),
    Case(device="h200", ranks=4, buffers=NVLINK, runner="fp8_wgmma"),
    Case(
        device="h200",
        ranks=16,
        buffers=("HierarchicalBuffer", "StaticCollectiveBuffer"),
        runner="fp8_wgmma",
        no_nvlink=HOSTS,
    ),
    # Blackwell has no wgmma instructions.
    Case(device="b200", ranks=8, buffers=NVLINK, runner="fp8_triton"),
    Case(
        device="cpu",
        ranks=16,
        buffers=("SharedMemoryBuffer", "SharedMemoryBuffer"),
        runner="quantized_reference",
        no_nvlink="there is no CUDA device",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.ranks} x {case.device}")
def test_it_chooses_as_there(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither devices nor variables of this machine have an effect.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: case.device == "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    fp8 = Fp8BlockWeights.from_unquantized(experts())
    chosen = plan(CONFIG, SPEC, world_size=case.ranks, weights=fp8, machine=DEVICES[case.device])
    assert chosen.decode is not None
    assert (chosen.prefill.buffer, chosen.decode.buffer) == case.buffers
    assert chosen.runner == case.runner
    rejected = {each.name: each.reasons for each in chosen.prefill.rejected}
    reasons = rejected.get("nvlink")
    assert (reasons is None) == (case.no_nvlink is None)
    assert reasons is None or case.no_nvlink in reasons
    num_hosts = 2 if case.no_nvlink == HOSTS else 1
    place = f"{case.ranks} ranks on {num_hosts} host{'s' * (num_hosts - 1)} of {case.device}, "
    assert chosen.assumed[0].startswith(place)
    assert chosen.explain().startswith(f"assumed: {chosen.assumed[0]}\nassumed: ")
    assert plan(CONFIG, SPEC, world_size=2).assumed == ()


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


@pytest.mark.ranks(2)
def test_a_plan_for_cpus_is_that_of_a_group_on_cpus() -> None:
    with EPGroup() as group:
        found = plan(CONFIG, SPEC, group, weights=experts())
        with pytest.raises(ConfigError, match="got group and machine"):
            plan(CONFIG, SPEC, group, machine=DEVICES["cpu"])
    assumed = plan(CONFIG, SPEC, world_size=2, weights=experts(), machine=DEVICES["cpu"])
    for here, there in zip(found.phases().values(), assumed.phases().values(), strict=True):
        assert replace(here, rejected=()) == replace(there, rejected=())
        assert [each.name for each in here.rejected] == [each.name for each in there.rejected]
    assert found.runner == assumed.runner
