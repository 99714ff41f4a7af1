import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor

from epcomm import EPGroup, ShapeError
from epcomm.sharding.expert_tensor import ExpertTensor
from epcomm.sharding.shards import cut_share, piece_of, shard_of_rank
from tests.cases.expert_models import NUM_EXPERTS, OverRanks, some_parameter

NUM_RANKS = 2
pytestmark = pytest.mark.ranks(NUM_RANKS)
NUM_LOCAL = NUM_EXPERTS // NUM_RANKS


def expected_values(parameter: nn.Parameter) -> torch.Tensor:
    """Make values [P, ...], with a different number in every element."""
    # In torch 2.11 the shape of a DTensor is a tuple.
    shape = torch.Size(parameter.shape)
    return torch.arange(shape.numel(), dtype=torch.float32).view(shape)


def own_part(whole: torch.Tensor, group: EPGroup) -> torch.Tensor:
    return whole[group.rank * NUM_LOCAL :][:NUM_LOCAL]


Parts = Callable[[torch.Tensor], Iterable[torch.Tensor]]
# Views that cut all experts; values copied to the parts must reach the parameter.
WAYS: dict[str, Parts] = {
    "index": lambda p: (p[expert] for expert in range(-NUM_EXPERTS, 0)),
    "select": lambda p: (p.select(-3, expert) for expert in range(NUM_EXPERTS)),
    "narrow": lambda p: (p.narrow(-3, first, 2) for first in range(0, NUM_EXPERTS, 2)),
    "data": lambda p: (p.data[expert] for expert in range(NUM_EXPERTS)),
    "loop": iter,
    "split": lambda p: p.split(NUM_LOCAL),
}


@pytest.mark.parametrize("way", [*WAYS, "assigned", "neighbours"])
def test_experts_written_one_by_one_are_kept(way: str, group: EPGroup) -> None:
    with torch.no_grad():
        parameter = some_parameter(group)
        values = expected_values(parameter)
        if way in WAYS:
            for part, value in zip(WAYS[way](parameter), WAYS[way](values), strict=True):
                part.copy_(value)
        elif way == "assigned":
            for expert in range(NUM_EXPERTS):
                parameter[expert] = values[expert]
        else:
            for first in range(0, NUM_EXPERTS, 2):
                parameter[first : first + 2] = values[first : first + 2]
        assert torch.equal(piece_of(parameter), own_part(values, group))
        for expert in range(NUM_EXPERTS):
            assert torch.equal(parameter[expert], values[expert]), "a rank reads others' experts"


def test_expert_is_sent_by_its_rank_alone(monkeypatch: pytest.MonkeyPatch, group: EPGroup) -> None:
    with torch.no_grad():
        parameter = some_parameter(group)
        values = expected_values(parameter)
        parameter.data = values
        monkeypatch.delattr(DTensor, "full_tensor")
        assert torch.equal(parameter[5], values[5])
        assert torch.equal(parameter[1:3], values[1:3])


@pytest.mark.parametrize(
    "total",
    [
        lambda experts: experts.sum(),
        lambda experts: torch.mean(experts.square()),
        lambda experts: (experts.exp().sum(0) * torch.arange(8.0)).sum(),
        lambda experts: (experts.sum(1) * torch.arange(8.0)[:, None]).sum(),
    ],
    ids=["sum", "mean", "over experts", "in experts"],
)
def test_gradient_of_a_sum_is_this_ranks_part(
    total: Callable[[torch.Tensor], torch.Tensor], group: EPGroup
) -> None:
    parameter = some_parameter(group)
    total(parameter).backward()
    whole = parameter.full_tensor().detach().requires_grad_()
    total(whole).backward()
    gradient = parameter.grad
    is_piece = isinstance(gradient, ExpertTensor)
    piece = gradient.to_local() if is_piece else own_part(gradient, group)
    torch.testing.assert_close(piece, own_part(whole.grad, group))


def test_gradient_of_some_experts_is_this_ranks_part(group: EPGroup) -> None:
    parameter = some_parameter(group)
    factors = torch.arange(1.0, NUM_EXPERTS + 1)
    loss = parameter[0].sum() + parameter[6:8].sum() * 3
    for expert, factor in zip(parameter, factors, strict=True):
        loss = loss + expert.sum() * factor
    loss.backward()
    expected = factors + torch.tensor([1.0, 0, 0, 0, 0, 0, 3, 3])
    assert isinstance(parameter.grad, ExpertTensor)
    whole = expected.view(-1, 1, 1).expand(parameter.shape)
    assert torch.equal(parameter.grad.to_local(), own_part(whole, group))


def test_every_other_expert_of_a_rank_is_written(group: EPGroup) -> None:
    with torch.no_grad():
        parameter = some_parameter(group)
        values = expected_values(parameter)
        for first in (0, 1, 4, 5):
            parameter[first : first + 3 : 2] = values[first : first + 3 : 2]
        assert torch.equal(piece_of(parameter), own_part(values, group))
        assert torch.equal(parameter[5:8:2], values[5:8:2])


def test_neighbours_on_several_ranks_are_refused(group: EPGroup) -> None:
    with torch.no_grad():
        parameter = some_parameter(group)
        with pytest.raises(ShapeError, match=r"experts \[3, 4\] .* are of several ranks"):
            parameter[3:5] = 0.0
        parameter[:] = 0.0
        assert not piece_of(parameter).any()


