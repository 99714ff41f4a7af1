"""Only platforms names vendor packages, properties of devices and environment variables."""

import ast
from collections.abc import Iterator
from pathlib import Path

import epcomm

PACKAGE = Path(epcomm.__file__).parent
MODULES = sorted(
    str(path.relative_to(PACKAGE))
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).parts[0] != "platforms"
)
# Functions that find or import a package by name, that query a device, and that read the
# environment.
WAYS_TO_PACKAGES = {"find_spec", "import_module", "__import__"}
PROPERTIES = {
    *("get_device_capability", "get_device_properties", "get_device_name"),
    *("multi_processor_count", "torch.cuda.is_available", "torch.npu"),
}
READS = {"environ", "getenv", "environment()"}
VENDORS = {"deep_ep", "deep_ep_cpp", "deep_gemm", "nvshmem", "nvidia", "pynvml", "torch_npu", "acl"}
# The names that each file may use, and why.
EXEMPT = {
    # This file reads the environment for all others.
    "config.py": {"environ", "environment()"},
    # This file reads the rank that torchrun sets.
    "bench/ranks.py": {"environment()"},
    # This file imports modules of this package by their names.
    "registry.py": {"import_module"},
    # This program replaces itself by another one, with its variables and one more path.
    "integrations/deep_ep/__main__.py": {"environment()"},
}


def test_modules_ask_platforms() -> None:
    found = {module: sorted(_named_by(module) - EXEMPT.get(module, set())) for module in MODULES}
    named = {module: names for module, names in found.items() if names}
    assert not named, "let a module of epcomm/platforms name them"


def _named_by(module: str) -> set[str]:
    return set(_named_in(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))))


def _named_in(tree: ast.AST) -> Iterator[str]:
    watched = WAYS_TO_PACKAGES | PROPERTIES | READS
    attributes = {name.rpartition(".")[2] for name in watched}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                roots = {name.name.partition(".")[0] for name in names}
                yield from roots & VENDORS
            case ast.ImportFrom(module=str(module), level=0):
                yield from {module.partition(".")[0]} & VENDORS
            case ast.Call(func=ast.Name(id="environment")):
                yield "environment()"
            case ast.Call(func=ast.Name(id=name)) if name in watched:
                yield name
            case ast.Attribute(attr=name) if name in attributes:
                yield from {name, ast.unparse(node)} & watched
