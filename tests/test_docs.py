"""Code in README.md and docs/ can be pasted: every name in it is imported, made or said.

A name is said where the words around the code, in its section or at the top of the file, have it as
`name`, or a comment of the code begins with `name:`. What epcomm has is imported in each block.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parents[1]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
# Modules whose names are to be imported where they are used.
PUBLIC = ("", ".training.gradients", ".sharding", ".stats", ".moe")
SAID_IN_WORDS = re.compile(r"`([a-z_]+)`")
SAID_IN_COMMENT = re.compile(r"[#,] *([a-z_]+):")


FILES = [
    str(path.relative_to(REPO))
    for path in (REPO / "README.md", *sorted((REPO / "docs").glob("*.md")))
    if BLOCK.search(path.read_text())
]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Blocks of code below one heading. words: around them, and at the top of the file."""

    title: str
    blocks: list[str]
    words: str


def sections(path: str) -> Iterator[Section]:
    top, *parts = re.split(r"^## ", (REPO / path).read_text(), flags=re.MULTILINE)
    for part in parts:
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
                found = vars(import_module(str(node.module)))
                assert {alias.name for alias in node.names} <= found.keys()
