"""Low latency reads nothing on the host: it runs on tensors without data, where a read raises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

# A process of its own: the fake process group must not meet the one of other tests. bfloat16,
# because grouped_mm knows no other dtype on tensors without data.
PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from epcomm import EPConfig, EPGroup, ExpertParallelExperts, TopKOutput
from epcomm.testing.data import BatchSpec, make_weights, random_ids

dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
spec = BatchSpec(tokens_of_rank=lambda rank, size: 5, choose_ids=random_ids, dtype=torch.bfloat16)
weights = make_weights(spec, 8)
config = EPConfig(mode=sys.argv[1], max_tokens_per_rank=int(sys.argv[2]) or None)
if sys.argv[3] != "0":
    config = EPConfig(mode="normal", max_tokens_per_rank=8, max_recv_slots=int(sys.argv[3]))
experts = ExpertParallelExperts(weights, EPGroup(), config, top_k=2)
with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
    topk = TopKOutput(topk_ids=torch.zeros(5, 2, dtype=torch.int64), topk_weights=torch.zeros(5, 2))
    y = experts(torch.zeros(5, 32, dtype=torch.bfloat16), topk)
    print("shape", list(y.shape), type(y).__name__)
dist.destroy_process_group()
"""


def run_on_fake_tensors(
    mode: str, max_tokens: int, max_slots: int
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, mode, str(max_tokens), str(max_slots)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        check=False,
    )


@pytest.mark.parametrize(
    ("mode", "max_tokens", "max_slots"),
    [("low_latency", 8, 0), ("normal", 8, 40)],
    ids=["low_latency", "normal_budget"],
)
def test_static_path_reads_nothing(mode: str, max_tokens: int, max_slots: int) -> None:
    result = run_on_fake_tensors(mode, max_tokens, max_slots)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["shape", "[5,", "32]", "FakeTensor"]


def test_a_host_read_would_be_noticed() -> None:
    result = run_on_fake_tensors("normal", 0, 0)
    assert result.returncode != 0
    assert "DataDependentOutputException" in result.stderr
