"""The command line: `epcomm plan` and `epcomm doctor`, with no group and no GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import epcomm.cli.doctor
from epcomm.cli import app
from epcomm.cli.diagnosis import Report
from epcomm.platforms.deep_ep import Variable
from epcomm.platforms.findings import Finding, Status

# Wide enough that no cell is wrapped.
WIDE = {"COLUMNS": "240"}
LAYER = ["--hidden-size", "64", "--num-experts", "8", "--top-k", "2", "--ranks", "4"]
# DeepSeek-V3 in W8A8.
FUSEEP = [
    *("--hidden-size", "7168", "--num-experts", "256", "--top-k", "8", "--ranks", "16"),
    *("--intermediate-size", "2048", "--mode", "fuseep", "--experts", "int8"),
]


WINDOW_REASON = "needs a window of 1792 MiB, but HCCL_BUFFSIZE is 200; set it to 1792 on all ranks"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=WIDE)


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables, header rows included."""
    lines = [re.split("[│┃]", line)[1:-1] for line in text.splitlines() if line[:1] in "│┃"]
    return [[cell.strip() for cell in line] for line in lines]


def test_plan_prints_choice_rejections_memory_and_limits() -> None:
    result = run("plan", *LAYER, "--max-tokens", "16", "--intermediate-size", "32")
    assert result.exit_code == 0, result.output
    assert "8 experts on 4 ranks, 2 each; hidden size 64, top 2, bf16" in result.stdout
    assert "runner: grouped_mm" in result.stdout
    printed = rows(result.stdout)
    assert ["chosen", "prefill and training", "decode"] in printed
    assert ["mode", "normal", "low_latency"] in printed
    assert ["gradients", "yes", "no"] in printed
    assert ["limit: tokens a rank", "no limit", "at most 16"] in printed
    assert [
        "shared_memory",
        "prefill and training",
        "serves one host, which only a process group shows; run under torchrun",
    ] in printed
    assert ["received rows", "288 B", "no limit"] in printed
    assert ["received rows", "fixed", "9,792 B"] in printed


def test_every_reason_of_a_rejection_has_a_line() -> None:
    result = run("plan", *LAYER, "--mode", "normal", "--backend", "collective")
    printed = rows(result.stdout)
    place = printed.index(["nvlink", "all phases", "there is no CUDA device"])
    assert printed[place + 1] == [
        "",
        "",
        "serves one host, which only a process group shows; run under torchrun",
    ]
    assert ["bytes a token, dispatch", "288 B"] in printed
    assert ["backward a token, combine", "288 B"] in printed


def test_auto_without_a_limit_says_what_decode_lacks() -> None:
    result = run("plan", *LAYER)
    assert "no decode: set EPConfig.max_tokens_per_rank" in result.stdout
    assert "no runner chosen: the size of the experts is unknown" in result.stdout


@dataclass(frozen=True, kw_only=True)
class BadCall:
    id: str
    arguments: list[str]
    message: str


BAD_CALLS = [
    BadCall(
        id="indivisible",
        arguments=[*LAYER[:-1], "3"],
        message="plan: num_experts is 8, expected a multiple of the 3 ranks; use a number of ranks "
        "that divides it",
    ),
    BadCall(
        id="unknown mode",
        arguments=[*LAYER, "--mode", "fast"],
        message="EPConfig: mode is 'fast', expected one of",
    ),
    BadCall(
        id="fuseep of experts that are not W8A8",
        arguments=[*LAYER, "--mode", "fuseep", "--intermediate-size", "32"],
        message="fuseep_reference: computes W8A8 experts, Int8ChannelWeights, not ExpertWeights; "
        "quantise them",
    ),
    BadCall(
        id="fuseep with a runner",
        arguments=[*FUSEEP, "--runner", "quantized_reference"],
        message="computes experts itself, without runner quantized_reference; leave it auto",
    ),
    BadCall(
        id="fuseep of an unknown operator",
        arguments=[*FUSEEP, "--backend", "collective"],
        message="backend is 'collective', expected auto or one of ['dispatch_ffn_combine', "
        "'fused_deep_moe', 'fuseep_reference']",
    ),
    BadCall(
        id="experts of an unknown kind",
        arguments=[*LAYER, "--experts", "int4"],
        message="epcomm plan: experts is 'int4', expected bf16, as the hidden states are, or one "
        "of ['fp8', 'int8']",
    ),
    BadCall(
        id="unquantised experts of another dtype",
        arguments=[*LAYER, "--experts", "fp16"],
        message="epcomm plan: experts is 'fp16', expected bf16, as the hidden states are",
    ),
    BadCall(
        id="experts without a size",
        arguments=[*LAYER, "--experts", "int8"],
        message="epcomm plan: experts is int8, but their size is in neither an option nor a "
        "--model file; pass --intermediate-size",
    ),
    BadCall(
        id="backend that does not serve",
        arguments=[*LAYER, "--mode", "standard", "--backend", "shared_memory"],
        message="plan: backend shared_memory cannot serve this layer",
    ),
    BadCall(
        id="no size",
        arguments=LAYER[2:],
        message="epcomm plan: hidden_size is in neither an option nor a --model file; pass "
        "--hidden-size",
    ),
    BadCall(
        id="dtype",
        arguments=[*LAYER, "--dtype", "tf32"],
        message="epcomm plan: dtype is 'tf32', expected one of ['bf16', 'bfloat16',",
    ),
    BadCall(
        id="runner that cannot compute the experts",
        arguments=[*LAYER, "--runner", "grouped_mm", "--intermediate-size", "12"],
        message="plan: runner grouped_mm cannot compute these experts",
    ),
]


