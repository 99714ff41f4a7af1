import json
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from epcomm import EPConfig, MoESpec, plan
from epcomm.cli import app
from epcomm.placement.recorder import ExpertLoad
from epcomm.platforms.assumed import DEVICES
from tests.cli.test_bad_input import refused

# A terminal wide enough that no cell is wrapped.
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


def printed(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_plan_prints_choice_rejections_memory_and_limits() -> None:
    text = printed("plan", *LAYER, "--max-tokens", "16", "--intermediate-size", "32")
    assert "8 experts on 4 ranks, 2 each; hidden size 64, top 2, bf16" in text
    spec, config = MoESpec(hidden_size=64, num_experts=8, top_k=2), EPConfig(max_tokens_per_rank=16)
    chosen = plan(config, spec, world_size=4)
    assert text.endswith(f"bf16\n{chosen.explain()}\nrunner grouped_mm\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [*LAYER, "--mode", "fuseep", "--intermediate-size", "32"],
            "computes W8A8 experts, Int8ChannelWeights, not ExpertWeights; quantise them",
        ),
        (
            [
                *(*LAYER[:-1], "16", "--num-experts", "16", "--hidden-size", "2048"),
                *("--device", "b200", "--mode", "normal", "--backend", "nvlink"),
            ],
            "use backend='auto' (assumed: 16 ranks on 2 hosts of b200, at most 8 a host)",
        ),
    ],
    ids=["fuseep of experts that are not W8A8", "backend that does not serve there"],
)
def test_refused_plan_ends_with_one_sentence_and_1(arguments: list[str], message: str) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_fuseep_shows_operators_with_limits_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "200")
    text = printed("plan", *FUSEEP, "--max-tokens", "512")
    assert "mode fuseep on backend fuseep_reference" in text
    assert WINDOW_REASON in text
    operators = ("mega_moe", "fused_deep_moe", "dispatch_ffn_combine", "fuseep_reference")
    lines = [line for line in text.splitlines() if line.startswith(operators)]
    rows = ["at most 4096", "at most 256", "at most 256", "no limit"]
    for line, name, most in zip(lines, operators, rows, strict=True):
        assert line.startswith(f"{name}: chip ")
        assert f"; rows a call {most}; " in line


def test_config_file_is_read_and_an_option_wins(tmp_path: Path) -> None:
    path = tmp_path / "ep.toml"
    path.write_text('mode = "low_latency"\nmax_tokens_per_rank = 128\n')
    from_file = run("plan", *LAYER, "--config", str(path)).stdout
    assert "mode low_latency on " in from_file
    assert "tokens a rank: at most 128\n" in from_file
    by_option = run("plan", *LAYER, "--config", str(path), "--max-tokens", "16").stdout
    assert "tokens a rank: at most 16\n" in by_option


# A config.json, the layer that it means, and its runner.
MODELS = {
    "mixtral": (
        '{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, '
        '"num_local_experts": 8, "num_experts_per_tok": 2, "torch_dtype": "bfloat16"}',
        "8 experts on 8 ranks, 1 each; hidden size 4096, top 2, bf16",
        "grouped_mm",
    ),
    "deepseek_v3: the dense layers have another intermediate size": (
        '{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, '
        '"moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8}',
        "256 experts on 8 ranks, 32 each; hidden size 7168, top 8, bf16",
        "grouped_mm",
    ),
    "ernie4_5_moe: other names": (
        '{"model_type": "ernie4_5_moe", "hidden_size": 2560, "moe_intermediate_size": 1536, '
        '"moe_num_experts": 64, "moe_k": 6, "dtype": "float32"}',
        "64 experts on 8 ranks, 8 each; hidden size 2560, top 6, fp32",
        "grouped_mm",
    ),
    "multimodal": (
        '{"model_type": "qwen3_5_moe", "vision_config": {"hidden_size": 1152}, "text_config": '
        '{"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "moe_intermediate_size": 514, '
        '"num_experts": 256, "num_experts_per_tok": 8}}',
        "256 experts on 8 ranks, 32 each; hidden size 2048, top 8, bf16",
        "reference",
    ),
    "unknown family": (
        '{"model_type": "hunyuan_v1_moe", "hidden_size": 4096, "intermediate_size": 3072, '
        '"num_experts": 64, "moe_topk": 8}',
        "64 experts on 8 ranks, 8 each; hidden size 4096, top 8, bf16",
        "grouped_mm",
    ),
}


@pytest.mark.parametrize(("text", "shape", "runner"), MODELS.values(), ids=[*MODELS])
def test_model_file_gives_the_layer(text: str, shape: str, runner: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    plan_of_model = printed("plan", "--model", str(path))
    assert shape in plan_of_model
    assert f"runner {runner}\n" in plan_of_model


def test_option_wins_over_the_model_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(MODELS["mixtral"][0])
    result = run("plan", "--model", str(path), "--num-experts", "16", "--dtype", "fp16")
    assert "16 experts on 8 ranks, 2 each; hidden size 4096, top 2, fp16" in result.stdout


def test_backend_built_from_source_is_assumed_to_be_installed_if_it_is_named() -> None:
    named = run("plan", *LAYER, "--device", "h200", "--mode", "normal", "--backend", "deep_ep_v1")
    assert "\nassumed: 4 ranks on 1 host of h200, at most 4 a host\n" in named.stdout
    assert "on backend deep_ep_v1 " in named.stdout


def test_plan_is_of_physical_experts_and_shows_the_memory_of_moving_them(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"redundant_experts": 4}))
    words = ["plan", *LAYER, "--config", str(path)]
    result = run(*words)
    assert "12 experts on 4 ranks, 3 each" in result.stdout, result.output
    unknown = "placed experts, host bytes of a rank, at most: unknown; pass --intermediate-size\n"
    assert unknown in result.stdout
    words += ["--intermediate-size", "32"]
    # In bfloat16 the first matrix of an expert has 8192 bytes, the second 4096; a rank has 3, sends
    # up to 9 of the first to others, and receives 3.
    expected = {"redundant_bytes": 12288, "device_bytes": 12 * 8192, "host_bytes": 3 * 12288}
    assert json.loads(run(*words, "--json").stdout)["rebalance"] == expected
    known = "placed experts, redundant bytes of a rank, at most: 12,288 B\n"
    assert known in run(*words).stdout
    # An expert of 96 MiB and one of 48 MiB are longer than a piece, or fill one.
    wide = run(*words[:-1], "6144", "--hidden-size", "4096", "--json")
    assert json.loads(wide.stdout)["rebalance"]["device_bytes"] == 2 * 96 * 2**20


