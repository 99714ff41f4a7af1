"""Packages of the wheel have a docstring."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).parents[2]
# A folder that is put on sys.path, not a package.
SHIM = REPO / "epcomm/integrations/deep_ep/shim"


def test_packages_of_the_wheel_say_what_they_hold() -> None:
    folders = {path.parent for path in (REPO / "epcomm").rglob("*.py")} - {SHIM}
    assert {
        folder for folder in folders if not (folder / "__init__.py").read_text("utf-8")
    } == set()
