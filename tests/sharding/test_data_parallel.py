import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from epcomm import ConfigError, EPConfig, EPGroup, ExpertParallelExperts, ShapeError
from epcomm.sharding.shards import sharded_parameters
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error
from epcomm.training.checkpoints import gather_state_dict
from epcomm.training.gradients import scale_expert_gradients
from tests.cases.expert_models import TOP_K, InOneProcess, OverRanks, expert_weights, tokens

NUM_RANKS = 2
pytestmark = pytest.mark.ranks(NUM_RANKS)

GIVEN_TO_DDP = "DistributedDataParallel was given expert parameters, such as "


def wrap_in_ddp_under_a_default_device(model: nn.Module) -> None:
    with torch.device("cpu"):
        DistributedDataParallel(model)


def wrap_in_ddp_that_delays_experts(model: nn.Module) -> None:
    experts = [(n, p) for n, p in model.named_parameters() if n.startswith("experts")]
    DistributedDataParallel(
        model,
        delay_all_reduce_named_params=experts,
        param_to_hook_all_reduce=model.get_parameter("linear.weight"),
    )


def reduce_over_experts(model: nn.Module) -> None:
    model(tokens(dist.get_rank())).backward()
    for parameter in sharded_parameters(model):
        dist.all_reduce(parameter.grad)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (
            DistributedDataParallel,
            rf"^{GIVEN_TO_DDP}experts.gate_up_proj .* 1 / 2\), .*prepare_trainer",
        ),
        # A module that has only expert parameters, which C++ code of DDP treated as ordinary ones.
        (
            lambda model: DistributedDataParallel(model.get_submodule("experts")),
            rf"^{GIVEN_TO_DDP}gate_up_proj .* call .*ignore_experts_in_ddp",
        ),
        (lambda model: DistributedDataParallel(model, init_sync=False), rf"^{GIVEN_TO_DDP}"),
        (wrap_in_ddp_under_a_default_device, rf"^{GIVEN_TO_DDP}"),
        (wrap_in_ddp_that_delays_experts, rf"^{GIVEN_TO_DDP}"),
        (reduce_over_experts, r"of which ranks \[0, 1\] hold different experts"),
    ],
)
def test_data_parallelism_over_different_experts_is_refused(
    misuse: Callable[[nn.Module], object], message: str, group: EPGroup
) -> None:
    model = OverRanks(group)
    before = gather_state_dict(copy.deepcopy(model), group)
    with pytest.raises(ShapeError, match=message):
        misuse(model)
    after = gather_state_dict(model, group)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_experts_over_fsdp_ranks_are_refused_by_torch_and_may_be_left_out(group: EPGroup) -> None:
    # docs/troubleshooting.md quotes this message.
    text = "value was None when it should not be|Cannot concatenate"
    with pytest.raises((RuntimeError, TypeError), match=text):
        fully_shard(OverRanks(group))
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",))
    with pytest.raises((RuntimeError, TypeError), match=text):
        fully_shard(OverRanks(group).experts, mesh=mesh)
    model = OverRanks(group)
    expected = model(tokens(group.rank))
    scale_expert_gradients(model, 1 / 2)
    fully_shard(model, ignored_params=set(sharded_parameters(model)))
    assert torch.equal(model(tokens(group.rank)), expected)


class Scaled(nn.Module):
    """A parametrisation with an ordinary parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


def cut_all(model: OverRanks, copies: DeviceMesh) -> None:
    fully_shard(model, mesh=copies)


def cut_as_one_group(model: OverRanks, copies: DeviceMesh) -> None:
    fully_shard([model.linear, model.experts], mesh=copies)
    fully_shard(model)


def cut_with_a_parametrisation(model: OverRanks, copies: DeviceMesh) -> None:
    nn.utils.parametrize.register_parametrization(model.experts, "down_proj", Scaled())
    fully_shard(model.experts, mesh=copies)


@pytest.mark.parametrize("cut", [cut_all, cut_as_one_group, cut_with_a_parametrisation])
def test_what_is_cut_with_experts_over_their_copies_alone_is_refused(
    cut: Callable[[OverRanks, DeviceMesh], None],
) -> None:
    mesh = init_device_mesh("cpu", (1, NUM_RANKS), mesh_dim_names=("dp", "ep"))
    with EPGroup(mesh["ep"]) as group:
        model = OverRanks(group)
        cut(model, mesh["dp"])
        message = r"together with ordinary parameters, .* reduce .* over ranks \[0, 1\] "
        for _ in range(2):
            with pytest.raises(ConfigError, match=message):
                model(tokens(group.rank))


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
            assert relative_error(gradient.full_tensor(), parameter.grad) <= FP32_TOLERANCE, name
        dist.barrier()