@pytest.mark.parametrize("call", BAD_CALLS, ids=lambda call: call.id)
def test_bad_call_ends_with_one_sentence(call: BadCall) -> None:
    result = run("plan", *call.arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert call.message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_fuseep_shows_every_operator_with_its_limits_and_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "200")
    result = run("plan", *FUSEEP, "--max-tokens", "512")
    assert result.exit_code == 0, result.output
    assert "no runner: fuseep_reference computes the experts itself" in result.stdout
    printed = rows(result.stdout)
    assert ["backend", "fuseep_reference"] in printed
    assert ["", "", WINDOW_REASON] in printed
    place = printed.index(
        ["operator", "fused_deep_moe", "dispatch_ffn_combine", "fuseep_reference"]
    )
    assert printed[place + 1 : place + 10] == [
        ["chip", "A3", "A3", "any"],
        ["rows a call", "at most 256", "at most 256", "no limit"],
        ["hidden size", "512 to 7168 in steps of 16", "no limit", "no limit"],
        ["2 * intermediate size", "1024 to 6144 in steps of 128", "no limit", "no limit"],
        ["top k", "at most 12", "no limit", "no limit"],
        ["experts", "at most 512", "no limit", "no limit"],
        ["experts of a rank", "at most 24", "no limit", "no limit"],
        # 16 ranks * 256 rows * 16 experts * 7168 * 4; 3 * 256 * 8 * 7168 + 10 MiB.
        ["HCCL window", "1,879,048,192 B (1,792.0 MiB)", "54,525,952 B (52.0 MiB)", "none"],
        # 16 experts * (3 * 7168 * 2048 codes, 4096 + 7168 scales of 4 or 8 bytes).
        ["packed experts", "705,363,968 B (672.7 MiB)", "706,084,864 B (673.4 MiB)", "none"],
    ]


def test_fuseep_without_a_token_limit_says_what_windows_need() -> None:
    result = run("plan", *FUSEEP)
    assert result.exit_code == 0, result.output
    needed = "pass --max-tokens"
    assert ["HCCL window", needed, needed, "none"] in rows(result.stdout)


@pytest.mark.parametrize(
    ("kind", "wire"),
    [("bf16", "bf16"), ("fp8", "fp8_e4m3/128"), ("int8", "int8/0")],
    ids=["bf16", "fp8", "int8"],
)
def test_kind_of_experts_decides_what_travels(kind: str, wire: str) -> None:
    layer = [*LAYER, "--mode", "normal", "--intermediate-size", "32"]
    result = run("plan", *layer, "--experts", kind)
    assert result.exit_code == 0, result.output
    assert ["wire format of dispatch", wire] in rows(result.stdout)
    runner = "grouped_mm" if kind == "bf16" else "quantized_reference"
    assert f"runner: {runner}" in result.stdout


def test_unusual_arithmetic_has_a_row(tmp_path: Path) -> None:
    path = tmp_path / "ep.toml"
    path.write_text('dispatch_dtype = "int8"\nint8_profile = "div"\n')
    found = rows(run("plan", *LAYER, "--config", str(path)).stdout)
    assert ["int8 profile", "div"] in found
    assert ["wire format of dispatch", "int8/0"] in found
    assert "int8 profile" not in run("plan", *LAYER).stdout