def test_data_that_is_assigned_is_used(group: EPGroup) -> None:
    model = OverRanks(group)
    parameter = model.experts.get_parameter("down_proj")
    values = expected_values(parameter)
    tenfold = copy.deepcopy(parameter)
    tenfold.data = tenfold.data * 10
    for value in (values, own_part(values, group).clone(), tenfold.detach()):
        parameter.data = value
        local = value.to_local() if isinstance(value, ExpertTensor) else value
        expected = own_part(local, group) if len(local) == NUM_EXPERTS else local
        assert torch.equal(piece_of(parameter), expected)
        assert torch.equal(model.experts.weights.tensors()["down_proj"], expected)
        assert parameter.shape == values.shape
    parameter.data = parameter.data.to(torch.bfloat16)
    assert parameter.dtype is piece_of(parameter).dtype is torch.bfloat16
    with pytest.raises(ShapeError, match="pass this rank's 4 experts or all 8"):
        parameter.data = values[:3]


def test_memory_of_experts_can_be_shared_with_other_processes(group: EPGroup) -> None:
    model = OverRanks(group)
    model.share_memory()
    assert all(piece_of(parameter).is_shared() for parameter in model.parameters())


# Placements: as the ranks hold them, and moved, with one expert on both ranks.
PLACED = {"in order": None, "moved": (3, 0, 7, 5, 1, 6, 4, 2, 0, 1)}

COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "list": lambda p: p[[0, 5]],
    "tensor": lambda p: p[torch.tensor([7, 0, 0])],
    "mask": lambda p: p[p > 0],
    "mask of experts": lambda p: p[torch.arange(NUM_EXPERTS) > 2],
    "index_select": lambda p: p.index_select(0, torch.tensor([5, 2])),
    "index_select inside experts": lambda p: p.index_select(1, torch.tensor([2])),
    "gather": lambda p: p.gather(0, torch.full((1, 4, 3), 6)),
}
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "unique": lambda p: p.unique(),
    "masked_select": lambda p: torch.masked_select(p, p > 0),
    "nonzero": lambda p: (p > 0).nonzero(),
}


def whole_tensor() -> Tensor:
    return torch.randn(NUM_EXPERTS, 4, 3, generator=torch.Generator().manual_seed(5))


def spread(whole: Tensor, group: EPGroup, placed: tuple[int, ...] | None) -> ExpertTensor:
    shard = shard_of_rank(
        rank=group.rank,
        world_size=group.world_size,
        num_experts=NUM_EXPERTS,
        physical_to_logical=placed,
    )
    return ExpertTensor.of_share(cut_share(whole, shard).clone(), group.mesh, shard)


@pytest.mark.parametrize("placed", PLACED)
def test_values_are_those_of_the_whole(placed: str, group: EPGroup) -> None:
    whole = whole_tensor()
    parameter = spread(whole, group, PLACED[placed])
    for name, run in (COPIES | VALUES).items():
        found = run(parameter)
        assert not isinstance(found, ExpertTensor), name
        assert torch.equal(found, run(whole)), name


def test_gradients_of_copies_are_those_of_the_whole(group: EPGroup) -> None:
    for name, run in COPIES.items():
        whole = whole_tensor().requires_grad_()
        parameter = spread(whole.detach(), group, None).requires_grad_()
        for each in (parameter, whole):
            (run(each) ** 2).sum().backward()
        assert isinstance(parameter.grad, ExpertTensor), name
        assert torch.equal(parameter.grad.full_tensor(), whole.grad), name


@pytest.mark.parametrize("placed", PLACED)
def test_parameters_are_compared_over_all_ranks(placed: str, group: EPGroup) -> None:
    whole = whole_tensor()
    near, far = whole + 1e-9, whole.clone()
    far[6, 0, 0] += 1.0
    parameter = spread(whole, group, PLACED[placed])
    for other, expected in ((near, True), (far, False)):
        for each in (other, spread(other, group, PLACED[placed])):
            assert torch.allclose(parameter, each) is expected
            assert torch.allclose(each, parameter, rtol=0.0, atol=1e-3) is expected
            assert parameter.allclose(each) is expected
    assert torch.equal(parameter, spread(whole, group, PLACED[placed]))
    assert not torch.equal(parameter, spread(far, group, PLACED[placed]))
    if placed != "in order":
        with pytest.raises(ShapeError, match="are placed differently on the ranks"):
            torch.allclose(parameter, spread(whole, group, None))


def test_memory_and_values_of_one_process_are_refused_in_one_sentence(group: EPGroup) -> None:
    parameter = spread(whole_tensor(), group, None)
    for name in ("numpy", "storage", "tolist", "__array__"):
        text = rf"Tensor\.{name}: an expert parameter of \[8, 4, 3\] has no .* holds \[4, 4, 3\]"
        with pytest.raises(ShapeError, match=text + r".*call it on to_local\(\)"):
            getattr(parameter, name)()


def test_torch_copies_a_state_before_it_writes_it(group: EPGroup) -> None:
    parameter = spread(whole_tensor(), group, None)
    # async_save copies by memory where data_ptr() is not 0.
    staged = StateDictStager().stage({"weight": parameter})["weight"]
    parameter.to_local().zero_()
    assert torch.equal(staged.full_tensor(), whole_tensor())
