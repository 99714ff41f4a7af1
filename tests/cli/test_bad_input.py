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
# Nested lists that are too deep for every parser.
DEEP = "[" * 100_000


@dataclass(frozen=True, kw_only=True)
class BadCall:
    """A command with bad input, and the line that it writes.

    arguments: FOLDER stands for the one with `files`, by name to text or bytes.
    """

    id: str
    arguments: list[str]
    message: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)


# Errors that typer finds in the same manner for plan, doctor and bench.
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
        id=f"{command[0]} {option}, 401 digits",
        arguments=[*command, option, str(10**400)],
        message=f" is {10**79}..., " if option != "--ranks" else f"{MAX_RANKS}",
    )
    for command, options in (
        (PLAN, ("--hidden-size", "--num-experts", "--top-k", "--ranks")),
        (PLAN, ("--intermediate-size", "--max-tokens", "--max-recv-slots")),
        (BENCH, ("--hidden", "--experts", "--tokens", "--iterations", "--warm-up", "--ranks")),
        ([*BENCH, "--layer"], ("--intermediate",)),
    )
    for option in options
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
        (REPORT % ("8", "0.0"), "ValueError: tokens 8 in 0.0 us"),
        (REPORT % ("8", "9" * 400), "ValueError: tokens 8 in 999"),
        (DEEP, "RecursionError: maximum recursion depth"),
        ("{", "JSONDecodeError: "),
        ("[]", "TypeError: "),
        ("{}", "KeyError: 'benchmark')"),
        ('{"benchmark": "nvlink"}', "ValueError: it is of 'nvlink'), expected a file written by"),
        ('{"benchmark": "epcomm bench"}', "KeyError: 'results'), expected"),
    )
]
WORDS = [
    BadCall(id=f"{command[0]} {words}", arguments=[*command, *words.split()], message=message)
    for command, words, message in (
        (PLAN, "--hidden-size 2147483647 --intermediate-size 2147483647", "an expert of hidden"),
        (PLAN, "--mode fast", "EPConfig: mode is 'fast', expected one of"),
        (PLAN, "--experts int4", "experts is 'int4', expected bf16, as the hidden states are, or"),
        (PLAN, "--experts int8", "experts is int8, but their size is in neither an option nor a"),
        (PLAN, "--dtype tf32", "dtype is 'tf32', expected one of ['bf16', 'bfloat16',"),
        (PLAN, "--ranks 0", "epcomm plan: Invalid value for '--ranks'"),
        (PLAN, "--backend rdma", "backend is 'rdma', expected auto or one of ['ascend', "),
        (PLAN, "--device h2o", "--device is 'h2o', expected one of ['h100', 'h200', 'b200', "),
        (PLAN, "--hosts 3", "--ranks is 4, expected a multiple of --hosts 3"),
        (["bench"], "", "no ranks are running; pass --ranks 4 to start some on the CPU"),
        (["bench"], "--ranks 3", "--experts is 32, expected a multiple of the 3 ranks"),
        (BENCH, "--modes normal,fuseep", "--modes is 'normal,fuseep', expected some of ["),
        (BENCH, "--tokens 0,8", "--tokens is 0,8, expected 1 to 2147483647"),
        (BENCH, "--experts 4", "--top-k is 8, expected at most the 4 experts; give fewer, or more"),
        (BENCH, "--wire fp8", "--wire is 'fp8', expected one of ['fp8_e4m3', 'int8', "),
        (BENCH, "--wire int8 --layer", "--wire is int8 with --layer, whose experts decide"),
        (BENCH, "--wire fp8_e4m3,int8", "--wire is 'fp8_e4m3,int8', expected one of ['fp8_e4m3'"),
        (BENCH, "--combine int8", "--combine is 'int8', expected some of ['fp8_e4m3', 'mxfp8', "),
        (BENCH, "--combine mxfp8 --layer", "--combine is given with --layer, which does not time"),
        (BENCH, "--micro-batches 1 --layer", "--micro-batches is 1, expected 2 to"),
        (BENCH, "--intermediate 64", "--intermediate is given without --layer"),
        (BENCH, "--weights fp8", "--weights is given without --layer"),
        (BENCH, "--backward --layer --weights fp8", "--backward is given, expected bf16 in"),
        (BENCH, "--backward --layer --modes low_latency", "--backward is given, expected bf16"),
        (BENCH, "--layer --intermediate 64 --weights ,", "--weights is ''"),
        (BENCH, "--shape gpt", "--shape is 'gpt', expected one of ['deepseek_v3', "),
        (BENCH, "--layer --weights int4", "--weights is 'int4', expected some of ['bf16', 'fp8']"),
        (BENCH, "--seed -1", "--seed is -1, expected 0 to 9223372036854775807"),
        (BENCH, "--output /dev/null/report.json", "/dev/null/report.json cannot be written ("),
        (BENCH, "--plot plot.mp3", "--plot is 'plot.mp3', expected a name that ends in one of"),
        (["plans"], "", "epcomm: No such command 'plans'"),
        (["doctor"], "collective rdma", "'rdma' is no backend or runner, expected of ['ascend', "),
    )
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
        ("--config", "ep.toml", 'measurements = "a\\u0000b"', "cannot be read (embedded null"),
        ("--config", "ep.toml", b"\xff", "ep.toml does not parse: "),
        ("--model", "no.json", None, "does not exist"),
        ("--model", "model.json", "{", "is not JSON ("),
        ("--model", "model.json", "[1]", "holds a list, expected an object"),
        ("--model", "model.json", DEEP, "model.json is nested too deeply; pass the config.json"),
        ("--model", "model.json", '{"hidden_size": 64}', "num_experts is in neither an option"),
        ("--model", "model.json", '{"text_config": "x"}', "gives text_config as text, expected"),
        ("--model", "model.json", '{"hidden_size": true}', "hidden_size as True, expected one"),
        ("--model", "model.json", '{"dtype": ["bf16"]}', "gives dtype as a list, expected text"),
        ("--model", "model.json", '{"num_experts": [8, 16]}', "num_experts as a list, expected"),
    )
]
LOADS = [
    BadCall(id="load no.json", arguments=["load", "FOLDER/no.json"], message="does not exist"),
    BadCall(
        id="load of no load",
        arguments=["load", "FOLDER/other.json"],
        message="epcomm load: ExpertLoad.from_json: the text is not the load of experts",
        files={"other.json": "{}"},
    ),
]
CALLS = [*OPTIONS, *WORDS, *HUGE, *MEASUREMENTS, *FILES, *LOADS]


def refused(*arguments: str, **variables: str) -> str:
    environment = {"RANK": None, "WORLD_SIZE": None, **variables}
    result = CliRunner().invoke(app, arguments, env=environment, prog_name="epcomm")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


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
    assert call.message in refused(*arguments)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("yaml", [*PLAN, "--config", "ep.yaml"], "needs PyYAML, which is not installed"),
        ("matplotlib.figure", [*BENCH, "--plot", "plot.png"], "--plot needs matplotlib, "),
    ],
    ids=["yaml", "matplotlib"],
)
def test_a_missing_package_is_named(
    module: str, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    Path("ep.yaml").write_text("mode: normal\n")
    assert message in refused(*arguments)


def test_ranks_of_torchrun_are_not_started_again() -> None:
    line = refused("bench", "--ranks", "2", RANK="0", WORLD_SIZE="4")
    assert "--ranks is 2, but torchrun has started 4; leave it out" in line


def test_a_file_that_can_be_written_is_left_alone(tmp_path: Path) -> None:
    """The file must be kept if the run fails later, as it does here on purpose."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    refused(*BENCH, "--output", str(old), "--plot", str(new))
    assert old.read_text() == "kept"
    assert not new.exists()
