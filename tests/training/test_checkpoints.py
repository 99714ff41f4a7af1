import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from epcomm import ConfigError, EPConfig, EPGroup, ShapeError
from epcomm.sharding.expert_tensor import ExpertTensor
from epcomm.sharding.shards import sharded_parameters
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error
from epcomm.training.checkpoints import gather_state_dict, load_full_state_dict
from epcomm.weights.quantized import QUANTIZED_KINDS, Mxfp8Weights, QuantizedWeights
from tests.cases.expert_models import NUM_EXPERTS, InOneProcess, OverRanks, expert_weights, tokens
from tests.cases.shared_folder import shared_folder
from tests.sharding.test_expert_tensor import OPTIMIZERS, backward


@pytest.mark.ranks(2)
def test_whole_state_goes_out_and_in_by_torch(group: EPGroup) -> None:
    whole = {name: tensor * 2 for name, tensor in InOneProcess().state_dict().items()}
    for broadcasts in (False, True):
        model = OverRanks(group)
        # torch replaces the tensors of the dictionary that it is given.
        given = {} if broadcasts and group.rank else dict(whole)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcasts)
        set_model_state_dict(model, given, options=options)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for name, tensor in whole.items():
            found = state[name]
            assert torch.equal(found, tensor), name


def saved_and_loaded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Save to a file and load it with weights_only=True."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def files_of_ranks(state: Mapping[str, Any]) -> list[io.BytesIO]:
    """Return what each of two ranks saves. Collective."""
    file = io.BytesIO()
    torch.save(state, file)
    files: list[bytes] = [b"", b""]
    dist.all_gather_object(files, file.getvalue())
    return [io.BytesIO(each) for each in files]


