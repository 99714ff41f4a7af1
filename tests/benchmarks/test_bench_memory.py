"""The program that compares dispatch and combine with copies: its bytes, and a run on two ranks."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_memory import MovedBytes, run
from epcomm.bench.options import BenchOptions
from epcomm.config import Mode
from epcomm.testing.data import RankBatch

OPTIONS = BenchOptions(
    tokens=(4,),
    hidden=32,
    experts=4,
    top_k=2,
    modes=(Mode.NORMAL,),
    backends=("shared_memory",),
    iterations=2,
    warm_up=1,
)


def test_bytes_are_those_of_the_worked_example() -> None:
    """Eight experts of one token are on three ranks of four."""
    x = torch.zeros(1, 2048, dtype=torch.bfloat16)
    ids = torch.tensor([[0, 1, 2, 3, 4, 5, 8, 9]])
    batch = RankBatch(x=x, topk_ids=ids, topk_weights=torch.ones(1, 8), dy=x)
    moved = MovedBytes.of([batch], num_local=4)
    assert moved.copied == 3 * (4096 + 64) + 3 * 4096
    assert moved.touched == 4096 + 3 * 4160 + 8 * 4096 + 2 * 3 * 4096 + 4096


@pytest.mark.ranks(2)
def test_epcomm_is_timed_beside_copies() -> None:
    report, beside = run(OPTIONS)
    assert [each.backend for each in report.results] == [
        "shared_memory",
        "expert_rows",
        "all_gather",
    ]
    assert beside["copy_gb_per_s"] > 0
    assert 0 < beside["copied_over_copy_rate"] < beside["touched_over_copy_rate"]
