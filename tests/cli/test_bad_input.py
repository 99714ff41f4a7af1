"""Bad input to every command: one line on stderr, exit code 2, and no rank is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

import epcomm.cli.bench
from epcomm.cli import app
from epcomm.types import MAX_RANKS

LAYER = ["--hidden-size", "64", "--num-experts", "8", "--top-k", "2", "--ranks", "4"]
PLAN = ["plan", *LAYER]
BENCH = ["bench", "--ranks", "2"]
# Lists in lists, of which every parser gives up.
DEEP = "[" * 100_000


@dataclass(frozen=True, kw_only=True)
class BadCall:
    """A command and what it says.

    arguments: FOLDER stands for the one with `files`, by name to text or bytes.
    """

    id: str
    arguments: list[str]
    message: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)


# Of plan, doctor and bench alike: what typer reads.
OPTIONS = [
    BadCall(
        id=f"{command}: {' '.join(text)}",
        arguments=[command, *text],
        message=f"epcomm {command}: {message}",
    )
    for command in ("plan", "doctor", "bench")
    for text, message in (
        (["--no-such-option"], "No such option: --no-such-option"),
        (["--ranks", "many"], "Invalid value for '--ranks'"),
        (["--ranks"], "Option '--ranks' requires an argument"),
    )
    if command != "doctor" or text[0] != "--ranks"
]
HUGE = [
    BadCall(
        id=f"{command[0]} {option}, {len(str(value))} digits",
        arguments=[*command, option, str(value)],
        message=message if option != "--ranks" else f"{MAX_RANKS}",
    )
    for command, options in (
        (PLAN, ("--hidden-size", "--num-experts", "--top-k", "--ranks")),
        (PLAN, ("--intermediate-size", "--max-tokens", "--max-recv-slots")),
        (BENCH, ("--hidden", "--experts", "--tokens", "--iterations", "--warm-up", "--ranks")),
        ([*BENCH, "--layer"], ("--intermediate",)),
    )
    for option in options
    for value, message in ((10**400, f" is {10**79}..., "),)
]
# The parts of a report that are its measurement; NUMBERS: of tokens, and of microseconds.
REPORT = (
    '{"benchmark": "epcomm bench", "configuration": {"ranks": 2, "device": "cpu", "hidden": 64, '
    '"top_k": 2, "experts": 8}, "results": [{"mode": "normal", "backend": "collective", '
    '"tokens": %s, "us": {"pair": {"p50": %s}}}]}'
)
MEASUREMENTS = [
    BadCall(
        id=f"measurements: {text[-40:]}",
        arguments=[*PLAN, "--measurements", "FOLDER/bench.json"],
        message=f"which is no such report ({message}",
        files={"bench.json": text},
    )
    for text, message in (
        (REPORT % ("Infinity", "3.0"), "ValueError: tokens inf, expected 1 to"),
        (REPORT % ("NaN", "3.0"), "ValueError: tokens nan, expected 1 to"),
        (REPORT % ("9" * 400, "3.0"), "ValueError: tokens 999"),
        (REPORT % ("true", "3.0"), "ValueError: tokens True, expected 1 to"),
        (REPORT % ("8", "Infinity"), "ValueError: tokens 8 in inf us"),
        (REPORT % ("8", "NaN"), "ValueError: tokens 8 in nan us"),
        (REPORT % ("8", "9" * 400), "ValueError: tokens 8 in 999"),
        (DEEP, "it is nested too deeply"),
    )
]
PLANS = [
    BadCall(
        id="an expert whose bytes overflow",
        arguments=[*PLAN, "--hidden-size", "2147483647", "--intermediate-size", "2147483647"],
        message="epcomm plan: an expert of hidden_size 2147483647 and intermediate_size 21474836",
    ),
    BadCall(
        id="unknown mode",
        arguments=[*PLAN, "--mode", "fast"],
        message="EPConfig: mode is 'fast', expected one of",
    ),
    BadCall(
        id="experts of an unknown kind",
        arguments=[*PLAN, "--experts", "int4"],
        message="epcomm plan: experts is 'int4', expected bf16, as the hidden states are, or one "
        "of ['fp8', 'int8']",
    ),
    BadCall(
        id="experts without a size",
        arguments=[*PLAN, "--experts", "int8"],
        message="epcomm plan: experts is int8, but their size is in neither an option nor a "
        "--model file; pass --intermediate-size",
    ),
    BadCall(
        id="no size",
        arguments=["plan", *LAYER[2:]],
        message="epcomm plan: hidden_size is in neither an option nor a --model file; pass "
        "--hidden-size",
    ),
    BadCall(
        id="dtype",
        arguments=[*PLAN, "--dtype", "tf32"],
        message="epcomm plan: dtype is 'tf32', expected one of ['bf16', 'bfloat16',",
    ),
    BadCall(
        id="ranks 0",
        arguments=["plan", *LAYER[:-1], "0"],
        message="epcomm plan: Invalid value for '--ranks'",
    ),
    BadCall(
        id="unknown backend",
        arguments=[*PLAN, "--backend", "rdma"],
        message="EPConfig: backend is 'rdma', expected auto or one of ['ascend', ",
    ),
    BadCall(
        id="unknown device",
        arguments=[*PLAN, "--device", "h2o"],
        message="epcomm plan: --device is 'h2o', expected one of ['h100', 'h200', 'b200', 'cpu']",
    ),
    BadCall(
        id="no measurements",
        arguments=[*PLAN, "--measurements", "FOLDER/bench.json"],
        message="which is no such report (KeyError: 'benchmark')",
        files={"bench.json": "{}"},
    ),
]
FILES = [
    BadCall(
        id=f"{option}: {name}, {text!r:.60}",
        arguments=[*([*PLAN] if option == "--config" else ["plan"]), option, f"FOLDER/{name}"],
        message=message,
        files={} if text is None else {name: text},
    )
    for option, name, text, message in (
        ("--config", "no.toml", None, "does not exist"),
        ("--config", "ep.toml", "mode = \n", "ep.toml does not parse: "),
        ("--config", "ep.json", "{", "ep.json does not parse: "),
        ("--config", "ep.yaml", "mode: [\n", "ep.yaml does not parse: "),
        ("--config", "ep.json", DEEP, "ep.json does not parse: it is nested too deeply"),
        ("--config", "ep.yaml", 'num_sms: !!int ""', "ep.yaml does not parse: "),
        ("--config", "ep.json", '{"mode": [[]]}', "ep.json gives mode as a list, expected one"),
        ("--config", "ep.toml", f"num_sms = 0x{'f' * 5000}", "is a number of thousands of digits"),
        ("--config", "ep.toml", 'measurements = "a\\u0000b"', "which is no path (embedded null"),
        ("--config", "ep.toml", b"\xff", "ep.toml does not parse: "),
        ("--config", "ep.toml", "tokens = 1\n", "ep.toml has unknown fields ['tokens']"),
        ("--config", "ep.ini", "mode=normal", "another ending than .toml, .json, .yaml, .yml"),
        ("--model", "no.json", None, "does not exist"),
        ("--model", "model.json", "{", "is no JSON ("),
        ("--model", "model.json", "[1]", "holds a list, expected an object"),
        ("--model", "model.json", DEEP, "model.json is nested too deeply; pass the config.json"),
        ("--model", "model.json", '{"hidden_size": 64}', "num_experts is in neither an option"),
        ("--model", "model.json", '{"text_config": "x"}', "gives text_config as text, expected"),
        ("--model", "model.json", '{"hidden_size": true}', "hidden_size as True, expected one"),
        ("--model", "model.json", '{"dtype": ["bf16"]}', "gives dtype as a list, expected text"),
        (
            "--model",
            "model.json",
            '{"hidden_size": 64, "num_experts": [8, 16]}',
            "gives num_experts as a list, expected one number for all layers, from 1 to",
        ),
    )
]
OTHERS = [
    BadCall(id="no such command", arguments=["plans"], message="epcomm: No such command 'plans'"),
    BadCall(
        id="no such part",
        arguments=["doctor", "collective", "rdma"],
        message="epcomm doctor: 'rdma' is no backend or runner, expected of ['ascend', ",
    ),
]
BENCHES = [
    BadCall(
        id="no ranks",
        arguments=["bench"],
        message="epcomm bench: there are no ranks; pass --ranks 4 to start some on the CPU, or",
    ),
    BadCall(
        id="unknown mode",
        arguments=[*BENCH, "--modes", "normal,fuseep"],
        message="epcomm bench: --modes is 'normal,fuseep', expected some of ['normal', ",
    ),
    BadCall(
        id="tokens 0",
        arguments=[*BENCH, "--tokens", "0,8"],
        message="epcomm bench: --tokens is 0,8, expected 1 to 2147483647",
    ),
    BadCall(
        id="indivisible",
        arguments=["bench", "--ranks", "3"],
        message="epcomm bench: --experts is 32, expected a multiple of the 3 ranks",
    ),
    BadCall(
        id="top k",
        arguments=[*BENCH, "--experts", "4"],
        message="epcomm bench: --top-k is 8, expected at most the 4 experts; give fewer, or more",
    ),
    BadCall(
        id="wire",
        arguments=[*BENCH, "--wire", "fp8"],
        message="epcomm bench: --wire is 'fp8', expected one of ['fp8_e4m3', 'int8']",
    ),
    BadCall(
        id="wire of a layer",
        arguments=[*BENCH, "--wire", "int8", "--layer"],
        message="epcomm bench: --wire is int8 with --layer, whose experts decide the format",
    ),
    BadCall(
        id="negative seed",
        arguments=[*BENCH, "--seed", "-1"],
        message="epcomm bench: --seed is -1, expected 0 to 9223372036854775807",
    ),
    BadCall(
        id="unwritable file",
        arguments=[*BENCH, "--output", "/dev/null/report.json"],
        message="epcomm bench: /dev/null/report.json cannot be written (",
    ),
    BadCall(
        id="no picture",
        arguments=[*BENCH, "--plot", "plot.mp3"],
        message="epcomm bench: --plot is 'plot.mp3', expected a name that ends in one of",
    ),
]
CALLS = [*OPTIONS, *PLANS, *HUGE, *MEASUREMENTS, *FILES, *OTHERS, *BENCHES]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_bad_input_ends_with_one_line_and_2(
    call: BadCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*arguments: object) -> int:
        raise AssertionError("ranks are started")

    monkeypatch.setattr(epcomm.cli.bench, "start_ranks", started)
    for name, text in call.files.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    arguments = [each.replace("FOLDER", str(tmp_path)) for each in call.arguments]
    result = CliRunner().invoke(
        app, arguments, env={"RANK": None, "WORLD_SIZE": None}, prog_name="epcomm"
    )
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert call.message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_yaml_without_its_package_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "ep.yaml"
    path.write_text("mode: normal\n")
    result = CliRunner().invoke(app, [*PLAN, "--config", str(path)])
    assert result.exit_code == 2
    assert "ep.yaml needs PyYAML, which is not installed; run pip install" in result.stderr
    assert len(result.stderr.splitlines()) == 1
