"""Real launches of the example on two ranks, with a tiny model and few steps."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
COMMAND = [
    str(REPO / "scripts" / "launch_multi_rank.sh"),
    "2",
    str(REPO / "examples" / "train_qwen3_moe.py"),
    *("--steps", "3", "--layers", "2", "--experts", "8"),
]
OPTIONS = {
    "passing": ["--min-loss-fall", "0.1"],
    "impossible": ["--tolerance", "0"],
}
# Both launches take 10 s on an idle machine with two cores.
LIMIT_S = 150

Runs = dict[str, Future[subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    # A fixed width, because the width of the terminal changes the output.
    environment = os.environ | {"PYTHON": sys.executable, "COLUMNS": "80"}

    def run(options: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            COMMAND + options,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(run, options) for name, options in OPTIONS.items()}


def test_every_step_agrees_with_one_process(runs: Runs) -> None:
    passing = runs["passing"].result()
    assert passing.returncode == 0, passing.stderr
    lines = passing.stdout.splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("step  tokens"))
    assert max(map(len, lines[header - 1 : header + 5])) <= 80
    rows = [line.split() for line in lines[header + 2 : header + 5]]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    for row in rows:
        loss, expected_loss, loss_difference, norm_difference = map(float, row[3:7])
        assert loss == pytest.approx(expected_loss, abs=1.1e-4)  # The output has four digits.
        assert loss_difference < 1e-5
        assert norm_difference < 1e-5


def test_a_rank_without_data_takes_part(runs: Runs) -> None:
    output = runs["passing"].result().stdout
    assert re.search(r"in 3 steps; in [1-3] of them a rank had no data$", output, re.MULTILINE)


def test_decoded_text_agrees_with_one_process(runs: Runs) -> None:
    output = runs["passing"].result().stdout
    assert re.findall(r"^rank (\d) writes ", output, re.MULTILINE) == ["0", "1"]
    difference = re.search(r"^decoded .*; logits differ from one process by (\S+)$", output, re.M)
    assert difference is not None, output
    assert float(difference[1]) < 1e-5


def test_a_step_that_differs_ends_the_run_with_a_message(runs: Runs) -> None:
    impossible = runs["impossible"].result()
    assert impossible.returncode != 0
    # All ranks fail with this error, but the launcher may end one before it prints the message.
    assert re.search(
        r"^rank [01] of 2 failed: exit: step 1: loss is 5\.\d+, in one process 5\.\d+: relative "
        r"difference \S+, expected less than 0\.0e\+00; gradient norm is ",
        impossible.stderr,
        re.MULTILINE,
    ), impossible.stderr
    assert "step  tokens" not in impossible.stdout