def test_config_file_is_read_and_an_option_wins(tmp_path: Path) -> None:
    path = tmp_path / "ep.toml"
    path.write_text('mode = "low_latency"\nmax_tokens_per_rank = 128\n')
    from_file = rows(run("plan", *LAYER, "--config", str(path)).stdout)
    assert ["mode", "low_latency"] in from_file
    assert ["limit: tokens a rank", "at most 128"] in from_file
    by_option = rows(run("plan", *LAYER, "--config", str(path), "--max-tokens", "16").stdout)
    assert ["limit: tokens a rank", "at most 16"] in by_option


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ep.toml", "mode = \n", "does not parse"),
        ("ep.json", "{", "does not parse"),
        ("ep.toml", "tokens = 1\n", "ep.toml has unknown fields ['tokens']"),
        ("ep.yaml", "mode: normal\n", "ep.yaml is no .toml or .json file"),
    ],
    ids=["toml", "json", "field", "ending"],
)
def test_bad_config_file_ends_with_one_sentence(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    result = run("plan", *LAYER, "--config", str(path))
    assert result.exit_code == 1
    assert message in result.stderr


@dataclass(frozen=True, kw_only=True)
class Model:
    """A config.json, and the experts, ranks, hidden size, top k and dtype that it means."""

    id: str
    values: dict[str, object]
    shape: str
    runner: str = "grouped_mm"


MODELS = [
    Model(
        id="mixtral",
        values={
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "torch_dtype": "bfloat16",
        },
        shape="8 experts on 8 ranks, 1 each; hidden size 4096, top 2, bf16",
    ),
    Model(
        id="deepseek_v3: the dense layers have another intermediate size",
        values={
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        shape="256 experts on 8 ranks, 32 each; hidden size 7168, top 8, bf16",
    ),
    Model(
        id="ernie4_5_moe: other names",
        values={
            "model_type": "ernie4_5_moe",
            "hidden_size": 2560,
            "moe_intermediate_size": 1536,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_norm_min": 1e-12,
            "dtype": "float32",
        },
        shape="64 experts on 8 ranks, 8 each; hidden size 2560, top 6, fp32",
    ),
    Model(
        id="multimodal",
        values={
            "model_type": "qwen3_5_moe",
            "vision_config": {"hidden_size": 1152},
            "text_config": {
                "model_type": "qwen3_5_moe_text",
                "hidden_size": 2048,
                "moe_intermediate_size": 514,
                "num_experts": 256,
                "num_experts_per_tok": 8,
            },
        },
        shape="256 experts on 8 ranks, 32 each; hidden size 2048, top 8, bf16",
        runner="reference",
    ),
    Model(
        id="unknown family",
        values={
            "model_type": "hunyuan_v1_moe",
            "hidden_size": 4096,
            "intermediate_size": 3072,
            "num_experts": 64,
            "moe_topk": 8,
        },
        shape="64 experts on 8 ranks, 8 each; hidden size 4096, top 8, bf16",
    ),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.id)
def test_model_file_gives_the_layer(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(model.values))
    result = run("plan", "--model", str(path))
    assert result.exit_code == 0, result.output
    assert model.shape in result.stdout
    assert f"runner: {model.runner}" in result.stdout


def test_option_wins_over_the_model_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS[0].values))
    result = run("plan", "--model", str(path), "--num-experts", "16", "--dtype", "fp16")
    assert "16 experts on 8 ranks, 2 each; hidden size 4096, top 2, fp16" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON ("),
        ("[1]", "holds a list, expected an object"),
        ('{"hidden_size": 64}', "num_experts is in neither an option nor a --model file; pass"),
        ('{"hidden_size": 64, "num_experts": [8, 16]}', "gives num_experts as [8, 16], expected"),
    ],
    ids=["no JSON", "no object", "no experts", "experts by layer"],
)
def test_bad_model_file_ends_with_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    result = run("plan", "--model", str(path))
    assert result.exit_code == 1
    assert message in result.stderr


def test_doctor_prints_findings_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(
        name="deep_ep", status=Status.ATTENTION, detail="[V1] and\nmore", advice="pip install x[y]"
    )
    report = Report(
        platform=(finding,),
        packages=(finding,),
        deep_ep=None,
        backends=(finding,),
        runners=(finding,),
        variables=(Variable(name="EP_X", value="1", written=None, advice="unset it"),),
    )
    monkeypatch.setattr(epcomm.cli.doctor, "doctor", lambda: report)
    result = run("doctor")
    assert result.exit_code == 0, result.output
    printed = rows(result.stdout)
    for kind in ("platform", "package", "backend", "runner"):
        place = printed.index([kind, "", "found", "what to do"])
        assert printed[place + 1] == ["deep_ep", "attention", "[V1] and", "pip install x[y]"]
        assert printed[place + 2] == ["", "", "more", ""]
    assert ["EP_X", "'1'", "", "unset it"] in printed


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "epcomm", "plan", *LAYER, "--mode", "normal"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "8 experts on 4 ranks, 2 each" in done.stdout
