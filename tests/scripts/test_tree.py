"""The tree stays one that a reader can hold in mind: small folders, records and family trees."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

REPO = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "epcomm", "examples", "fakes", "scripts", "tests")
MOST_FILES, MOST_AT_THE_TOP = 15, 16
# Ancestors: of our own classes, in the longest chain above a class.
MOST_FIELDS, MOST_ANCESTORS = 15, 3


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


def test_no_record_has_too_many_fields() -> None:
    found = {name: _num_fields(node) for name, node in _classes().items()}
    large = {name: number for name, number in found.items() if number > MOST_FIELDS}
    assert "BufferCaps" in found
    assert not large


def test_no_class_inherits_too_deeply() -> None:
    classes = _classes()
    found = {name: _num_ancestors(name, classes) for name in classes}
    deep = {name: number for name, number in found.items() if number > MOST_ANCESTORS}
    assert found["CollectiveBuffer"] >= 2, "bases of other modules are counted"
    assert not deep


def test_a_chain_of_classes_and_the_fields_of_a_record_are_counted() -> None:
    source = """
class Root: ...
class Middle(Root, Generic[T]): ...
class Leaf(Middle[int], package.Foreign): ...
@dataclass(frozen=True)
class Record:
    shared: ClassVar[int]
    first: int
    second: int = 2
class NoRecord:
    first: int
"""
    classes = {node.name: node for node in _class_nodes(source)}
    numbers = {name: _num_ancestors(name, classes) for name in classes}
    assert numbers == {"Root": 0, "Middle": 1, "Leaf": 2, "Record": 0, "NoRecord": 0}
    assert _num_fields(classes["Record"]) == 2
    assert _num_fields(classes["NoRecord"]) == 0


def _classes() -> dict[str, ast.ClassDef]:
    """Return every class of the library by its name; names that begin with _ may repeat."""
    found = {}
    for path in sorted((REPO / "epcomm").rglob("*.py")):
        for node in _class_nodes(path.read_text("utf-8")):
            is_private = node.name.startswith("_") or node.name in found
            found[f"{path.stem}.{node.name}" if is_private else node.name] = node
    return found


def _class_nodes(source: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))


def _num_ancestors(name: str, classes: Mapping[str, ast.ClassDef]) -> int:
    """Return the number of our own classes above `name`, in the longest chain."""
    bases = (ast.unparse(base).split("[")[0] for base in classes[name].bases)
    own = [base for base in bases if base in classes]
    return max((1 + _num_ancestors(base, classes) for base in own), default=0)


def _num_fields(node: ast.ClassDef) -> int:
    """Return the number of fields that a dataclass declares itself; 0 for other classes."""
    if not any(ast.unparse(each).startswith("dataclass") for each in node.decorator_list):
        return 0
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return sum("ClassVar" not in ast.unparse(each.annotation) for each in fields)
