from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from epcomm import BackendUnavailable, EPConfig, EPGroup, MoESpec, WireDtype, WireFormat, plan
from epcomm.config import Mode
from epcomm.platforms.deep_ep import DeepEPKind
from epcomm.platforms.deep_ep_package import (
    WITH_ELASTIC_BUFFER,
    WITH_LEGACY_BUFFER,
    load_deep_ep,
    probe_deep_ep,
)
from epcomm.platforms.machine import this_machine
from epcomm.quantization import FP8_FLOAT32_SCALES
from epcomm.registry import buffer_class
from epcomm.spec import BufferSpec, HostLayout
from fakes.deep_ep import install
from tests.buffers.deep_ep.test_deep_ep import CASES
from tests.cases.specs import buffer_spec
from tests.cli.test_diagnosis import DEEP_EPS, write_package

if TYPE_CHECKING:
    from mpi4py import MPI

NO_CUDA = "there is no CUDA device"
# The kinds whose legacy Buffer, and whose ElasticBuffer, can be used.
SERVED = {"V1": (True, False), "V2": (True, True), "Hybrid": (True, False)}


@pytest.fixture
def no_deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate a machine with a CUDA device and without any deep_ep."""
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


Install = Callable[[str | Mapping[str, str]], None]


@pytest.fixture
def installed(no_deep_ep: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a deep_ep of these files, or of this __init__.py alone."""

    def write(files: str | Mapping[str, str]) -> None:
        texts = {"__init__.py": files} if isinstance(files, str) else files
        write_package(tmp_path / "deep_ep", texts)
        monkeypatch.syspath_prepend(tmp_path)

    return write


@pytest.mark.parametrize("kind", DEEP_EPS)
def test_every_kind_serves_what_it_holds(kind: DeepEPKind, installed: Install) -> None:
    installed(DEEP_EPS[kind])
    legacy, elastic = probe_deep_ep(WITH_LEGACY_BUFFER), probe_deep_ep(WITH_ELASTIC_BUFFER)
    assert (legacy.ok, elastic.ok) == SERVED.get(kind.value, (False, False))
    for verdict, wanted in ((legacy, "Hybrid or V1 or V2"), (elastic, "V2")):
        if not verdict.ok:
            assert verdict.reasons == (f"the installed deep_ep is {kind.value}, expected {wanted}",)


def test_v2_without_the_older_buffer_serves_no_v1(installed: Install) -> None:
    installed("class ElasticBuffer: ...")
    assert probe_deep_ep(WITH_ELASTIC_BUFFER).ok
    assert probe_deep_ep(WITH_LEGACY_BUFFER).reasons == (
        "the installed deep_ep is V2 without the Buffer of V1",
    )


@pytest.mark.usefixtures("no_deep_ep")
def test_none_names_the_remedy() -> None:
    reason = "deep_ep is not installed (github.com/deepseek-ai/DeepEP)"
    assert probe_deep_ep(WITH_LEGACY_BUFFER).reasons == (reason,)
    with pytest.raises(BackendUnavailable, match=re.escape(reason)):
        load_deep_ep(WITH_LEGACY_BUFFER)


@pytest.mark.parametrize(
    "statement", ["import deep_ep_cpp_that_is_not_there", "raise OSError('libnvshmem: undefined')"]
)
def test_import_that_fails_names_the_remedy(statement: str, installed: Install) -> None:
    installed(f"{statement}\nclass Buffer: ...")
    assert probe_deep_ep(WITH_LEGACY_BUFFER).ok, "nothing is imported by a probe"
    with pytest.raises(BackendUnavailable, match="rebuild it for this torch and this device"):
        load_deep_ep(WITH_LEGACY_BUFFER)