def test_json_holds_what_explain_tells() -> None:
    words = [*LAYER, "--max-tokens", "16", "--intermediate-size", "32", "--device", "cpu"]
    found = json.loads(printed("plan", *words, "--json"))
    assert list(found) == [
        *("version", "layer", "assumed", "phases", "decode_lacks", "runner", "rejected_runners"),
        "rebalance",
    ]
    assert found["rebalance"] is None
    sizes = {"hidden_size": 64, "num_experts": 8, "top_k": 2}
    assert found["layer"] == {**sizes, "dtype": "bf16", "ranks": 4}
    assert found["runner"] == "grouped_mm"
    assert found["assumed"][0] == "4 ranks on 1 host of cpu, at most 4 a host"
    chosen = plan(
        EPConfig(max_tokens_per_rank=16), MoESpec(**sizes), world_size=4, machine=DEVICES["cpu"]
    )
    assert list(found["phases"]) == ["prefill and training", "decode"]
    for name, phase in chosen.phases().items():
        told = found["phases"][name]
        assert (told["backend"], told["buffer"]) == (phase.backend, phase.buffer)
        assert told["chosen_by"] == phase.chosen_by
        assert told["bytes_per_token"] == phase.max_bytes_per_token()
        assert told["header_bytes"] == phase.header_bytes()
        assert told["limits"] == phase.limits()
        assert [each["region"] for each in told["memory"]] == [e.name for e in phase.regions()]
        assert [each["name"] for each in told["rejected"]] == [e.name for e in phase.rejected]


def test_version_is_that_of_the_distribution() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"{metadata.version('epcomm')}\n")


def test_no_command_prints_help() -> None:
    assert "doctor" in printed()


@pytest.mark.parametrize(("mode", "num_rows"), [("normal", 1), ("low_latency", 2)])
def test_hosts_show_the_bytes_between_them(mode: str, num_rows: int) -> None:
    words = ["plan", *LAYER, "--mode", mode, "--max-tokens", "16", "--hosts"]
    # A row of 64 elements of 2 B out, with 2 ids and weights of 4 B each, and 64 back: one to the
    # other host, and where sizes are static one to each of its ranks.
    expected = num_rows * (2 * 64 + 2 * 8 + 2 * 64)
    phase = json.loads(run(*words, "2", "--json").stdout)["phases"]["all"]
    assert phase["max_bytes_between_hosts"] == expected
    assert f"at most {expected} B a token between hosts" in run(*words, "2").stdout
    assert "between hosts" not in run(*words, "1").stdout


def test_a_device_has_as_many_ranks_a_host_as_are_said() -> None:
    words = ["plan", *LAYER, "--mode", "normal", "--device", "h200", "--hosts", "2", "--json"]
    found = json.loads(run(*words).stdout)
    assert found["assumed"][0] == "4 ranks on 2 hosts of h200, at most 2 a host"
    assert found["phases"]["all"]["max_bytes_between_hosts"] == 2 * 64 + 2 * 8 + 2 * 64


LOAD = ExpertLoad(
    num_ranks=2,
    windows_by_layer={
        "layers.0": ((1, 0, 2, 5), (3, 0, 0, 1)),
        "layers.1": (),
        "layers.2": ((0, 0), (0, 0)),
    },
)


def written(folder: Path) -> Path:
    path = folder / "load.json"
    path.write_text(LOAD.as_json())
    return path


def test_table_has_a_row_for_each_layer(tmp_path: Path) -> None:
    lines = printed("load", str(written(tmp_path))).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    # 4 0 2 6: expert 3 has 6 of 12, and rank 1 has 8.
    assert rows["layers.0"] == ["2", "12", "3", "2.00", "1.33"]
    assert rows["layers.1"] == ["0", "0", "-", "1.00", "-"]
    assert rows["layers.2"] == ["2", "0", "-", "1.00", "1.00"]


@pytest.mark.slow
def test_heatmap_is_drawn_or_one_line_says_why_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    good, picture = str(written(tmp_path)), tmp_path / "load.svg"
    printed("load", good, "--plot", str(picture))
    assert "<svg" in picture.read_text("utf-8")
    empty = tmp_path / "empty.json"
    empty.write_text(ExpertLoad(num_ranks=2, windows_by_layer={}).as_json())
    assert "nothing to draw" in refused("load", str(empty), "--plot", str(tmp_path / "load.png"))
    assert "expected a name that ends in one of" in refused("load", good, "--plot", "load.nothing")
    assert "cannot be written" in refused("load", good, "--plot", "/dev/null/load.png")
