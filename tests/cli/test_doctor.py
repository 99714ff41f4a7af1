import json
import re
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

import epcomm.cli.doctor
from epcomm.cli.diagnosis import DoctorReport, doctor
from epcomm.platforms.assumed import DEVICES
from epcomm.platforms.deep_ep import Variable
from epcomm.platforms.findings import Finding, Status
from epcomm.platforms.machine import Machine
from tests.cli.test_cli import run

PACKAGE = Finding(
    name="deep_ep", status=Status.ATTENTION, detail="[V1] and\nmore", advice="pip install x[y]"
)
HERE = Finding(name="collective", status=Status.HERE, detail="serves normal", serves=("normal",))
MISSING = Finding(
    name="nvlink",
    status=Status.MISSING,
    detail="serves [normal]",
    advice="run: pip install x[y]",
    reasons=("no [x]", "no y"),
    command="pip install x[y]",
    serves=("normal", "[low]"),
)
RUNNER = Finding(name="reference", status=Status.HERE, detail="computes", serves=("Experts",))
TORCH = Finding(name="torch", status=Status.HERE, detail="2.13.0\nand more")
TRITON = Finding(name="triton", status=Status.MISSING, detail="for: kernels")
REPORT = DoctorReport(
    platform=(TORCH, PACKAGE),
    packages=(TRITON, PACKAGE),
    deep_ep=None,
    backends=(HERE, MISSING),
    runners=(RUNNER,),
    variables=(
        Variable(name="EP_X", value="1", written=None, advice="unset it"),
        Variable(name="EP_Y", value=None, written="1", advice=""),
    ),
    next_steps=tuple(f"step {i} [x]" for i in range(9)),
)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epcomm.cli.doctor, "doctor", lambda: REPORT)


@pytest.mark.usefixtures("report")
def test_without_verbose_20_lines_say_what_works_and_what_to_do_next() -> None:
    printed = run("doctor").stdout.splitlines()
    assert len(printed) <= 20
    works, steps = printed[:-7], printed[-7:]
    assert [line.split() for line in works if "normal" in line] == [["normal", "collective"]]
    assert [line.split() for line in works if "Experts" in line] == [["Experts", "reference"]]
    assert steps[0] == "next (5 of 9 steps):"
    assert steps[1:] == [
        *(f"- step {i} [x]" for i in range(5)),
        "- see what is not here, and why: epcomm doctor --verbose",
    ]


