"""Low latency reads nothing on the host: it runs on fake tensors, where a read raises."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, TopKOutput
from epcomm.testing.data import BatchSpec, make_weights, random_ids

# bfloat16, because grouped_mm supports no other dtype on fake tensors.
SPEC = BatchSpec(tokens_of_rank=lambda rank, size: 5, choose_ids=random_ids, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def fake_process_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def run(config: EPConfig) -> torch.Tensor:
    experts = ExpertParallelExperts(make_weights(SPEC, 8), EPGroup(), config, top_k=2)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        ids, weights = torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2)
        topk = TopKOutput(topk_ids=ids, topk_weights=weights)
        return experts(torch.zeros(5, 32, dtype=torch.bfloat16), topk)


@pytest.mark.parametrize(
    "config",
    [
        EPConfig(mode="low_latency", max_tokens_per_rank=8),
        EPConfig(mode="normal", max_tokens_per_rank=8, max_recv_slots=40),
        EPConfig(mode="low_latency", max_tokens_per_rank=8, combine_dtype="mxfp8"),
    ],
    ids=["low_latency", "normal_budget", "quantised sums"],
)
def test_static_path_reads_nothing(config: EPConfig) -> None:
    y = run(config)
    assert y.shape == (5, 32)
    assert isinstance(y, FakeTensor)


def test_a_host_read_would_be_noticed() -> None:
    with pytest.raises(DataDependentOutputException):
        run(EPConfig(mode="normal"))
