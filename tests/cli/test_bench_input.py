"""What `epcomm bench` refuses by what is around it: ranks of torchrun, packages, files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from epcomm.cli import app


def run(*arguments: str, **variables: str | None) -> Result:
    ranks = {"RANK": None, "WORLD_SIZE": None}
    return CliRunner().invoke(app, ["bench", *arguments], env={**ranks, **variables})


def test_ranks_of_torchrun_are_not_started_again() -> None:
    result = run("--ranks", "2", RANK="0", WORLD_SIZE="4")
    assert result.exit_code == 2
    assert "--ranks is 2, but torchrun has started 4; leave it out" in result.stderr


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--ranks", "2", "--plot", "plot.png")
    assert result.exit_code == 2
    assert "--plot needs matplotlib, which is not installed; run pip install" in result.stderr


def test_a_file_that_can_be_written_is_left_alone(tmp_path: Path) -> None:
    """The run fails later, on purpose."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    result = run("--ranks", "2", "--output", str(old), "--plot", str(new))
    assert result.exit_code == 2
    assert old.read_text() == "kept"
    assert not new.exists()
