"""Commands that README.md, CONTRIBUTING.md and docs/ show exist, and configurations are read.

Plans run, unless they read a file that only a reader has. Of commands that install, inspect the
machine or start ranks, and of commands in sentences, only the words are checked: options of epcomm,
targets of make, modules, files. tests/test_wheel.py runs the README's.
"""

import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from epcomm import EPConfig
from epcomm.cli import app

REPO = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "examples/README.md")
PAGES += tuple(sorted(str(path.relative_to(REPO)) for path in (REPO / "docs").rglob("*.md")))
BLOCK = re.compile(r"^```(?P<kind>.*)\n(?P<text>(?s:.*?))^```$", re.MULTILINE)
CONFIGURATIONS = ("toml", "yaml", "json")
# A file that the reader has but the repository does not.
OF_THE_READER = re.compile(r" (\w+\.(?:json|yaml|toml))\b")
# Commands within a sentence; what is in capitals, as FILE, stands for a word of the reader's.
IN_WORDS = re.compile(
    r"`((?:epcomm (?:plan|doctor|bench|load)|python -m|make|pip|torchrun|scripts/|MULTI_RANK)\b"
    r"[^`]*)`"
)
FOR_THE_READER = re.compile(r"\b(?:FILE|path/to)\b")
VARIABLE = re.compile(r"[A-Z_]+=")


def blocks(page: str) -> Sequence[tuple[str, str]]:
    found = BLOCK.finditer((REPO / page).read_text("utf-8"))
    return [(each["kind"], each["text"]) for each in found]


def in_blocks(page: str) -> list[str]:
    texts = [text.replace("\\\n", " ") for kind, text in blocks(page) if kind == "sh"]
    lines = [line for text in texts for line in text.splitlines()]
    return [bare(part) for line in lines for part in re.split(r"&&|\|\|", line)]


def in_words(page: str) -> list[str]:
    words = BLOCK.sub("", (REPO / page).read_text("utf-8"))
    return [bare(line) for line in IN_WORDS.findall(words) if not FOR_THE_READER.search(line)]


def bare(command: str) -> str:
    words = shlex.split(command, comments=True)
    return shlex.join(word for word in words if not VARIABLE.match(word))


def check_epcomm(words: Sequence[str]) -> None:
    name, *options = words
    group = typer.main.get_command(app)
    group.commands[name].make_context(name, options)  # type: ignore[attr-defined]


def check_python(words: Sequence[str]) -> None:
    option, module, *rest = words
    assert option == "-m"
    if module == "epcomm" and rest:
        check_epcomm(rest)
        return
    assert find_spec(module), module
    check_files(rest)


def check_files(words: Sequence[str]) -> None:
    """Check that the files of a command exist, except in folders that begin with a dot."""
    names = [word for word in words if "/" in word and word[0] not in ".-"]
    missing = [name for name in names if not (REPO / name).exists()]
    assert not missing


def check_torchrun(words: Sequence[str]) -> None:
    words = words[words.index("--nproc-per-node") + 2 :]
    (check_python if words[0] == "-m" else check_files)(words)


def check_make(words: Sequence[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert set(words) <= set(targets)


def check_pip(words: Sequence[str]) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
    extras = re.findall(r"\[(\w+)\]", " ".join(words))
    assert set(extras) <= set(project["optional-dependencies"])
    if "-c" in words:
        assert (REPO / words[words.index("-c") + 1]).is_file()


CHECKS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "epcomm": check_epcomm,
    "python": check_python,
    "python3": check_python,
    "torchrun": check_torchrun,
    "make": check_make,
    "pip": check_pip,
    ".": check_files,
    "scripts/launch_multi_rank.sh": check_files,
    ".venv/bin/pytest": check_files,
}

SHOWN = {
    command: page
    for page in PAGES
    for command in (*in_blocks(page), *in_words(page))
    if command.partition(" ")[0] in CHECKS
}
RUN = {
    command: page
    for page in PAGES
    for command in in_blocks(page)
    if command.startswith("epcomm plan") and not OF_THE_READER.search(command)
}


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_configurations_are_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"config.{kind}"
    for page in PAGES:
        for text in (text for found, text in blocks(page) if found == kind):
            path.write_text(text, encoding="utf-8")
            assert EPConfig.from_file(path) != EPConfig(), page


@pytest.mark.parametrize(("command", "page"), SHOWN.items(), ids=[*SHOWN])
def test_commands_exist(
    command: str, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *words = shlex.split(command)
    monkeypatch.chdir(tmp_path)
    for name in OF_THE_READER.findall(command):
        (tmp_path / name).touch()
    CHECKS[program](words)


@pytest.mark.parametrize(("command", "page"), RUN.items(), ids=[*RUN])
def test_commands_run(command: str, page: str) -> None:
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, (page, done.output)
