"""README.md and docs/: code runs, generated parts are current, and quoted messages exist."""

from __future__ import annotations

import ast
import logging
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from epcomm import EPConfig, EPError, EPGroup, errors
from epcomm.buffers.base import AddsBias, Backend, Buffer, ExcludesRanks
from scripts.config_table import PAGE, fill
from tests.cases.docs_names import Given, shared_folder

REPO = Path(__file__).parents[1]
README, HELLO = REPO / "README.md", REPO / "examples" / "hello_ep.py"
# What is included from another file is tested there.
BLOCK = re.compile(r"```python\n(?!--8<--)(.*?)```", re.DOTALL)

PAGES = (README, *sorted((REPO / "docs").rglob("*.md")))
FILES = [str(path.relative_to(REPO)) for path in PAGES if BLOCK.search(path.read_text("utf-8"))]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Blocks of code below one heading."""

    title: str
    blocks: list[str]


def sections(path: str) -> Iterator[Section]:
    top, *parts = re.split(r"^## ", (REPO / path).read_text("utf-8"), flags=re.MULTILINE)
    for part in [f"{path}\n{top}", *parts]:
        blocks = BLOCK.findall(part)
        if blocks:
            yield Section(title=part.partition("\n")[0], blocks=blocks)


@pytest.mark.parametrize("path", FILES)
def test_code_imports_what_epcomm_has(path: str) -> None:
    for section in sections(path):
        for node in ast.walk(ast.parse("\n".join(section.blocks))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("epcomm"):
                module = import_module(str(node.module))
                missing = [a.name for a in node.names if not has(module, a.name)]
                assert not missing, section.title


def has(module: ModuleType, name: str) -> bool:
    """Tell whether a module has a name, or a module of that name below it."""
    if name in vars(module):
        return True
    try:
        import_module(f"{module.__name__}.{name}")
    except ModuleNotFoundError:
        return False
    return True


# Sections whose code does not run here, and why; that of all others does.
NOT_RUN = {
    ("README.md", "Hello"): "the test of the program below runs it",
    ("docs/backends/collective.md", "docs/backends/collective.md"): "wants MPI around the ranks",
    ("docs/checkpoints.md", "Large models"): "takes 45 GB of GPUs",
    ("docs/failures.md", "Going on without a dead rank"): "wants GPUs",
    ("docs/graphs.md", "What can be captured"): "wants GPUs",
    ("docs/observability.md", "Prometheus"): "writes into the system and serves HTTP",
    ("docs/training.md", "Copies of the experts"): "wants 8 GPUs",
    ("docs/transformers.md", "Trainer and accelerate"): "tests/integrations/test_trainer.py does",
}
SECTIONS = [(path, section) for path in FILES for section in sections(path)]
RUN = [each for each in SECTIONS if (each[0], each[1].title) not in NOT_RUN]


def test_sections_that_do_not_run_exist() -> None:
    assert {(path, section.title) for path, section in SECTIONS} >= NOT_RUN.keys()


# On 4 ranks this takes a tenth of the processor time of the quick tests.
@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("path", "section"), RUN, ids=[f"{path}: {section.title}" for path, section in RUN]
)
def test_code_runs(path: str, section: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    # A process group stands already.
    monkeypatch.setattr(dist, "init_process_group", lambda: None)
    level = logging.getLogger("epcomm").level
    with shared_folder() as folder, EPGroup() as group:
        given = Given(path, group, folder)
        names = {name: given.get(name) for name in sorted(given.names & read_by(section))}
        try:
            for code in section.blocks:
                exec(compile(code, path, "exec"), names)
            for name in [name for name in names if name.startswith("test_")]:
                names[name]("uneven")  # type: ignore[operator]
        finally:
            logging.getLogger("epcomm").setLevel(level)
            if "registration" in names:
                names["registration"].close()  # type: ignore[attr-defined]


def read_by(section: Section) -> set[str]:
    """Return the names that the code of a section reads, its own among them."""
    nodes = ast.walk(ast.parse("\n".join(section.blocks)))
    return {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}


@pytest.mark.ranks(4)
def test_the_readmes_program_prints_what_the_readme_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A process group stands already, and outlives the program.
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    text = README.read_text("utf-8")
    assert HELLO.read_text("utf-8") in text
    runpy.run_path(str(HELLO))
    lines = re.findall(r"^(?:rank|mode) .*", text.split("`torchrun", 1)[1], re.MULTILINE)
    rank = dist.get_rank()
    mine = [x for x in lines if x.startswith(f"rank {rank}:") or (rank == 0 and x[:4] == "mode")]
    assert capsys.readouterr().out.splitlines() == mine


def test_the_page_for_authors_of_backends_names_every_part_of_the_contract() -> None:
    text = (REPO / "docs" / "backends" / "adding.md").read_text("utf-8")
    named = {name for span in re.findall(r"`(.*?)`", text) for name in re.findall(r"\w+", span)}
    parts = {
        name
        for base in (Backend, Buffer, AddsBias, ExcludesRanks)
        for name in (*vars(base), *base.__annotations__)
        if not name.startswith("_")
    }
    assert parts <= named, parts - named


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_links_of_pages_outside_the_site_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (REPO / page).read_text("utf-8"))
    missing = [link for link in links if not (REPO / page).parent.joinpath(link).exists()]
    assert not missing


def test_the_table_of_the_configuration_is_current() -> None:
    text = PAGE.read_text("utf-8")
    assert fill(text) == text, "run: python -m scripts.config_table"
    assert all(f"| `{field.name}` |" in text for field in fields(EPConfig))


def test_every_error_and_no_other_message_is_explained() -> None:
    text = (REPO / "docs" / "troubleshooting.md").read_text("utf-8")
    own = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, EPError)}
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    tables = {part.partition("\n")[0]: part for part in parts}
    assert own <= tables.keys()
    for title in own:
        messages = re.findall(r"^\| `(.*?)` \|", tables[title], re.MULTILINE)
        assert messages, title
        for message in messages:
            pieces = [re.escape(piece) for piece in message.strip("… ").split("…")]
            assert re.search(".*".join(pieces), strings_of_epcomm()), (title, message)


@cache
def strings_of_epcomm() -> str:
    """Return each string of the sources on a line of its own, `…` in place of what is computed."""
    found = []
    for path in (REPO / "epcomm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in found)
