import importlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from epcomm import ConfigError
from epcomm.integrations import deep_ep as drop_in
from epcomm.integrations.deep_ep import install
from epcomm.integrations.deep_ep.__main__ import command_of
from epcomm.integrations.deep_ep.installing import SHIM
from epcomm.platforms.deep_ep import DeepEPKind, find_deep_ep
from fakes.deep_ep import install as install_stand_in

REPO = Path(__file__).parents[3]
_NAMES = ("deep_ep", "deep_ep_cpp")
# Seconds: several processes import torch on a loaded machine.
LIMIT_S = 200
# A program looks for deep_ep before it imports it, in spawned workers and in a new process.
PROGRAM = """
import multiprocessing, subprocess, sys
from importlib import metadata
from importlib.util import find_spec

def look(queue):
    from deep_ep.utils import EventHandle
    import deep_ep
    queue.put((metadata.version("deep_ep"), deep_ep.Buffer.__module__, EventHandle.__module__))

if __name__ == "__main__":
    assert find_spec("deep_ep") is not None
    assert "deep_ep" not in sys.modules
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=look, args=(queue,))
    worker.start()
    print(*queue.get(), *sys.argv[1:])
    worker.join()
    find = "from importlib.util import find_spec; print(find_spec('deep_ep').name)"
    subprocess.run([sys.executable, "-c", find], check=True)
"""


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in _NAMES]:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_installed_as_a_package_with_a_version() -> None:
    install()
    spec = find_spec("deep_ep")
    assert spec.origin is not None
    assert metadata.version("deep_ep") == "2.1.0+epcomm"
    deep_ep = importlib.import_module("deep_ep")
    assert deep_ep.Buffer is drop_in.Buffer
    assert deep_ep.__version__ == "2.1.0+epcomm"
    install()
    assert sys.path.count(str(SHIM)) == 1


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("deep_ep", "get_physical_domain_size get_logical_domain_size topk_idx_t"),
        ("deep_ep._C", "Config EventHandle topk_idx_t"),
        ("deep_ep_cpp", "Config EventHandle topk_idx_t"),
        ("deep_ep.buffer", "Buffer Config"),
        ("deep_ep.buffers.legacy", "Buffer"),
        ("deep_ep.buffers.elastic", "ElasticBuffer EPHandle"),
        ("deep_ep.utils", "EventHandle EventOverlap"),
        ("deep_ep.utils.event", "EventHandle EventOverlap"),
    ],
)
def test_modules_of_deep_ep_have_the_names_that_programs_import(module: str, names: str) -> None:
    install()
    imported = importlib.import_module(module)
    for name in names.split():
        assert getattr(imported, name) is getattr(drop_in, name, getattr(imported, name))


def test_the_drop_in_is_no_backend_for_itself() -> None:
    install()
    found = find_deep_ep()
    assert found.kind is DeepEPKind.DROP_IN


def test_refused_beside_a_real_one_and_after_an_import() -> None:
    with install_stand_in("v1"), pytest.raises(ConfigError, match="was imported already, from"):
        install()


def test_refused_beside_a_real_one_unless_told(tmp_path: Path) -> None:
    package = tmp_path / "deep_ep"
    package.mkdir()
    (package / "__init__.py").write_text("class Buffer: ...\n", "utf-8")
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"a deep_ep is installed, V1, .*replace=True"):
        install()
    install(replace=True)
    assert importlib.import_module("deep_ep").Buffer is drop_in.Buffer


@pytest.mark.parametrize("client", ["megatron.core.fused_a2a", "sglang.token_dispatcher.deepep"])
def test_told_when_it_comes_too_late(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, client, ModuleType(client))
    with pytest.raises(ConfigError, match=f"{client} was imported already"):
        install()


def test_modules_of_a_program_may_name_deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "serving.bench_deep_ep"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    install()
    assert importlib.import_module("deep_ep").Buffer is drop_in.Buffer


def test_commands_are_files_modules_or_programs(tmp_path: Path) -> None:
    program = tmp_path / "serve.py"
    program.touch()
    assert command_of([str(program), "-x"]) == [sys.executable, str(program), "-x"]
    assert command_of(["-m", "serve"]) == [sys.executable, "-m", "serve"]
    assert command_of(["env", "-u"])[1:] == ["-u"]
    with pytest.raises(ConfigError, match="is neither a file nor a command"):
        command_of(["no-such-program"])


@pytest.mark.slow
def test_a_distribution_holds_the_same_package(tmp_path: Path) -> None:
    # A copy, because a build leaves files next to the sources.
    package, shim = Path("packages/deep_ep"), SHIM.relative_to(REPO)
    for folder in (package, shim):
        shutil.copytree(REPO / folder, tmp_path / folder)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--wheel-dir", str(tmp_path), str(tmp_path / package)]
    subprocess.run(command, timeout=LIMIT_S, check=True)
    with zipfile.ZipFile(tmp_path / "deep_ep-2.1.0+epcomm-py3-none-any.whl") as wheel:
        sources = {each.relative_to(SHIM).as_posix(): each for each in SHIM.rglob("*.py")}
        assert "deep_ep/__init__.py" in sources
        for name, source in sources.items():
            assert wheel.read(name) == source.read_bytes()
        built = wheel.read("deep_ep-2.1.0+epcomm.dist-info/METADATA").decode().splitlines()
    said = (SHIM / "deep_ep-2.1.0+epcomm.dist-info" / "METADATA").read_text("utf-8").splitlines()
    assert {"Name: deep_ep", "Version: 2.1.0+epcomm"} <= set(built) & set(said)
    assert "Requires-Dist: epcomm" in built


@pytest.mark.slow
def test_a_program_and_its_processes_find_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, "utf-8")
    command = [sys.executable, "-m", "epcomm.integrations.deep_ep", str(program), "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    buffer, events = "epcomm.integrations.deep_ep.v1.buffer", "epcomm.integrations.deep_ep.events"
    assert done.stdout.split() == ["2.1.0+epcomm", buffer, events, "--port", "1", "deep_ep"]
