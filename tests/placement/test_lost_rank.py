"""A rank that is killed during a rebalance is named, and the others keep the old placement."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.placement.lost_rank import LOST_RANK

REPO = Path(__file__).parents[2]
NUM_RANKS = 4
# Seconds for all processes, which start on busy cores.
LIMIT_S = 180


@pytest.mark.slow
def test_killed_rank_is_named_and_the_others_keep_the_old_placement() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.placement.lost_rank", *map(str, (rank, NUM_RANKS, port))],
            cwd=REPO,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        texts = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, text in enumerate(texts):
        if rank == LOST_RANK:
            continue
        found = json.loads(text.splitlines()[-1])
        assert found["message"].startswith(f"rebalance: rank {LOST_RANK} did not arrive")
        assert found["num_exchanges"] == 2
        assert found["is_old"]
