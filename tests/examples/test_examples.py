import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cases.shared_folder import shared_folder
from tests.examples.programs import EXAMPLES, run_program

pytestmark = pytest.mark.ranks(2)

# Decoder layers of both models.
MODELS = ("qwen3_moe", "deepseek_v3")


def run(example: str, *arguments: str) -> str:
    return run_program(EXAMPLES / f"{example}.py", *arguments)


def test_decode_has_the_checksum_of_prefill() -> None:
    printed = run("same_bits")
    if dist.get_rank() == 0:
        found = re.fullmatch(
            r"2 ranks: y (\w{8})  decoded (\w{8})  dx \w{8}  dweights \w{8}\n", printed
        )
        assert found[1] == found[2]


def test_results_and_gradients_of_both_models_are_equal() -> None:
    printed = run("two_micro_batches")
    assert printed.splitlines() == [
        f"{model}, rank {dist.get_rank()}: equal results True, gradients True" for model in MODELS
    ]


def test_tokens_of_decode_are_equal() -> None:
    printed = run("decode_two_micro_batches")
    assert printed.splitlines() == [
        f"{model}, rank {dist.get_rank()}: decoded over shared_memory eagerly: a CPU has no "
        "graphs, equal True"
        for model in MODELS
    ]


TINY = ["--steps", "3", "--layers", "2", "--experts", "8"]


@pytest.mark.slow
def test_steps_and_decoded_text_agree_with_one_process() -> None:
    output = run("train_qwen3_moe", *TINY, "--min-loss-fall", "0.1")
    if dist.get_rank() != 0:
        return
    lines = output.splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("step  tokens"))
    rows = [line.split() for line in lines[header + 2 : header + 5]]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    for row in rows:
        loss, expected_loss, loss_difference, norm_difference = map(float, row[3:7])
        assert loss == pytest.approx(expected_loss, abs=1.1e-4)  # The output has four digits.
        assert loss_difference < 1e-5
        assert norm_difference < 1e-5
    assert re.search(r"in 3 steps; in [1-3] of them a rank had no data$", output, re.MULTILINE)
    assert re.findall(r"^rank (\d) writes ", output, re.MULTILINE) == ["0", "1"]
    difference = re.search(r"^decoded .*; logits differ from one process by (\S+)$", output, re.M)
    assert difference is not None, output
    assert float(difference[1]) < 1e-5


@pytest.mark.slow
def test_a_step_that_differs_ends_the_run_with_a_message() -> None:
    message = (
        r"step 1: loss is 5\.\d+, in one process 5\.\d+: relative difference \S+, expected less "
        r"than 0\.0e\+00; gradient norm is "
    )
    with pytest.raises(SystemExit, match=message):
        run("train_qwen3_moe", *TINY, "--tolerance", "0")


MODEL = ["--layers", "1", "--experts", "16", "--skew", "8", "--steps", "20"]
SAVED = ["--checkpoint-step", "15", "--checkpoint"]


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "run.json").read_text())["losses"]


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_losses_are_those_without_moves_and_the_load_of_a_rank_falls() -> None:
    with shared_folder() as folder:
        still, moved = folder / "still", folder / "moved"
        run("train_qwen3_moe", *MODEL, *SAVED, str(still))
        placed = [*MODEL, "--redundant-experts", "8", *SAVED, str(moved)]
        output = run("train_qwen3_moe", *placed)
        dist.barrier()
        # The state of placed experts is that of the model, without copies.
        resumed = run("train_qwen3_moe", *MODEL, "--resume", str(moved))
        if dist.get_rank() != 0:
            return
        assert losses(moved) == pytest.approx(losses(still), rel=1e-5)
        assert len(losses(still)) == 20
    assert "losses of steps 16 to 20 differ from those without interruption by" in resumed
    assert "16 experts and 8 redundant ones on 4 ranks, 6 each" in output
    table = output[output.index("moved after step") :]
    moves = re.findall(r"^ +(\d+) +(\S+) +(\S+) +(\S+)$", table, re.MULTILINE)
    assert [step for step, *_ in moves] == ["10", "20"]
    for _, in_order, before, after in moves:
        # The second time, `before` is the load of tokens that were not used to compute a placement.
        assert 1 <= float(after) < float(before) < float(in_order)
    assert float(moves[0][1]) > 1.5
    assert float(moves[0][3]) < 1.1


