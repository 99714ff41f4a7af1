import ast
import logging
import re
import runpy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from epcomm import EPGroup
from scripts import config_table, format_errors, same_bits_table
from tests.cases.docs_names import names_of
from tests.cases.shared_folder import shared_folder

REPO = Path(__file__).parents[1]
README, HELLO = REPO / "README.md", REPO / "examples" / "hello_ep.py"
# "``` { .python }" marks code that cannot run here; code included from a file is tested there.
BLOCK = re.compile(r"^```( \{ \.)?python(?: \})?\n(?!--8<--)(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Section:
    """The code blocks of one heading: all blocks, and those that run."""

    page: str
    title: str
    shown: list[str]
    run: list[str]


def sections() -> list[Section]:
    found = []
    for path in (README, *sorted((REPO / "docs").rglob("*.md"))):
        page = str(path.relative_to(REPO))
        for part in re.split(r"^## ", path.read_text("utf-8"), flags=re.MULTILINE):
            blocks = BLOCK.findall(part)
            shown = [code for _, code in blocks]
            # Another test runs the README's program.
            run = [code for mark, code in blocks if not mark and code != HELLO.read_text("utf-8")]
            title = part.partition("\n")[0]
            found.append(Section(page=page, title=title, shown=shown, run=run))
    return [each for each in found if each.shown]


SECTIONS = sections()
RUN = [section for section in SECTIONS if section.run]


def test_code_imports_what_epcomm_has() -> None:
    for section in SECTIONS:
        for node in ast.walk(ast.parse("\n".join(section.shown))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("epcomm"):
                module = import_module(str(node.module))
                missing = [a.name for a in node.names if not has(module, a.name)]
                assert not missing, (section.page, section.title)


def has(module: ModuleType, name: str) -> bool:
    if name in vars(module):
        return True
    try:
        import_module(f"{module.__name__}.{name}")
    except ModuleNotFoundError:
        return False
    return True


# On 4 ranks this takes a tenth of the CPU time of the quick tests.
@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("section", RUN, ids=lambda each: f"{each.page}: {each.title}")
def test_code_runs(section: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    # The test already has a process group.
    monkeypatch.setattr(dist, "init_process_group", lambda: None)
    level = logging.getLogger("epcomm").level
    nodes = ast.walk(ast.parse("\n".join(section.run)))
    read = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
    with shared_folder() as folder, EPGroup() as group:
        given = names_of(section.page, group, folder)
        names = {name: given[name]() for name in sorted(given.keys() & read)}
        try:
            for code in section.run:
                exec(compile(code, section.page, "exec"), names)
            for name in [name for name in names if name.startswith("test_")]:
                names[name]("uneven")  # type: ignore[operator]
        finally:
            logging.getLogger("epcomm").setLevel(level)
            if "registration" in names:
                names["registration"].close()  # type: ignore[attr-defined]


@pytest.mark.ranks(4)
def test_the_readmes_program_prints_what_the_readme_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The test already has a process group, which the program must not destroy.
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    text = README.read_text("utf-8")
    assert HELLO.read_text("utf-8") in text
    runpy.run_path(str(HELLO))
    shown = re.findall(r"^(?:rank \d:|mode \w+ on backend) .*", text, re.MULTILINE)
    rank = dist.get_rank()
    mine = [x for x in shown if x.startswith(f"rank {rank}:") or (rank == 0 and x[:4] == "mode")]
    assert capsys.readouterr().out.splitlines() == mine


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_links_of_pages_outside_the_site_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (REPO / page).read_text("utf-8"))
    missing = [link for link in links if not (REPO / page).parent.joinpath(link).exists()]
    assert not missing


@pytest.mark.parametrize(
    "script", [config_table, format_errors, same_bits_table], ids=lambda each: each.__name__
)
def test_generated_tables_are_current(script: ModuleType) -> None:
    text = script.PAGE.read_text("utf-8")
    assert script.fill(text) == text, f"run: python -m {script.__name__}"
