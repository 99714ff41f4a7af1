"""The tree stays one that a reader can hold in mind: few modules at the top, few files a folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

REPO = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "epcomm", "examples", "fakes", "scripts", "tests")
MOST_FILES, MOST_AT_THE_TOP = 15, 16


def test_no_folder_has_too_many_files() -> None:
    files = [path for folder in FOLDERS for path in (REPO / folder).rglob("*.*")]
    sources = Counter(path.parent for path in files if path.suffix in (".py", ".cu"))
    limits = {REPO / "epcomm": MOST_AT_THE_TOP}
    crowded = {
        str(folder.relative_to(REPO)): number
        for folder, number in sources.items()
        if number > limits.get(folder, MOST_FILES)
    }
    assert sources[REPO / "epcomm"] > 0
    assert not crowded


def test_packages_of_the_wheel_say_what_they_hold() -> None:
    folders = {path.parent for path in (REPO / "epcomm").rglob("*.py")}
    assert {
        folder for folder in folders if not (folder / "__init__.py").read_text("utf-8")
    } == set()
