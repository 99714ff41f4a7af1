"""Both programs of the example run, and replay reduces the difference of log-probabilities."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
# A program takes 10 s on an idle machine with two cores.
LIMIT_S = 200


def run(num_ranks: int, *arguments: str) -> str:
    environment = os.environ | {"PYTHON": sys.executable, "COLUMNS": "200"}
    done = subprocess.run(
        [
            str(REPO / "scripts" / "launch_multi_rank.sh"),
            str(num_ranks),
            str(REPO / "examples" / "router_replay.py"),
            *arguments,
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_replay_brings_the_log_probabilities_of_both_programs_closer(tmp_path: Path) -> None:
    assert "768 bytes generated on 2 ranks" in run(2, "generate", str(tmp_path))
    output = run(4, "train", str(tmp_path))
    shares = re.findall(r"^│ \d+ +│ ([\d.]+)% +│ ([\d.]+)% +│$", output, re.MULTILINE)
    assert len(shares) == 4
    assert any(float(tokens) > 0 for tokens, _ in shares)
    first = {
        name: float(value)
        for name, value in re.findall(r"(live|replayed) routes, by step: ([\d.]+),", output)
    }
    assert 0 < first["replayed"] < first["live"]
