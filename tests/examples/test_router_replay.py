import re

import pytest
import torch.distributed as dist

from tests.cases.shared_folder import shared_folder
from tests.examples.programs import EXAMPLES, run_program


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_replay_brings_the_log_probabilities_of_both_programs_closer() -> None:
    with shared_folder() as folder:
        written = run_program(EXAMPLES / "router_replay.py", "generate", str(folder))
        dist.barrier()
        output = run_program(EXAMPLES / "router_replay.py", "train", str(folder))
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
