from dataclasses import replace

import pytest
import torch

from epcomm import EPConfig, EPGroup, MoESpec, plan
from epcomm.buffers.nvlink.base import NVLinkHost
from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.planning import candidates
from epcomm.platforms import nvlink
from epcomm.platforms.assumed import DEVICES
from epcomm.platforms.nvlink import PeerReach, reach_in, reach_reasons
from epcomm.spec import Availability

SPEC = MoESpec(hidden_size=16, num_experts=8, top_k=2)
CONFIG = EPConfig(max_tokens_per_rank=8, timeout_s=7)
NAME = "NVLinkLowLatencyBuffer"
# Four GPUs in two pairs.
PAIRS = {"a": ["b"], "b": ["a"], "c": ["d"], "d": ["c"]}


def told(*devices: str) -> list[PeerReach]:
    return [reach_in(PAIRS, device) for device in devices]


# The reports of ranks, and the reasons why they cannot write one another's memory.
RANKS: dict[str, tuple[list[PeerReach], list[str]]] = {
    "joined": (told("a", "b"), []),
    "two pairs": (
        told("a", "b", "c"),
        ["rank 0 is not connected to [2] by NVLink", "rank 1 is not connected to [2] by NVLink"],
    ),
    "one GPU for two": (
        told("a", "b", "a"),
        ["rank 0 shares its GPU with [2], and kernels wait for peers"],
    ),
    "one way only": (
        [PeerReach(device="a", reached=("b",)), PeerReach(device="b")],
        ["rank 0 is not connected to [1] by NVLink"],
    ),
    "part of a GPU": (
        told("a", "e"),
        ["rank 1: NVML has no GPU e, which may be a part of one (MIG)"],
    ),
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_must_be_joined_two_by_two(name: str) -> None:
    found, reasons = RANKS[name]
    assert reach_reasons(found) == reasons


def test_a_report_is_parsed_as_it_was_written() -> None:
    for each in (*told("a"), PeerReach(lacks="no library")):
        assert PeerReach.parse(each.as_text()) == each


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvlink, "_LIBRARY", "libepcomm-of-nobody.so")
    with pytest.raises(nvlink.NvmlError, match="add utility to NVIDIA_DRIVER_CAPABILITIES"):
        nvlink.nvlink_peers()


NVLINK = ("NVLinkBuffer", NAME)
COLLECTIVE = ("CollectiveBuffer", "StaticCollectiveBuffer")
APART = "rejected nvlink: rank 0 is not connected to [1] by NVLink"
TWO_HOSTS = "rejected nvlink: ranks are on 2 hosts, expected one whose memory they share"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("devices", "hosts", "buffers", "reason"),
    [
        (("a", "b"), ("one", "one"), NVLINK, ""),
        (("a", "c"), ("one", "one"), COLLECTIVE, APART),
        (("a", "b"), ("one", "two"), COLLECTIVE, TWO_HOSTS),
    ],
    ids=["joined", "apart", "two hosts"],
)
def test_decode_takes_it_where_it_can(
    devices: tuple[str, str],
    hosts: tuple[str, str],
    buffers: tuple[str, str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in (NVLinkHost, NVLinkBuffer):
        monkeypatch.setattr(kind, "probe", lambda machine: Availability(ok=True))
    with EPGroup() as group:
        # Collectives like those over nccl: tensors are on a GPU, and no host waits.
        monkeypatch.setattr(group, "device", torch.device("cuda"))
        monkeypatch.setattr(group.collectives, "bounded", None)
        mine = reach_in(PAIRS, devices[group.rank])
        monkeypatch.setattr(candidates, "reach_of", lambda device: mine)
        monkeypatch.setattr(candidates, "host_of_this_process", lambda: hosts[group.rank])
        chosen = plan(CONFIG, SPEC, group)
        assert group.collectives.kernel_timeout_s == CONFIG.timeout_s == 7
    assert (chosen.prefill.buffer, chosen.decode.buffer) == buffers
    if devices == ("a", "b"):
        # What is assumed of such machines is decided as if it were found.
        there = replace(DEVICES["h200"], ranks_per_host=1 if len(set(hosts)) == 2 else 8)
        assumed = plan(CONFIG, SPEC, world_size=2, machine=there)
        for phase, like in zip(chosen.phases().values(), assumed.phases().values(), strict=True):
            assert replace(phase, rejected=()) == replace(like, rejected=())
    text = chosen.explain()
    assert reason in text
    waits = "needs a transport in whose collectives the host waits, gloo or MPI"
    of_waits = [line for line in text.splitlines() if waits in line]
    assert [line.split(":")[0] for line in of_waits] == ["rejected shared_memory"] * 2


def test_a_plan_without_ranks_or_with_one_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (NVLinkHost, NVLinkBuffer):
        monkeypatch.setattr(kind, "probe", lambda machine: Availability(ok=True))
    text = plan(CONFIG, SPEC, world_size=2).explain()
    reason = "serves one host, which only a process group shows; run under torchrun"
    assert f"rejected nvlink, shared_memory: {reason}" in text
    assert "rejected nvlink: writes to peers, and a single rank has none; " in (
        plan(CONFIG, SPEC).explain()
    )


@pytest.mark.parametrize("world_size", [30, 31])
def test_low_latency_is_refused_to_more_ranks_than_waits_can_tell_apart(world_size: int) -> None:
    spec = MoESpec(hidden_size=16, num_experts=world_size, top_k=2)
    there = replace(DEVICES["h200"], ranks_per_host=world_size)
    chosen = plan(CONFIG, spec, world_size=world_size, machine=there)
    assert (chosen.decode.buffer == NAME) == (world_size == 30)
    assert ("serves at most 30 ranks, not 31" in chosen.explain()) == (world_size == 31)


def test_normal_mode_is_left_to_collective_on_gpus_before_hopper() -> None:
    there = replace(DEVICES["h200"], capability=(8, 0))
    chosen = plan(CONFIG, SPEC, world_size=2, machine=there)
    assert chosen.prefill.buffer == "CollectiveBuffer"
    assert chosen.decode.buffer == NAME
    assert "compute capability is (8, 0), expected at least (9, 0)" in chosen.explain()


def test_normal_mode_needs_nvrtc() -> None:
    found = replace(DEVICES["h200"].machine(), has_library=lambda load: False)
    verdict = NVLinkBuffer.probe(found)
    assert verdict.reasons == ("NVRTC is not installed",)
    assert "nvidia-cuda-nvrtc" in verdict.command