def of_the_other_rank(model: OverRanks) -> dict[str, Tensor]:
    return torch.load(files_of_ranks(model.state_dict())[1 - dist.get_rank()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_goes_on_from_the_state_of_its_own_rank_alone(name: str, group: EPGroup) -> None:
    def step(training: OverRanks, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        backward(training, group)
        optimizer.step()

    model = OverRanks(group)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    step(model, optimizer)
    other = copy.deepcopy(model)
    resumed = OPTIMIZERS[name](list(other.parameters()))
    files = files_of_ranks(optimizer.state_dict())
    resumed.load_state_dict(torch.load(files[group.rank]))
    for each in ((model, optimizer), (other, resumed)):
        step(*each)
    wanted = gather_state_dict(model, group)
    found = gather_state_dict(other, group)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    resumed.load_state_dict(torch.load(files[1 - group.rank]))
    message = r"\.step: .* that rank \(\d,\) of 2 saved .* expected that of rank \(\d,\) of 2"
    with pytest.raises(ShapeError, match=message):
        resumed.step()
    after = gather_state_dict(other, group)
    assert all(torch.equal(after[name], tensor) for name, tensor in found.items())


def without_origin(model: OverRanks) -> dict[str, Tensor]:
    return {
        name: tensor.to_local() if isinstance(tensor, ExpertTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def of_one_rank(model: OverRanks) -> dict[str, Tensor]:
    """Return the state that a run on a single rank saves."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    with EPGroup(groups[dist.get_rank()]) as alone:
        return saved_and_loaded(OverRanks(alone).state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("state_of", "message"),
    [
        (of_the_other_rank, r"that rank \(\d,\) of 2 saved .* expected that of rank \(\d,\) of 2"),
        (of_one_rank, r"that rank \(0,\) of 1 saved .* load it by torch.distributed.checkpoint"),
        (without_origin, "holds 4 experts as an ordinary tensor, and nothing says which"),
    ],
)
def test_experts_of_others_are_refused(
    state_of: Callable[[OverRanks], dict[str, Tensor]], message: str, group: EPGroup
) -> None:
    model = OverRanks(group)
    before = gather_state_dict(model, group)
    state = state_of(model)
    with pytest.raises(ShapeError, match=message):
        model.load_state_dict({name: tensor * 2 for name, tensor in state.items()})
    after = gather_state_dict(model, group)
    name = "experts.down_proj"
    assert torch.equal(after[name], before[name])


@pytest.mark.ranks(2)
def test_one_layer_under_two_names_is_whole_under_both(group: EPGroup) -> None:
    layer = OverRanks(group)
    model = nn.ModuleDict({"first": layer, "again": layer})
    state = gather_state_dict(model, group)
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        assert state[f"first.{name}"].shape[0] == NUM_EXPERTS
        assert torch.equal(state[f"first.{name}"], state[f"again.{name}"])
    load_full_state_dict(model, state)


@pytest.mark.ranks(2)
def test_state_of_one_rank_is_refused_as_a_whole(group: EPGroup) -> None:
    model = OverRanks(group)
    message = "holds 4 experts, expected all 8; gather the state first"
    with pytest.raises(ShapeError, match=message):
        load_full_state_dict(model, model.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
        load_full_state_dict(model, {})


def tensor_by_tensor(model: OverRanks, whole: Mapping[str, Tensor], group: EPGroup) -> None:
    model.to_empty(device=group.device)
    for name, tensor in whole.items():
        load_full_state_dict(model, {name: tensor}, strict=False)


def in_place_of_parameters(model: OverRanks, whole: Mapping[str, Tensor], group: EPGroup) -> None:
    model.load_state_dict(whole, assign=True)


def from_a_checkpoint(model: OverRanks, whole: Mapping[str, Tensor], group: EPGroup) -> None:
    model.to_empty(device=group.device)
    source = OverRanks(group)
    load_full_state_dict(source, whole)
    with shared_folder() as folder:
        save(source.state_dict(), checkpoint_id=folder)
        load(model.state_dict(), checkpoint_id=folder)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fill", [tensor_by_tensor, in_place_of_parameters, from_a_checkpoint])
def test_layer_built_on_meta_is_filled_by(
    fill: Callable[[OverRanks, Mapping[str, Tensor], EPGroup], None], group: EPGroup
) -> None:
    alone = InOneProcess()
    whole = {name: tensor * 2 for name, tensor in alone.state_dict().items()}
    alone.load_state_dict(whole)
    with torch.device("meta"):
        model = OverRanks(group, expert_weights("meta"))
    assert all(parameter.is_meta for parameter in model.parameters())
    fill(model, whole, group)
    loss = model(tokens(group.rank))
    assert relative_error(loss, alone(tokens(group.rank))) <= FP32_TOLERANCE
    loss.backward()
    assert isinstance(model.experts.get_parameter("down_proj").grad, ExpertTensor)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", QUANTIZED_KINDS.values(), ids=QUANTIZED_KINDS)
def test_quantised_experts_go_to_another_number_of_ranks(
    kind: type[QuantizedWeights], group: EPGroup
) -> None:
    weights = kind.from_unquantized(expert_weights())
    model = OverRanks(group, weights)
    states = [gather_state_dict(model, group)]
    groups = [dist.new_group([rank]) for rank in range(group.world_size)]
    with shared_folder() as folder, EPGroup(groups[group.rank]) as alone:
        save(model.state_dict(), checkpoint_id=folder)
        other = OverRanks(alone, kind.from_unquantized(expert_weights()))
        other.experts.weights.gate_up_proj.view(torch.uint8).zero_()
        load(other.state_dict(), checkpoint_id=folder)
        states.append(gather_state_dict(other, alone))
    for state in states:
        for name, tensor in weights.tensors().items():
            assert torch.equal(state[f"experts.{name}"].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_placed", [False, True])
def test_bytes_of_a_checkpoint_are_not_loaded_as_numbers(is_placed: bool, group: EPGroup) -> None:
    weights = Mxfp8Weights.from_unquantized(expert_weights())
    model = OverRanks(group, weights, EPConfig(redundant_experts=2) if is_placed else None)
    name, state = "experts.down_scale", model.state_dict()
    as_bytes = {name: state[name].view(torch.uint8)}
    with shared_folder() as folder:
        save(as_bytes, checkpoint_id=folder)
        message = f"{name} is torch.uint8, expected torch.float8_e8m0fnu .rank . of 2."
        with pytest.raises(CheckpointException, match=message):
            load({name: state[name]}, checkpoint_id=folder)
        load(as_bytes, checkpoint_id=folder)
    chunk = state[name].__create_chunk_list__()[0]
    part = state[name].__get_tensor_shard__(MetadataIndex(name, chunk.offsets))
    for made in (*part.split(1), torch.cat([part])):
        with pytest.raises(ConfigError, match=message):
            made.copy_(part.view(torch.uint8))
    assert torch.equal(gather_state_dict(model, group)[name], weights.down_scale)


@pytest.mark.mpi_ranks(2)
def test_without_a_mesh_state_says_whose_it_is(group: EPGroup) -> None:
    model = OverRanks(group)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    wanted = {name: tensor * 2 for name, tensor in gather_state_dict(model, group).items()}
    assert wanted["experts.down_proj"].shape[0] == NUM_EXPERTS
    load_full_state_dict(model, wanted)
    model.load_state_dict(saved_and_loaded(model.state_dict()))
    gathered = gather_state_dict(model, group)
    assert all(torch.equal(gathered[name], tensor) for name, tensor in wanted.items())
    with pytest.raises(ShapeError, match="nothing says which"):
        model.load_state_dict(dict(model.state_dict()))
    assert len(sharded_parameters(copy.deepcopy(model))) == 2
