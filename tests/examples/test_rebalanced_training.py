import json
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cases.shared_folder import shared_folder
from tests.examples.programs import EXAMPLES, run_program

MODEL = ["--layers", "1", "--experts", "16", "--skew", "8", "--steps", "20"]
SAVED = ["--checkpoint-step", "15", "--checkpoint"]


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "run.json").read_text())["losses"]


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_losses_are_those_without_moves_and_the_load_of_a_rank_falls() -> None:
    with shared_folder() as folder:
        still, moved = folder / "still", folder / "moved"
        run_program(EXAMPLES / "train_qwen3_moe.py", *MODEL, *SAVED, str(still))
        placed = [*MODEL, "--redundant-experts", "8", *SAVED, str(moved)]
        output = run_program(EXAMPLES / "train_qwen3_moe.py", *placed)
        dist.barrier()
        # The state of placed experts is that of the model, without copies.
        resumed = run_program(EXAMPLES / "train_qwen3_moe.py", *MODEL, "--resume", str(moved))
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
