"""Wheel and sdist contain only the package, which runs in a fresh environment outside the
repository.

The environment has the dependencies of the environment that runs the tests, so nothing is
downloaded.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from epcomm.registry import BUFFERS

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[1]
HELLO = REPO / "examples" / "hello_ep.py"
FOLDERS = ("epcomm", "fakes", "tests", "examples")
FILES = ("pyproject.toml", "MANIFEST.in", "constraints.txt", "README.md", "LICENSE")
# Files that setuptools adds to every sdist.
OF_SETUPTOOLS = {"PKG-INFO", "setup.cfg"}
DEPENDENCIES = ("torch", "numpy", "typer", "rich")
# No other variables are passed to a program: PYTHONPATH has the repository, RANK a launcher.
VARIABLES = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")
# Seconds: ranks import torch on a loaded machine.
LIMIT_S = 300

TINY = ["--tokens", "2,8", "--hidden", "32", "--experts", "4", "--top-k", "2"]
QUICK = ["--iterations", "2", "--warm-up", "1"]


@dataclass(frozen=True, kw_only=True)
class Built:
    """The distributions built from the sources."""

    wheel: Path
    sdist: Path


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment with the wheel, and a folder in which its programs run."""

    root: Path
    folder: Path

    def run(self, program: str, *arguments: str) -> str:
        """Run a program of the environment, which must exit with 0, and return its output."""
        variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        done = subprocess.run(
            [str(self.root / "bin" / program), *arguments],
            cwd=self.folder,
            env={**variables, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build from a copy, because setuptools leaves folders next to the sources."""
    folder = tmp_path_factory.mktemp("built")
    copy = folder / "sources"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(REPO / name, copy / name, ignore=ignored)
    for name in FILES:
        shutil.copy(REPO / name, copy)
    make_sdist = "import sys, setuptools.build_meta as s; s.build_sdist(sys.argv[1])"
    _python("-c", make_sdist, str(folder), cwd=copy)
    _pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder), str(copy))
    (wheel,), (sdist,) = folder.glob("epcomm-*.whl"), folder.glob("epcomm-*.tar.gz")
    return Built(wheel=wheel, sdist=sdist)


@pytest.fixture(scope="module")
def fresh(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    root = tmp_path_factory.mktemp("fresh")
    _python("-m", "venv", "--without-pip", str(root), cwd=root)
    (packages,) = root.glob("lib/python*/site-packages")
    # A folder from a .pth file is searched last, and its own .pth files, for example of `pip
    # install -e`, are not read. So epcomm is imported from the wheel or not at all.
    origins = [str(found.origin) for name in DEPENDENCIES if (found := find_spec(name))]
    borrowed = dict.fromkeys(str(Path(origin).parents[1]) for origin in origins)
    (packages / "dependencies.pth").write_text("\n".join(borrowed), encoding="utf-8")
    _pip("--python", str(root / "bin" / "python"), "install", str(built.wheel))
    return Environment(root=root, folder=tmp_path_factory.mktemp("elsewhere"))


def test_wheel_holds_the_package_alone(built: Built) -> None:
    names = zipfile.ZipFile(built.wheel).namelist()
    in_package = {name for name in names if name.startswith("epcomm/")}
    others = {name.partition("/")[0] for name in set(names) - in_package}
    assert {name.partition("-")[0] for name in others} == {"epcomm"}, "metadata alone"
    assert in_package == files_of_the_package()
    assert not [name for name in names if "fake" in name.lower() or "tests/" in name]


def test_sdist_holds_what_the_readme_needs_and_builds_a_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        files = [Path(each.name) for each in archive.getmembers() if each.isfile()]
    names = {path.relative_to(path.parts[0]).as_posix() for path in files}
    names = {name for name in names if not name.startswith("epcomm.egg-info/")}
    assert names - OF_SETUPTOOLS == files_of_the_package() | {*FILES, "examples/hello_ep.py"}
    _pip("wheel", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(built.sdist))
    (again,) = tmp_path.glob("epcomm-*.whl")
    assert contents(again) == contents(built.wheel)


def files_of_the_package() -> set[str]:
    paths = (REPO / "epcomm").rglob("*")
    kinds = (".py", ".cu", ".typed")
    files = {
        path.relative_to(REPO).as_posix()
        for path in paths
        # The version of the replacement for deep_ep.
        if path.suffix in kinds or path.name == "METADATA"
    }
    assert any(name.endswith(".cu") for name in files)
    return files


def contents(wheel: Path) -> Mapping[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_hello_runs_on_four_ranks(fresh: Environment) -> None:
    found = fresh.run("python", "-c", "import epcomm; print(epcomm.__file__)")
    assert Path(found.strip()).is_relative_to(fresh.root)
    shutil.copy(HELLO, fresh.folder)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    printed = fresh.run("python", *launcher, HELLO.name)
    ranks = re.findall(r"^rank (\d): \d+ tokens match", printed, re.MULTILINE)
    assert sorted(ranks) == ["0", "1", "2", "3"]


def test_doctor_lists_every_backend(fresh: Environment) -> None:
    printed = fresh.run("epcomm", "doctor", "--verbose")
    assert all(re.search(rf"^\W*{name}\b", printed, re.MULTILINE) for name in BUFFERS)
    assert re.search(r"^\W*collective\W+here\b", printed, re.MULTILINE)


def test_bench_starts_ranks_prints_and_writes(fresh: Environment) -> None:
    output, plot = fresh.folder / "bench.json", fresh.folder / "bench.png"
    files = ["--output", str(output), "--plot", str(plot)]
    lines = fresh.run("epcomm", "bench", "--ranks", "2", *TINY, *QUICK, *files).splitlines()
    assert lines[0] == "2 ranks on cpu over gloo, H = 32, top-2 of 4, bf16"
    assert lines[-1].startswith("Take mode ")
    rows = [line for line in lines if " collective " in line and line.split()[0] in ("2", "8")]
    assert len(rows) >= 4, "two modes at two T"
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = json.loads(output.read_text("utf-8"))
    assert report["wrong"] == []
    assert report["advice"] == lines[-1]
    assert report["command"].startswith("epcomm bench --ranks 2 --tokens 2,8 ")
    assert {"torch", "epcomm", "commit"} <= set(report["versions"])
    timed = {(each["mode"], each["backend"], each["tokens"]) for each in report["results"]}
    assert {("normal", "collective", 2), ("", "expert_rows", 8)} <= timed


def _pip(*arguments: str) -> None:
    _python("-m", "pip", *arguments, "--quiet", "--no-deps", "--no-index", cwd=REPO.parent)


def _python(*arguments: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stdout + done.stderr
