"""Low latency reads nothing on the host: it runs on fake tensors, where a read raises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]

# Run in a subprocess, so that the fake process group does not conflict with that of other tests.
# Use bfloat16, because grouped_mm supports no other dtype on fake tensors.
PROGRAM = """
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from epcomm import EPConfig, EPGroup, ExpertParallelExperts, TopKOutput
from epcomm.testing.data import BatchSpec, make_weights, random_ids

CONFIGS = {
    "low_latency": EPConfig(mode="low_latency", max_tokens_per_rank=8),
    "normal_budget": EPConfig(mode="normal", max_tokens_per_rank=8, max_recv_slots=40),
    "normal": EPConfig(mode="normal"),
}
dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
spec = BatchSpec(tokens_of_rank=lambda rank, size: 5, choose_ids=random_ids, dtype=torch.bfloat16)
weights = make_weights(spec, 8)
for name, config in CONFIGS.items():
    experts = ExpertParallelExperts(weights, EPGroup(), config, top_k=2)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        ids, weight = torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2)
        try:
            y = experts(
                torch.zeros(5, 32, dtype=torch.bfloat16),
                TopKOutput(topk_ids=ids, topk_weights=weight),
            )
        except DataDependentOutputException:
            print(name, "reads on the host")
        else:
            print(name, list(y.shape), type(y).__name__)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Return the output of the program, one line per config."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()


@pytest.mark.parametrize("name", ["low_latency", "normal_budget"])
def test_static_path_reads_nothing(name: str, lines: list[str]) -> None:
    assert f"{name} [5, 32] FakeTensor" in lines


def test_a_host_read_would_be_noticed(lines: list[str]) -> None:
    assert "normal reads on the host" in lines
