"""README.md and docs/: code can be pasted, what is made is current, and messages exist.

Every name in a block of code is imported, made or said. A name is said where the words around the
code, in its section or at the top of the file, have it as `name`, or a comment of the code begins
with `name:`. What epcomm has is imported in each block.
"""

from __future__ import annotations

import ast
import builtins
import logging
import re
import runpy
import symtable
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from epcomm import EPConfig, EPError, EPGroup, errors
from scripts.config_table import PAGE, fill
from tests.cases.docs_names import Given, shared_folder

REPO = Path(__file__).parents[1]
README, HELLO = REPO / "README.md", REPO / "examples" / "hello_ep.py"
# What is included from another file is tested there.
BLOCK = re.compile(r"```python\n(?!--8<--)(.*?)```", re.DOTALL)
# Modules whose names are to be imported where they are used.
PUBLIC = ("", ".training.gradients", ".sharding", ".stats", ".moe")
SAID_IN_WORDS = re.compile(r"`([a-z_]+)`")
SAID_IN_COMMENT = re.compile(r"[#,;] *([a-z_]+):")
MOST_README_LINES = 150

PAGES = (README, *sorted((REPO / "docs").rglob("*.md")))
FILES = [str(path.relative_to(REPO)) for path in PAGES if BLOCK.search(path.read_text("utf-8"))]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Blocks of code below one heading. words: around them, and at the top of the file."""

    title: str
    blocks: list[str]
    words: str


def sections(path: str) -> Iterator[Section]:
    top, *parts = re.split(r"^## ", (REPO / path).read_text("utf-8"), flags=re.MULTILINE)
    for part in [f"{path}\n{top}", *parts]:
        blocks = BLOCK.findall(part)
        if blocks:
            words = BLOCK.sub("", top) + BLOCK.sub("", part)
            yield Section(title=part.partition("\n")[0], blocks=blocks, words=words)


def names_of(code: str) -> tuple[set[str], set[str]]:
    """Return the names that a block makes, and those that it needs from outside."""
    made, needed = set(), set()
    tables = [symtable.symtable(code, "block", "exec")]
    for table in tables:
        tables += table.get_children()
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            if is_module and (symbol.is_assigned() or symbol.is_imported()):
                made.add(symbol.get_name())
            elif symbol.is_referenced() and (is_module or symbol.is_global()):
                needed.add(symbol.get_name())
    return made, needed - made


@pytest.mark.parametrize("path", FILES)
def test_code_imports_makes_or_names_all_that_it_uses(path: str) -> None:
    public = {name for part in PUBLIC for name in names_in(part)}
    for section in sections(path):
        known = set(vars(builtins))
        for code in section.blocks:
            made, needed = names_of(code)
            assert not needed & public, (section.title, needed & public)
            said = set(SAID_IN_WORDS.findall(section.words)) | set(SAID_IN_COMMENT.findall(code))
            assert needed <= known | said, (section.title, needed - known - said)
            known |= made


def names_in(part: str) -> list[str]:
    module = vars(import_module(f"epcomm{part}"))
    return [name for name, value in module.items() if not isinstance(value, ModuleType)]


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


def test_the_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= MOST_README_LINES


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
