import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from epcomm import EPConfig, EPGroup, EPTimeout, HandleError
from epcomm.sharding.expert_tensor import ExpertTensor
from tests.cases.expert_models import OverRanks, tokens

pytestmark = pytest.mark.ranks(2)

# Operations that communicate, by their names in messages.
COMMUNICATING: dict[str, Callable[[Tensor], object]] = {
    "vector_norm": lambda p: p.norm(),
    "sum": lambda p: p.sum(),
    "std": lambda p: p.std(),
    "sort": lambda p: p.sort(dim=0),
    "full_tensor": lambda p: p.full_tensor(),  # type: ignore[attr-defined]
    "select": lambda p: p[0],
    "foreach_norm": lambda p: torch.nn.utils.get_total_norm([p, torch.ones(2)], foreach=True),
}
LOCAL: dict[str, Callable[[Tensor], object]] = {
    "transpose": lambda p: p.transpose(1, 2),
    "sum of rows": lambda p: p.sum(dim=-1),
    "add": lambda p: p + 1,
    "print": repr,
    "clone": lambda p: p.detach().clone(),
    "foreach": lambda p: torch._foreach_mul([p], 2.0),  # pyright: ignore[reportPrivateImportUsage]
}


def parameter_of(model: OverRanks) -> Tensor:
    return next(iter(model.experts.parameters())).detach()


@pytest.mark.parametrize("name", COMMUNICATING)
def test_operation_of_one_rank_is_named_and_the_group_goes_on(name: str, group: EPGroup) -> None:
    model = OverRanks(group)
    loss = model(tokens(group.rank)).detach()
    expected = COMMUNICATING[name](parameter_of(model))
    text = f"rank 0 is in {name} of an expert parameter while rank 1 is in dispatch of"

    def call() -> object:
        if group.rank == 0:
            return COMMUNICATING[name](parameter_of(model))
        return model(tokens(group.rank))

    with pytest.raises(HandleError, match=text) as caught:
        call()
    assert "to_local()" in str(caught.value)
    assert torch.equal(model(tokens(group.rank)), loss)
    again = COMMUNICATING[name](parameter_of(model))
    assert str(again) == str(expected)


def test_local_operations_of_one_rank_wait_for_nobody(group: EPGroup) -> None:
    model = OverRanks(group)
    if group.rank == 0:
        for run in LOCAL.values():
            run(parameter_of(model))
    assert model(tokens(group.rank)).isfinite()


def test_an_operation_that_no_other_rank_joins_ends() -> None:
    process_group = dist.new_group()
    with EPGroup(process_group) as group:
        model = OverRanks(group, config=EPConfig(timeout_s=1.0))
        if group.rank == 0:
            text = "vector_norm of an expert parameter: rank 1 did not arrive"
            with pytest.raises(EPTimeout, match=text):
                parameter_of(model).norm()
        dist.barrier()


def test_gradients_have_a_norm_after_their_group_is_freed() -> None:
    group = EPGroup()
    model = OverRanks(group)
    gradients = [parameter.detach() * 1 for parameter in model.experts.parameters()]
    group.close()
    del model, group
    gc.collect()
    assert all(isinstance(each, ExpertTensor) and each.owner is not None for each in gradients)
    norms = [get_total_norm(gradients, foreach=foreach) for foreach in (True, False)]
    torch.testing.assert_close(norms[0], norms[1])
