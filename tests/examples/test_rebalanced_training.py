"""Training with experts that move every 10 steps has the same losses and a more even load."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
MODEL = ["--layers", "1", "--experts", "16", "--skew", "8"]
# A launch takes 20 s on an idle machine with two cores.
LIMIT_S = 200


def run(num_ranks: int, *options: str) -> str:
    launcher = str(REPO / "scripts" / "launch_multi_rank.sh")
    result = subprocess.run(
        [launcher, str(num_ranks), str(REPO / "examples" / "train_qwen3_moe.py"), *MODEL, *options],
        env=os.environ | {"PYTHON": sys.executable, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "run.json").read_text())["losses"]


@pytest.mark.slow
def test_losses_are_those_without_moves_and_the_load_of_a_rank_falls(tmp_path: Path) -> None:
    steps = ["--steps", "20", "--checkpoint-step", "15", "--checkpoint"]
    run(4, *steps, str(tmp_path / "still"))
    output = run(4, *steps, str(tmp_path / "moved"), "--redundant-experts", "8")
    expected = losses(tmp_path / "still")
    assert len(expected) == 20
    assert losses(tmp_path / "moved") == pytest.approx(expected, rel=1e-5)
    assert "16 experts and 8 redundant ones on 4 ranks, 6 each" in output
    table = output[output.index("moved after step") :]
    moves = re.findall(r"^ +(\d+) +(\S+) +(\S+) +(\S+)$", table, re.MULTILINE)
    assert [step for step, *_ in moves] == ["10", "20"]
    for _, in_order, before, after in moves:
        # The second time, `before` is the load of tokens that were not used to compute a placement.
        assert 1 <= float(after) < float(before) < float(in_order)
    assert float(moves[0][1]) > 1.5
    assert float(moves[0][3]) < 1.1
    # The state of placed experts is that of the model, on other ranks and without copies.
    resumed = run(2, "--resume", str(tmp_path / "moved"), "--steps", "20")
    assert "losses of steps 16 to 20 differ from those without interruption by" in resumed
