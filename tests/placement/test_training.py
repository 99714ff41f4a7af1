import copy
import io
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from epcomm import ConfigError, EPConfig, EPGroup, ShapeError, balance
from epcomm.sharding.expert_tensor import ExpertTensor
from epcomm.sharding.shards import sharded_parameters
from epcomm.testing.oracle import relative_error
from epcomm.training.checkpoints import gather_state_dict, load_full_state_dict
from epcomm.training.gradients import clip_grad_norm, scale_expert_gradients, sum_replica_gradients
from tests.cases.expert_models import NUM_EXPERTS, InOneProcess, OverRanks, tokens
from tests.cases.expert_training import LOSS_TOLERANCE, Training, loads
from tests.cases.meshes import mesh_of
from tests.cases.shared_folder import shared_folder
from tests.placement.layers import gather_local

pytestmark = pytest.mark.ranks(2)
# The relative error of a sum in float32 whose order differs.
SAME = 1e-6


def expected_losses(number: int) -> list[float]:
    model, num_ranks = InOneProcess(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(number):
        optimizer.zero_grad()
        batches = [tokens(step * num_ranks + rank) for rank in range(num_ranks)]
        loss = torch.stack([model(batch) for batch in batches]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        losses.append(loss.item())
    return losses


def expect_equal_copies(model: OverRanks) -> None:
    placement = model.experts.placement
    for held in gather_local(model.experts, model.experts.expert_parameters()).values():
        for copies in placement.replicas:
            assert all(torch.equal(held[copies[0]], held[copy]) for copy in copies)


@pytest.mark.parametrize("num_redundant", [0, 4])
def test_losses_are_those_of_one_process_while_experts_move(num_redundant: int) -> None:
    training = Training(2, num_redundant)
    losses = []
    for number in range(4):
        losses.append(training.step(number))
        training.model.experts.rebalance(training.place(number), training.optimizer)
        expect_equal_copies(training.model)
    training.close()
    assert losses == pytest.approx(expected_losses(4), rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("num_redundant", [4, 8])
def test_norms_count_each_expert_once(num_redundant: int) -> None:
    """With 8 copies a rank counts nothing, because the other one has all of its experts."""
    training, alone = Training(2, num_redundant), InOneProcess()
    training.model.experts.rebalance(training.place(0))
    training.backward(0)
    torch.stack([alone(tokens(rank)) for rank in range(2)]).mean().backward()
    for order in (2.0, float("inf")):
        norm = float(nn.utils.clip_grad_norm_(alone.parameters(), 1e9, order))
        for foreach in (False, True):
            parameters = training.model.parameters()
            found = nn.utils.clip_grad_norm_(parameters, 1e9, order, foreach=foreach)
            assert float(found) == pytest.approx(norm, rel=SAME)
    norm = float(nn.utils.clip_grad_norm_(alone.parameters(), 1e9))
    assert float(clip_grad_norm(training.model, training.group, 1e9)) == pytest.approx(
        norm, rel=SAME
    )
    training.close()


# The sum of two numbers does not depend on their order.
@pytest.mark.slow
@pytest.mark.ranks(4)
def test_gradients_of_four_copies_are_equal_to_the_bit() -> None:
    training = Training(4, 8)
    experts = training.model.experts
    load = [1000.0, *[1.0] * (NUM_EXPERTS - 1)]
    experts.rebalance(balance(load, num_ranks=4, num_physical_experts=experts.num_experts))
    training.backward(0)
    copies = experts.placement.replicas[0]
    assert len(copies) == 4
    grads = {n: p.grad for n, p in experts.expert_parameters().items() if p.grad is not None}
    for held in gather_local(experts, grads).values():
        assert held[copies[0]].any()
        assert all(torch.equal(held[copies[0]], held[copy]) for copy in copies)
    training.close()


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_training_goes_on_over_4_2_and_1_ranks_with_other_copies(options: dict[str, bool]) -> None:
    losses: list[float] = []
    with shared_folder() as folder:
        for ep_size, num_redundant in ((4, 4), (2, 2), (4, None), (1, 0), (4, 8)):
            training = Training(ep_size, num_redundant, **options)
            if num_redundant is not None:
                training.model.experts.rebalance(training.place(len(losses)))
            if losses:
                training.load(folder / str(len(losses)))
            for _ in range(2):
                losses.append(training.step(len(losses)))
            if num_redundant is not None:
                expect_equal_copies(training.model)
                training.model.experts.rebalance(training.place(99), training.optimizer)
            training.save(folder / str(len(losses)))
            training.close()
    assert losses == pytest.approx(expected_losses(len(losses)), rel=LOSS_TOLERANCE)


def test_state_is_in_logical_order() -> None:
    training, whole = Training(2, 4), InOneProcess().state_dict()
    model, group = training.model, training.group
    model.experts.rebalance(training.place(1))
    gathered = gather_state_dict(model, group)
    assert set(gathered) == set(whole)
    for name, tensor in whole.items():
        assert torch.equal(gathered[name], tensor)
        held = model.state_dict()[name]
        if isinstance(held, ExpertTensor):
            assert torch.equal(held.full_tensor(), tensor)
    load_full_state_dict(model, {name: tensor * 2 for name, tensor in whole.items()})
    for name, tensor in gather_state_dict(model, group).items():
        assert torch.equal(tensor, whole[name] * 2)
    expect_equal_copies(model)
    training.close()


def test_a_saved_part_is_loaded_into_its_placement_alone() -> None:
    training = Training(2, 4)
    model = training.model
    model.experts.rebalance(training.place(1))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for name, tensor in gather_state_dict(model, training.group).items():
        assert torch.equal(tensor, InOneProcess().state_dict()[name])
    held = model.experts.placement
    model.experts.rebalance(replace(held, physical_to_logical=held.physical_to_logical[::-1]))
    with pytest.raises(ShapeError, match="the placement of the layer"):
        model.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    training.close()


def test_copies_of_a_layer_and_random_numbers_know_the_placement() -> None:
    training = Training(2, 4)
    model = training.model
    model.experts.rebalance(training.place(1))
    other = copy.deepcopy(model)
    other.experts.rebalance(training.place(2))
    expect_equal_copies(model)
    expect_equal_copies(other)
    for each in (model, other):
        torch.manual_seed(5)
        nn.init.normal_(each.experts.gate_up_proj)
        expect_equal_copies(each)
    found = gather_state_dict(model, training.group)
    for name, tensor in gather_state_dict(other, training.group).items():
        assert torch.equal(tensor, found[name])
    parameter = model.experts.get_parameter("gate_up_proj")
    whole = found["experts.gate_up_proj"]
    assert relative_error(parameter.detach().sum(), whole.sum()) <= 1e-5
    assert torch.equal(parameter.detach()[3], whole[3])
    with pytest.raises(ShapeError, match="several ranks"):
        parameter.detach()[2:4]
    training.close()


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_fsdp_cuts_the_rest_of_a_model_whose_experts_move() -> None:
    losses, num_ranks = [], dist.get_world_size()
    with EPGroup() as group, shared_folder() as folder:
        model = OverRanks(group, config=EPConfig(redundant_experts=4))
        scale_expert_gradients(model, 1 / num_ranks)
        fully_shard(model, ignored_params=set(sharded_parameters(model)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for number in range(3):
            loss = model(tokens(number * num_ranks + group.rank))
            loss.backward()
            sum_replica_gradients(model)
            clip_grad_norm(model, group, 0.01)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(group.collectives.all_gather(loss.detach()).mean()))
            placement = balance(loads(number), num_ranks=4, num_physical_experts=12)
            model.experts.rebalance(placement, optimizer)
            expect_equal_copies(model)
        states = get_state_dict(model, optimizer)
        save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
        # Load without FSDP, in two groups of two ranks, with different copies.
        training = Training(2, 2)
        training.model.experts.rebalance(training.place(5))
        training.load(folder)
        losses += [training.step(number) for number in (3, 4)]
        training.close()
    assert losses == pytest.approx(expected_losses(5), rel=LOSS_TOLERANCE)


def test_placed_experts_are_not_cut_and_cut_ones_do_not_move() -> None:
    training = Training(2, 4)
    experts = training.model.experts
    cut = OverRanks(training.group, config=EPConfig(redundant_experts=4))
    fully_shard(cut.experts, mesh=mesh_of((1, 2), ("dp", "ep"))["dp"])
    for use in (lambda: cut(tokens(0)), cut.state_dict):
        with pytest.raises(ConfigError, match="may move its experts, and the pieces of FSDP"):
            use()
    held: object = experts.get_parameter("down_proj")
    assert isinstance(held, ExpertTensor)
    plain = DTensor.from_local(held._local_tensor, held.device_mesh, held.placements)
    experts.down_proj = nn.Parameter(plain)
    with pytest.raises(ConfigError, match="down_proj is DTensor"):
        experts.rebalance(training.place(1))
    training.close()
