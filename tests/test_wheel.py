"""The wheel holds the package alone, and is imported where nothing but torch is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
SOURCES = ("epcomm", "fakes", "tests", "pyproject.toml", "README.md", "LICENSE")

PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed.device_mesh, torch.utils.checkpoint
before = set(sys.modules)
import epcomm
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"file": epcomm.__file__, "added": sorted(added)}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy: setuptools leaves folders beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "sources"
    copy.mkdir()
    for name in SOURCES:
        source = REPO / name
        if source.is_dir():
            shutil.copytree(
                source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results")
            )
        else:
            shutil.copy(source, copy)
    _pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder), str(copy))
    (found,) = folder.glob("epcomm-*.whl")
    return found


@pytest.mark.slow
def test_wheel_holds_the_package_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    in_package = {name for name in names if name.startswith("epcomm/")}
    others = {name.partition("/")[0] for name in set(names) - in_package}
    assert {name.partition("-")[0] for name in others} == {"epcomm"}, "metadata alone"
    files = {
        path.relative_to(REPO).as_posix()
        for path in (REPO / "epcomm").rglob("*")
        if path.suffix in (".py", ".cu", ".typed")
    }
    assert in_package == files
    assert not [name for name in names if "fake" in name.lower() or "tests/" in name]


@pytest.mark.slow
def test_installed_wheel_imports_nothing_but_itself(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    _pip("install", "--target", str(target), str(wheel))
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROBE, str(target)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(target)
    # tomllib reads configurations; nothing else comes with it.
    assert set(found["added"]) <= {"epcomm", "tomllib"}


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, *arguments[1:]], capture_output=True, text=True, check=False, cwd=REPO.parent
    )
    assert done.returncode == 0, done.stderr