def test_only_a_stand_in_needs_no_cuda(installed: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with install("v1"):
        assert probe_deep_ep(WITH_LEGACY_BUFFER).ok
    installed("class Buffer: ...")
    assert probe_deep_ep(WITH_LEGACY_BUFFER).reasons == (NO_CUDA,)


WHOLE = buffer_spec(2048, 8, 4, 16)


@dataclass(frozen=True)
class Lack:
    """A specification that backends refuse with a reason."""

    backends: tuple[str, ...]
    reason: str
    changes: Mapping[str, object] = field(default_factory=dict)
    world_size: int = 4
    queue_depth: str | None = None


V1 = ("DeepEPV1Buffer", "DeepEPV1StaticBuffer")
V1_LL = ("DeepEPV1LowLatencyBuffer",)
V2 = ("DeepEPV2Buffer", "DeepEPV2StaticBuffer", "DeepEPV2LowLatencyBuffer")
RANKS_OF_V1 = "2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160"
SIZES_OF_V1 = "2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192"
LACKS = [
    Lack(V1, f"serves {RANKS_OF_V1} ranks, not 3", world_size=3),
    Lack(V1[1:], "has static sizes for at most 8 ranks of one host", world_size=16),
    Lack(V1, "has at most 1024 experts a rank", {"num_local_experts": 1025}),
    Lack(V1_LL, f"for hidden_size {SIZES_OF_V1}, not 1024", {"hidden_size": 1024}),
    # 511 tokens of a rank become 512, so that an expert has whole tiles of rows.
    Lack(
        V1_LL,
        "max_tokens_per_rank is 512, at most 511 with NVSHMEM_QP_DEPTH = 1024",
        {"max_tokens_per_rank": 511, "expert_alignment": 128},
    ),
    Lack(V1_LL, "NVSHMEM_QP_DEPTH is 'deep', expected a number", queue_depth="deep"),
    Lack(V1_LL, "serves whole hosts of 8 ranks, not 12 ranks", world_size=12),
    Lack(
        V1_LL,
        "B for messages, and takes less than 34359738352 B",
        {"hidden_size": 8192, "num_local_experts": 512, "max_tokens_per_rank": 511},
    ),
    Lack(
        V1_LL,
        "FP8 rows need max_tokens_per_rank * ranks to be a multiple of 4",
        {"dispatch_format": FP8_FLOAT32_SCALES, "max_tokens_per_rank": 17},
        world_size=2,
    ),
    Lack(
        (*V1, *V2),
        "FP8 rows need a multiple of 128, not 2112",
        {"dispatch_format": FP8_FLOAT32_SCALES, "hidden_size": 2112},
    ),
    Lack(
        (*V1, *V1_LL, *V2),
        "combine carries bf16, not fp16",
        {"hidden_format": WireFormat.of(torch.float16)},
    ),
    Lack(
        V2,
        "set max_tokens_per_rank, and in mode auto max_recv_slots too, or mode normal",
        {"max_tokens_per_rank": None},
    ),
    Lack(V2, "1025 ranks, at most", {"num_local_experts": 1}, world_size=1025),
    Lack(V2, "257 experts of one rank, at most 256", {"num_local_experts": 257}, world_size=2),
    Lack(V2, "4096 experts, at most 2048", {"num_local_experts": 256}, world_size=16),
]


def lacks_of(
    backend: str, spec: BufferSpec, world_size: int = 4, queue_depth: str | None = None
) -> tuple[str, ...]:
    variables = {} if queue_depth is None else {"NVSHMEM_QP_DEPTH": queue_depth}
    buffer, here = buffer_class(backend), replace(this_machine(), environment=variables)
    of_mode = buffer.lacks(CASES[backend].mode, spec, world_size)
    return of_mode + buffer.lacks_with(here, spec, world_size)


@pytest.mark.parametrize("lack", LACKS, ids=lambda lack: f"{lack.backends[0]}: {lack.reason}")
def test_what_a_backend_lacks(lack: Lack) -> None:
    spec = replace(WHOLE, **lack.changes)
    for backend in lack.backends:
        reasons = lacks_of(backend, spec, lack.world_size, lack.queue_depth)
        assert [text for text in reasons if lack.reason in text], (backend, reasons)


@pytest.mark.parametrize("parameter", ["", ", use_logfmt: bool = False"])
def test_logfmt_needs_a_package_that_has_it(parameter: str, installed: Install) -> None:
    installed(f"class Buffer:\n    def low_latency_combine(self, x{parameter}): ...")
    spec = replace(WHOLE, combine_format=WireFormat(dtype=WireDtype.LOGFMT10))
    (backend,) = V1_LL
    reason = "low_latency_combine() of the installed package has no use_logfmt"
    assert lacks_of(backend, spec) == (() if parameter else (reason,))
    assert lacks_of(backend, WHOLE) == ()


def test_what_a_backend_serves_is_lacked_by_none() -> None:
    assert [lacks_of(backend, WHOLE) for backend in CASES] == [()] * len(CASES)
    assert lacks_of(*V1_LL, replace(WHOLE, max_tokens_per_rank=512), queue_depth="1026") == ()


@pytest.mark.parametrize(
    ("backend", "hosts", "reason"),
    [
        ("DeepEPV1Buffer", [0] * 8 + [1] * 8, None),
        ("DeepEPV1Buffer", [0, 1] * 8, "hosts of 8 neighbouring ranks each, not 2 hosts of ranks"),
        ("DeepEPV1Buffer", [0] * 4 + [1] * 4, "hosts of 8 neighbouring ranks each"),
        ("DeepEPV1Buffer", [0] * 8 + [1] * 4, "hosts of 8 neighbouring ranks each"),
        ("DeepEPV1StaticBuffer", [0] * 4 + [1] * 4, "ranks of one host, not of 2"),
        ("DeepEPV2Buffer", [rank // 2 for rank in range(64)], None),
        ("DeepEPV2Buffer", [rank // 2 for rank in range(66)], "33 hosts, at most 32"),
    ],
)
def test_hosts_that_a_package_does_not_join_are_refused(
    backend: str, hosts: list[int], reason: str | None
) -> None:
    kind = buffer_class(backend)
    assert kind.lacks_between(WHOLE) == (), "one host"
    found = kind.lacks_between(replace(WHOLE, hosts=HostLayout.of(hosts)))
    assert len(found) == (reason is not None)
    assert all(reason is not None and reason in each for each in found)


LAYER = MoESpec(hidden_size=2048, num_experts=16, top_k=8)


def config_of(backend: str, **changes: object) -> EPConfig:
    config = EPConfig(mode=CASES[backend].mode, backend=buffer_class(backend).name)
    slots = 256 if "Static" in backend else None
    return replace(config, max_tokens_per_rank=16, max_recv_slots=slots, **changes)


LOW_LATENCY = ("DeepEPV1LowLatencyBuffer", "DeepEPV2LowLatencyBuffer")
MISSING: list[tuple[MoESpec, Mapping[str, object], str, tuple[str, ...]]] = [
    (LAYER, {"dispatch_dtype": "int8"}, "carries ['bf16', 'fp8_e4m3'], not int8", tuple(CASES)),
    (replace(LAYER, num_experts=48, top_k=33), {}, "top_k is 33, at most", tuple(CASES)),
    (
        LAYER,
        {"deterministic": True},
        "slots arrive in any order, and EPConfig.deterministic is set",
        LOW_LATENCY,
    ),
]


@pytest.mark.parametrize(("layer", "changes", "reason", "backends"), MISSING)
def test_backend_asked_for_by_name_is_refused_with_the_reason(
    layer: MoESpec, changes: Mapping[str, object], reason: str, backends: tuple[str, ...]
) -> None:
    for backend in backends:
        with install(CASES[backend].package):
            assert plan(config_of(backend), LAYER, world_size=4).prefill.buffer == backend
            with pytest.raises(BackendUnavailable) as caught:
                plan(config_of(backend, **changes), layer, world_size=4)
        assert f"backend {buffer_class(backend).name} cannot serve this layer" in str(caught.value)
        assert reason in str(caught.value)


@pytest.mark.mpi_ranks(2)
def test_group_on_mpi_is_refused(ep_ranks: MPI.Comm) -> None:
    for backend, case in CASES.items():
        with install(case.package), EPGroup(ep_ranks) as group:
            with pytest.raises(BackendUnavailable) as caught:
                plan(config_of(backend), LAYER, group)
            assert "needs a group made of a torch.distributed process group" in str(caught.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", CASES)
def test_group_on_another_device_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with install(CASES[backend].package) as module, EPGroup() as group:
        # The reason is the same as in the real package, with a GPU that this group does not use.
        monkeypatch.setattr(module, "CPU_RANKS", False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        with pytest.raises(BackendUnavailable, match="groups on cuda, and this one is on cpu"):
            plan(config_of(backend), LAYER, group)


DECODE = EPConfig(max_tokens_per_rank=16)
NORMAL = replace(DECODE, mode=Mode.NORMAL)
# The installed package, the configuration, and the buffers of prefill and decode.
AUTO = [
    (None, DECODE, "SharedMemoryBuffer", "SharedMemoryBuffer"),
    ("v1", DECODE, "DeepEPV1Buffer", "DeepEPV1LowLatencyBuffer"),
    # A prefill without a limit has no capacity in the elastic buffer, which allocates once.
    ("v2", DECODE, "SharedMemoryBuffer", "DeepEPV2LowLatencyBuffer"),
    ("v2", NORMAL, "DeepEPV2Buffer", "DeepEPV2Buffer"),
    ("v2", replace(NORMAL, max_recv_slots=256), "DeepEPV2StaticBuffer", "DeepEPV2StaticBuffer"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("package", "config", "prefill", "decode"), AUTO)
def test_auto_takes_deep_ep_where_it_is(
    package: str | None, config: EPConfig, prefill: str, decode: str
) -> None:
    with EPGroup() as group, install(package) if package else nullcontext():
        chosen = plan(config, LAYER, group)
    assert (chosen.prefill.buffer, chosen.decode.buffer) == (prefill, decode)
    text = chosen.explain()
    for phase in chosen.phases().values():
        regions = phase.regions()
        assert regions
        assert all(f"memory of {each.name}: {each}" in text for each in regions)


def test_explain_says_once_why_all_of_them_are_rejected() -> None:
    config = EPConfig(mode="low_latency", max_tokens_per_rank=16)
    chosen = plan(config, LAYER, world_size=4)
    reason = "deep_ep is not installed (github.com/deepseek-ai/DeepEP)"
    lines = chosen.explain().splitlines()
    (line,) = [line for line in lines if reason in line]
    assert line.startswith(f"rejected deep_ep_v2, deep_ep_v1: {reason}")
    rejected = {each.name: each.reasons for each in chosen.prefill.rejected}
    assert rejected["deep_ep_v1"] == rejected["deep_ep_v2"]
    assert rejected["deep_ep_v1"][0] == reason
