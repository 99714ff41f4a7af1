import re

import pytest
import torch.distributed as dist

from tests.examples.programs import EXAMPLES, run_program

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2)]

TINY = ["--steps", "3", "--layers", "2", "--experts", "8"]


def test_steps_and_decoded_text_agree_with_one_process() -> None:
    output = run_program(EXAMPLES / "train_qwen3_moe.py", *TINY, "--min-loss-fall", "0.1")
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


def test_a_step_that_differs_ends_the_run_with_a_message() -> None:
    message = (
        r"step 1: loss is 5\.\d+, in one process 5\.\d+: relative difference \S+, expected less "
        r"than 0\.0e\+00; gradient norm is "
    )
    with pytest.raises(SystemExit, match=message):
        run_program(EXAMPLES / "train_qwen3_moe.py", *TINY, "--tolerance", "0")