@pytest.mark.slow
def test_replay_brings_the_log_probabilities_of_both_programs_closer() -> None:
    with shared_folder() as folder:
        written = run("router_replay", "generate", str(folder))
        dist.barrier()
        output = run("router_replay", "train", str(folder))
    if dist.get_rank() == 0:
        assert "768 bytes generated on 2 ranks" in written
        shares = re.findall(r"^│ \d+ +│ ([\d.]+)% +│ ([\d.]+)% +│$", output, re.MULTILINE)
        assert len(shares) == 4
        assert any(float(tokens) > 0 for tokens, _ in shares)
        first = {
            name: float(value)
            for name, value in re.findall(r"(live|replayed) routes, by\s+step:\s+([\d.]+),", output)
        }
        assert 0 < first["replayed"] < first["live"]


# Host syncs of a call of each path.
PATHS = {
    "fuseep_reference": 1,
    "fused_deep_moe": 0,
    "dispatch_ffn_combine": 0,
    "normal": 1,
    "low_latency": 0,
}
CHOICES = {
    "fused_deep_moe": "mode fuseep on backend fused_deep_moe (FusedDeepMoE), 2 ranks with 2 "
    "experts each; experts computed by fused_deep_moe itself; y is reduced",
    "normal": "mode normal on backend collective (CollectiveBuffer), 2 ranks with 2 experts "
    "each; runner quantized_reference: plain torch, which dequantises rows and matrices unless "
    "they are INT8",
}


@pytest.mark.slow
def test_paths_agree_and_their_costs_are_shown() -> None:
    output = run("fuseep_w8a8", "--experts", "4", "--max-tokens", "40")
    if dist.get_rank() == 0:
        lines = [line.split() for line in output.splitlines() if re.search(r" 0\.0\d{4} ", line)]
        check_rows({line[0]: line[1:] for line in lines})
        for name, what in CHOICES.items():
            assert re.search(rf"^{name} +{re.escape(what)}$", output, re.MULTILINE), output


def check_rows(rows: Mapping[str, list[str]]) -> None:
    """Check the cells of the table by path; the reference lacks one."""
    assert list(rows) == list(PATHS)
    for name, cells in rows.items():
        to_bf16, to_w8a8 = map(float, cells[:2])
        # Both errors exist: that of rounded activations, and the larger one of rounded activations
        # and weights.
        assert 0.005 < to_w8a8 < to_bf16, name
        # MAX_ERROR of the example.
        assert to_w8a8 <= 0.0245, name
        assert to_bf16 <= 0.03, name
    differences = {name: float(cells[2]) for name, cells in rows.items() if len(cells) == 7}
    assert list(differences) == list(PATHS)[1:]
    assert max(differences.values()) <= 0.01
    # Float32 between the products, as in the reference.
    assert differences["fused_deep_moe"] <= 1e-3
    assert {name: int(cells[-1]) for name, cells in rows.items()} == PATHS
    dispatch = {name: float(cells[-4]) for name, cells in rows.items()}
    combine = {name: float(cells[-3]) for name, cells in rows.items()}
    # The operators send the same rows, and results in 2 bytes an element where the reference has 4.
    assert dispatch["fused_deep_moe"] == dispatch["dispatch_ffn_combine"] > 0
    assert combine["fused_deep_moe"] == combine["dispatch_ffn_combine"] > 0
    # Static sizes are sent in full.
    assert dispatch["low_latency"] > dispatch["normal"] > 0