# Run the command as `python -m epcomm doctor` does, with one survey of the machine.
PROGRAM = """
import json, runpy, sys
import epcomm.cli.diagnosis, epcomm.cli.doctor
before = set(sys.modules)
report = epcomm.cli.diagnosis.doctor()
imported = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps([[finding.name for finding in report.platform], sorted(imported)]))
epcomm.cli.doctor.doctor = lambda: report
sys.argv = ["epcomm", "doctor"]
runpy.run_module("epcomm", run_name="__main__")
"""


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables, header rows included."""
    lines = [re.split("[│┃]", line)[1:-1] for line in text.splitlines() if line[:1] in "│┃"]
    return [[cell.strip() for cell in line] for line in lines]


def test_this_machine_needs_20_lines_no_backend_that_it_lacks_and_no_import_of_a_vendor() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, *printed = done.stdout.splitlines()
    platform, imported = json.loads(found)
    assert platform == ["torch", "distributed backends", "CUDA devices", "shared memory"]
    vendors = {"deep_ep", "deep_gemm", "torch_npu", "mpi4py", "triton", "transformers"}
    assert not vendors & set(imported)
    assert 10 <= len(printed) <= 20
    (line,) = [line for line in printed if line.startswith(" standard ")]
    assert line.split() == ["standard", "collective"]


@pytest.mark.usefixtures("report")
def test_with_verbose_all_findings_are_printed_as_they_are() -> None:
    result = run("doctor", "--verbose")
    assert result.exit_code == 0, result.output
    assert "- step 8 [x]" in result.stdout.splitlines()
    printed = rows(result.stdout)
    for kind in ("platform", "package"):
        place = printed.index([kind, "", "found", "what to do"])
        assert printed[place + 2 : place + 4] in (
            [["", "", "and more", ""], ["deep_ep", "attention", "[V1] and", "pip install x[y]"]],
            [["deep_ep", "attention", "[V1] and", "pip install x[y]"], ["", "", "more", ""]],
        )
    place = printed.index(["backend", "", "found", "why not", "what would bring it"])
    assert printed[place + 1 : place + 4] == [
        ["collective", "here", "serves normal", "", ""],
        ["nvlink", "missing", "normal, [low]", "no [x]", "run: pip install x[y]"],
        ["", "", "", "no y", ""],
    ]
    assert ["reference", "here", "computes", "", ""] in printed
    assert ["EP_X", "'1'", "", "unset it"] in printed
    assert "EP_Y" not in result.stdout, "it is not set"


@pytest.mark.usefixtures("report")
def test_a_name_prints_all_of_it_and_nothing_else() -> None:
    assert rows(run("doctor", "nvlink").stdout)[1:] == [
        ["nvlink", "missing", "normal, [low]", "no [x]", "run: pip install x[y]"],
        ["", "", "", "no y", ""],
    ]


@pytest.mark.usefixtures("report")
@pytest.mark.parametrize(
    ("names", "code"),
    [([], 0), (["collective", "reference"], 0), (["nvlink"], 1), (["reference", "nvlink"], 1)],
    ids=str,
)
def test_exit_code_and_json_say_whether_what_is_named_is_here(names: list[str], code: int) -> None:
    assert run("doctor", *names).exit_code == code
    result = run("doctor", "--json", *names)
    assert result.exit_code == code
    found = json.loads(result.stdout)
    assert list(found) == [
        *("version", "ok", "platform", "packages", "deep_ep", "backends", "runners", "variables"),
        "next_steps",
    ]
    assert found["ok"] == (code == 0)
    shown = [part["name"] for part in (*found["backends"], *found["runners"])]
    assert set(shown) == set(names or ("collective", "nvlink", "reference"))
    expected = json.loads(json.dumps(asdict(MISSING)))
    assert [part for part in found["backends"] if part["name"] == "nvlink"] in ([], [expected])


@pytest.mark.parametrize(("status", "code"), [(Status.HERE, 0), (Status.MISSING, 1)])
def test_deep_ep_is_any_release(status: Status, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    v1 = Finding(name="deep_ep_v1", status=status, detail="serves normal")
    found = replace(REPORT, backends=(HERE, v1, replace(MISSING, name="deep_ep_v2")))
    monkeypatch.setattr(epcomm.cli.doctor, "doctor", lambda: found)
    result = run("doctor", "--json", "deep_ep")
    assert result.exit_code == code
    shown = json.loads(result.stdout)
    assert [each["name"] for each in shown["backends"]] == ["deep_ep_v1", "deep_ep_v2"]
    assert shown["runners"] == []


@pytest.mark.parametrize("lacking", ["backends", "runners"])
def test_machine_that_serves_nothing_exits_1(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(REPORT, **{lacking: (MISSING,)})
    monkeypatch.setattr(epcomm.cli.doctor, "doctor", lambda: bare)
    assert run("doctor").exit_code == 1


CPU, BARE_GPU, GPU = "cpu", "h200, torch alone", "h200"
DEEP_EP = "run: git clone --recursive https://github.com/deepseek-ai/DeepEP && cd DeepEP && "
# A part, a machine that lacks it, and the command that would install it or the hardware it needs.
REMEDIES = [
    ("nvlink", CPU, "no command can: it needs NVIDIA GPUs of one host that"),
    ("nvlink", BARE_GPU, "run: pip install --upgrade 'torch>=2.11' triton"),
    ("deep_ep_v1", CPU, "no command can: it needs NVIDIA GPUs"),
    ("deep_ep_v2", GPU, DEEP_EP),
    ("fp8_wgmma", "b200", "no command can: it needs an NVIDIA GPU of compute"),
    ("int8_triton", BARE_GPU, "run: pip install triton"),
    ("deep_gemm", GPU, "run: git clone --recursive https://github.com/deep"),
    ("fused_deep_moe", GPU, "no command can: it needs Ascend NPUs"),
    ("ascend_nz", CPU, "no command can: it needs Ascend NPUs"),
]


def machine(name: str) -> Machine:
    if name == BARE_GPU:
        return replace(DEVICES["h200"].machine(), has_module=lambda module: False)
    return DEVICES[name].machine()


@pytest.mark.parametrize(("name", "on", "advice"), REMEDIES)
def test_what_is_missing_has_one_command_or_none_that_can(name: str, on: str, advice: str) -> None:
    report = doctor(machine(on))
    parts = {each.name: each for each in (*report.backends, *report.runners)}
    found = parts[name]
    assert found.status is Status.MISSING
    assert found.advice.startswith(advice)
    assert bool(found.command) == found.advice.startswith("run: ")
    for each in (*report.backends, *report.runners):
        assert bool(each.reasons) == bool(each.advice) == (each.status is Status.MISSING), each
