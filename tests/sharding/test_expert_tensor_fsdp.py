"""fully_shard beside experts: what would fail or train wrongly is refused before it begins."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from epcomm import ConfigError, EPConfig, EPGroup, ExpertParallelExperts
from epcomm.sharding.shards import sharded_parameters
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error
from epcomm.training.gradients import scale_expert_gradients
from tests.cases.expert_models import TOP_K, InOneProcess, OverRanks, expert_weights, tokens

NUM_RANKS = 2


@pytest.mark.ranks(NUM_RANKS)
def test_experts_over_the_ranks_of_fsdp_are_refused_and_the_model_is_as_before() -> None:
    with EPGroup() as group:
        model = OverRanks(group)
        before = dict(model.named_parameters())
        expected = model(tokens(group.rank))
        message = (
            r"of which ranks \[0, 1\] hold different experts, with a mesh of ranks \[0, 1\] .* "
            r".*scale_expert_gradients\(model, 1 / 2\), then fully_shard\(model, ignored_params="
        )
        with pytest.raises(ConfigError, match=message):
            fully_shard(model)
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        loss = model(tokens(group.rank))
        assert torch.equal(loss, expected)
        loss.backward()
        # What the message says to do.
        model = OverRanks(group)
        scale_expert_gradients(model, 1 / 2)
        fully_shard(model, ignored_params=set(sharded_parameters(model)))
        assert torch.equal(model(tokens(group.rank)), expected)


@pytest.mark.ranks(NUM_RANKS)
def test_what_is_cut_with_experts_over_their_copies_alone_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, NUM_RANKS), mesh_dim_names=("dp", "ep"))
    with EPGroup(mesh["ep"]) as group:
        model = OverRanks(group)
        message = r"2 ordinary parameters came .* nothing would reduce .* over ranks \[0, 1\] "
        with pytest.raises(ConfigError, match=message):
            fully_shard(model, mesh=mesh["dp"])
        model = OverRanks(group)
        fully_shard(model.experts, mesh=mesh["dp"])
        fully_shard(model)
        alone = InOneProcess()(tokens(group.rank))
        assert relative_error(model(tokens(group.rank)), alone) <= FP32_TOLERANCE


@pytest.mark.ranks(NUM_RANKS)
def test_ranks_that_have_the_same_tokens_need_no_reduction() -> None:
    mesh = init_device_mesh("cpu", (1, NUM_RANKS), mesh_dim_names=("dp", "ep"))
    alone = InOneProcess()
    alone(tokens(0)).backward()
    with EPGroup(mesh["ep"]) as group:
        model = OverRanks(group)
        config = EPConfig(mode="standard", replicated=True)
        model.experts = ExpertParallelExperts(expert_weights(), group, config, top_k=TOP_K)
        fully_shard(model, mesh=mesh["dp"])
        model(tokens(0)).backward()
        for name, parameter in alone.named_parameters():
            gradient = model.get_parameter(name).grad
            assert isinstance(gradient, DTensor)
            assert parameter.grad is not None
            assert relative_error(gradient.full_tensor(), parameter.grad) <= FP32_TOLERANCE, name
        dist.barrier()
