from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from epcomm import EPGroup, ShapeError
from epcomm.sharding.expert_tensor import ExpertTensor
from epcomm.sharding.shards import cut_share, shard_of_rank
from tests.cases.expert_models import NUM_EXPERTS

NUM_RANKS = 2
pytestmark = pytest.mark.ranks(NUM_RANKS)
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
