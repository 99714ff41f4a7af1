"""Bad input to `epcomm bench`: one line, exit code 2, and no rank is started."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import epcomm.cli.bench
from epcomm.cli import app


def run(*arguments: str, **variables: str | None) -> Result:
    ranks = {"RANK": None, "WORLD_SIZE": None}
    return CliRunner().invoke(app, ["bench", *arguments], env={**ranks, **variables})


@dataclass(frozen=True, kw_only=True)
class BadCall:
    id: str
    arguments: list[str]
    message: str


BAD_CALLS = [
    BadCall(
        id="no ranks",
        arguments=[],
        message="epcomm bench: there are no ranks; pass --ranks 4 to start some on the CPU, or",
    ),
    BadCall(
        id="ranks 0",
        arguments=["--ranks", "0"],
        message="epcomm bench: --ranks is 0, expected at least 1",
    ),
    BadCall(
        id="unknown backend",
        arguments=["--ranks", "2", "--backend", "collective,rdma"],
        message="backend is 'rdma', expected auto or one of ['ascend', 'collective', ",
    ),
    BadCall(
        id="unknown mode",
        arguments=["--ranks", "2", "--modes", "normal,fuseep"],
        message="epcomm bench: --modes is 'normal,fuseep', expected some of ['normal', ",
    ),
    BadCall(
        id="tokens 0",
        arguments=["--ranks", "2", "--tokens", "0,8"],
        message="epcomm bench: --tokens is 0,8, expected at least 1",
    ),
    BadCall(
        id="tokens that are no numbers",
        arguments=["--ranks", "2", "--tokens", "many"],
        message="epcomm bench: --tokens is 'many', expected numbers such as 1,128,1024",
    ),
    BadCall(
        id="no tokens",
        arguments=["--ranks", "2", "--tokens", ","],
        message="epcomm bench: --tokens names no number, expected such as 1,128,1024",
    ),
    BadCall(
        id="indivisible",
        arguments=["--ranks", "3"],
        message="epcomm bench: --experts is 32, expected a multiple of the 3 ranks",
    ),
    BadCall(
        id="top k",
        arguments=["--ranks", "2", "--experts", "4"],
        message="epcomm bench: --top-k is 8, expected at most the 4 experts; give fewer, or more",
    ),
    BadCall(
        id="dtype",
        arguments=["--ranks", "2", "--dtype", "fp4"],
        message="epcomm bench: --dtype is 'fp4', expected one of ['bf16', 'fp16', 'fp32']",
    ),
    BadCall(
        id="wire",
        arguments=["--ranks", "2", "--wire", "fp8"],
        message="epcomm bench: --wire is 'fp8', expected one of ['fp8_e4m3', 'int8']",
    ),
    BadCall(
        id="wire of a layer",
        arguments=["--ranks", "2", "--wire", "int8", "--layer"],
        message="epcomm bench: --wire is int8 with --layer, whose experts decide what travels",
    ),
    BadCall(
        id="warm-up",
        arguments=["--ranks", "2", "--warm-up", "-1"],
        message="epcomm bench: --warm-up is -1, expected at least 0",
    ),
    BadCall(
        id="no experts inside",
        arguments=["--ranks", "2", "--layer", "--intermediate", "0"],
        message="epcomm bench: --intermediate is 0, expected at least 1",
    ),
    BadCall(
        id="unwritable file",
        arguments=["--ranks", "2", "--output", "/dev/null/report.json"],
        message="epcomm bench: /dev/null/report.json cannot be written (",
    ),
    BadCall(
        id="no picture",
        arguments=["--ranks", "2", "--plot", "plot.mp3"],
        message="epcomm bench: --plot is 'plot.mp3', expected a name that ends in one of",
    ),
]


@pytest.mark.parametrize("call", BAD_CALLS, ids=lambda call: call.id)
def test_bad_input_ends_with_one_sentence_and_no_rank(
    call: BadCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*arguments: object) -> int:
        raise AssertionError("ranks are started")

    monkeypatch.setattr(epcomm.cli.bench, "start_ranks", started)
    result = run(*call.arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert call.message in result.stderr
    assert len(result.stderr.splitlines()) == 1


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
