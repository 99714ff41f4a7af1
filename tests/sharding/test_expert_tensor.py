import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.torch_version import TorchVersion

from epcomm import ConfigError, EPGroup, ExpertParallelExperts, Int8ChannelWeights, ShapeError
from epcomm.errors import PickleRefused
from epcomm.sharding.expert_tensor import ExpertTensor
from epcomm.sharding.shards import expert_shards, sharded_parameters
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error
from epcomm.training.checkpoints import gather_state_dict
from epcomm.training.gradients import sum_replicated_gradients
from tests.cases.expert_models import (
    NUM_EXPERTS,
    TOP_K,
    InOneProcess,
    OverRanks,
    expert_weights,
    some_parameter,
    tokens,
)

NUM_RANKS = 2
pytestmark = pytest.mark.ranks(NUM_RANKS)
NUM_STEPS = 3

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.01),
    "adamw-foreach": lambda given: torch.optim.AdamW(given, lr=0.01, foreach=True),
    "adamw-fused": lambda given: torch.optim.AdamW(given, lr=0.01, fused=True),
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, foreach=True),
    "adafactor": lambda given: torch.optim.Adafactor(given, lr=0.01),
    "adafactor-foreach": lambda given: torch.optim.Adafactor(given, lr=0.01, foreach=True),
    "rprop": lambda given: torch.optim.Rprop(given, lr=0.01),
}


def backward(model: nn.Module, group: EPGroup) -> None:
    (model(tokens(group.rank)) / NUM_RANKS).backward()
    sum_replicated_gradients(model, group)


def backward_in_one_process(model: nn.Module) -> None:
    for rank in range(NUM_RANKS):
        (model(tokens(rank)) / NUM_RANKS).backward()


def assert_equal_states(model: nn.Module, expected: nn.Module, group: EPGroup) -> None:
    state, wanted = gather_state_dict(model, group), expected.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert relative_error(state[name], tensor) <= FP32_TOLERANCE, name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_list_of_parameters_trains_as_in_one_process(name: str, group: EPGroup) -> None:
    """The norm, which is over the experts of all ranks, and then the step and an average."""
    model, alone = OverRanks(group), InOneProcess()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average_alone = AveragedModel(alone, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    optimizer_alone = OPTIMIZERS[name](list(alone.parameters()))
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        optimizer_alone.zero_grad()
        backward(model, group)
        backward_in_one_process(alone)
        wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        foreach = True if name.endswith("foreach") else None
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)
        assert wanted > 0.01, "else nothing would be clipped"
        assert relative_error(norm, wanted) <= FP32_TOLERANCE
        optimizer.step()
        optimizer_alone.step()
        average.update_parameters(model)
        average_alone.update_parameters(alone)
    assert_equal_states(model, alone, group)
    assert_equal_states(average.module, average_alone.module, group)
    assert relative_error(average(tokens(0)), average_alone(tokens(0))) <= FP32_TOLERANCE


def test_plain_tensors_train_and_what_was_frozen_stays_so(group: EPGroup) -> None:
    weights = expert_weights()
    frozen = weights.with_tensors(
        {role: nn.Parameter(t, requires_grad=False) for role, t in weights.tensors().items()}
    )
    for given, is_trained in [
        (weights, True),
        (frozen, False),
        (Int8ChannelWeights.from_unquantized(weights), False),
    ]:
        layer = ExpertParallelExperts(given, group, top_k=TOP_K)
        assert {p.requires_grad for p in layer.parameters()} == {is_trained}
        assert {type(p) for p in layer.parameters()} == {ExpertTensor}


def test_penalty_on_weights_counts_the_experts_of_all_ranks(group: EPGroup) -> None:
    def penalised(model: nn.Module, experts: list[Tensor], x: Tensor) -> Tensor:
        return model(x) + sum(e.square().sum() + e.norm() for e in experts)

    model, alone = OverRanks(group), InOneProcess()
    loss = penalised(model, list(model.experts.parameters()), tokens(group.rank))
    loss.backward()
    losses = [
        penalised(alone, list(alone.experts.parameters()), tokens(rank))
        for rank in range(NUM_RANKS)
    ]
    assert relative_error(loss, losses[group.rank]) <= FP32_TOLERANCE
    # The penalty is one of the whole model, not one of each rank.
    (losses[0] + alone(tokens(1))).backward()
    for name, shard in expert_shards(model).items():
        wanted = alone.get_parameter(name).grad
        wanted = wanted.narrow(0, shard.first_expert, shard.num_local_experts)
        gradient = model.get_parameter(name).grad
        assert isinstance(gradient, ExpertTensor)
        assert relative_error(gradient.to_local(), wanted) <= FP32_TOLERANCE


@pytest.mark.parametrize(
    "loss",
    [
        nn.functional.binary_cross_entropy,
        nn.functional.huber_loss,
        nn.functional.mse_loss,
        nn.functional.smooth_l1_loss,
    ],
)
def test_loss_of_experts_is_a_mean_over_those_of_all_ranks(
    loss: Callable[..., Tensor], group: EPGroup
) -> None:
    parameter = some_parameter(group)
    with torch.no_grad():
        parameter.to_local().uniform_()
    targets = torch.full(torch.Size(parameter.shape), 0.5)
    for reduction in ("mean", "sum", "none"):
        parameter.grad = None
        whole = parameter.full_tensor().detach().requires_grad_()
        found = loss(parameter, targets, reduction=reduction)
        wanted = loss(whole, targets, reduction=reduction)
        found.sum().backward()
        wanted.sum().backward()
        assert isinstance(parameter.grad, ExpertTensor)
        torch.testing.assert_close(found.sum(), wanted.sum())
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.grad)
    if loss is not nn.functional.huber_loss:
        with pytest.raises(ShapeError, match="pass reduction"):
            loss(parameter, targets, size_average=True)


def test_second_derivative_of_a_sum_is_right_and_that_of_a_cut_refused(group: EPGroup) -> None:
    parameter = some_parameter(group)
    whole = parameter.full_tensor().detach().requires_grad_()

    def first_derivative(experts: Tensor, total: Tensor) -> Tensor:
        return torch.autograd.grad(total, experts, create_graph=True)[0]

    if TorchVersion(torch.__version__) >= "2.13":
        found = first_derivative(parameter, parameter.square().sum().square())
        wanted = first_derivative(whole, whole.square().sum().square())
        torch.testing.assert_close(found.square().sum(), wanted.square().sum())
    of_one = first_derivative(parameter, parameter[0].square().sum().square())
    with pytest.raises(RuntimeError, match="once_differentiable"):
        of_one.square().sum().backward()


def test_infinity_on_one_rank_is_seen_by_loss_scaling_on_all(group: EPGroup) -> None:
    model = OverRanks(group)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = gather_state_dict(copy.deepcopy(model), group)
    scaler.scale(model(tokens(group.rank))).backward()
    if group.rank == 1:
        gradient = model.experts.get_parameter("down_proj").grad
        assert isinstance(gradient, ExpertTensor)
        gradient.to_local()[0, 0, 0] = torch.inf
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler.update()
    assert scaler.get_scale() == 4.0
    after = gather_state_dict(model, group)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_anomaly_mode_finds_nan_in_gradients_of_this_rank(group: EPGroup) -> None:
    model = OverRanks(group)
    # It communicates nothing, so it may be active on one rank.
    with torch.autograd.set_detect_anomaly(group.rank == 1):
        model(tokens(group.rank)).backward()
        model.experts.scale_gradients(torch.nan)
        loss = model(tokens(group.rank))
        if group.rank == 0:
            loss.backward()
            return
        with pytest.raises(RuntimeError, match="LocalViewsBackward' returned nan values"):
            loss.backward()


def test_pickle_is_refused_with_what_to_save_instead(group: EPGroup) -> None:
    with pytest.raises(PickleRefused, match="save state_dict"):
        pickle.dumps(OverRanks(group))
    with pytest.raises(TypeError, match="make an EPGroup in each process"):
        pickle.dumps(group)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def test_whatever_stands_in_place_of_parameters_is_used(group: EPGroup) -> None:
    model, x = OverRanks(group), tokens(group.rank)
    whole = gather_state_dict(model, group)
    doubled = {name: t * 2 if "down_proj" in name else t for name, t in whole.items()}
    expected = model(x) * 4  # The loss is a mean of squares.
    call = torch.func.functional_call
    # Whole tensors, pieces, ExpertTensors.
    pieces = {
        name: t.to_local() if isinstance(t, ExpertTensor) else t
        for name, t in model.state_dict().items()
    }
    pieces["experts.down_proj"] = pieces["experts.down_proj"] * 2
    parts = {name: p * 2 if "down_proj" in name else p for name, p in model.named_parameters()}
    for state in (doubled, pieces, parts):
        assert torch.equal(call(model, state, (x,)), expected)
    assert torch.equal(model(x) * 4, expected), "functional_call leaves no trace"
    with pytest.warns(UserWarning, match="pass the layer's parameters"):
        model.experts.down_proj = nn.Parameter(pieces["experts.down_proj"])
    assert torch.equal(model(x), expected)
    assert len(sharded_parameters(model)) == 2
    # A checkpoint would assume that the tensor is equal on all ranks, and save that of one
    # rank.
    assert all(isinstance(p, ExpertTensor) for p in sharded_parameters(model))
    model.experts._parameters["down_proj"] = nn.Parameter(pieces["experts.down_proj"])
    assert isinstance(model.state_dict()["experts.down_proj"], ExpertTensor)
    assert torch.equal(
        gather_state_dict(model, group)["experts.down_proj"], doubled["experts.down_proj"]
    )
    parametrised = OverRanks(group)
    torch.nn.utils.parametrize.register_parametrization(parametrised.experts, "down_proj", Twice())
    loss = parametrised(x)
    assert torch.equal(loss, expected)
    loss.backward()
    name = "experts.parametrizations.down_proj.original"
    assert isinstance(parametrised.get_parameter(name).grad, ExpertTensor)
    assert gather_state_dict(parametrised, group)[name].shape[0] == NUM_EXPERTS
    model.experts.down_proj = nn.Parameter(torch.zeros(3, 1, 1))
    with pytest.raises(ShapeError, match="expected the 4 experts of this rank or all 8"):
        model(x)


def test_writes_are_counted_for_those_who_pack_weights(group: EPGroup) -> None:
    with torch.no_grad():
        layer = OverRanks(group).experts
        assert layer.weights is layer.weights
        piece = layer.weights.tensors()["down_proj"]
        parameter = layer.get_parameter("down_proj")
        writes: list[Callable[[], object]] = [
            lambda: parameter.mul_(2),
            lambda: parameter.copy_(parameter.clone()),
            lambda: torch.ops.aten._foreach_mul_.Scalar([parameter], 2.0),
            lambda: layer.load_state_dict(layer.state_dict()),
        ]
        for write in writes:
            before = piece._version
            write()
            assert piece._version > before
        layer.to(torch.bfloat16)
        assert layer.weights.tensors()["down_proj"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        (
            "torch.functional.einsum",
            lambda p: torch.einsum("eij,jk->eik", p, torch.ones(p.shape[2], 3)),
        ),
        ("torch.functional.cdist", lambda p: torch.cdist(p, torch.ones(p.shape))),
        ("torch.cat", lambda p: torch.cat([p.flatten(), torch.ones(3)])),
    ],
)
def test_operator_on_experts_and_others_is_refused_by_its_name(
    name: str, compute: Callable[[Tensor], object], group: EPGroup
) -> None:
    parameter = some_parameter(group)
    with pytest.raises(ShapeError, match=rf"^{name}: an expert .* call to_local") as caught:
        compute(parameter)
    assert "DDP" not in str(caught.value)


def test_lbfgs_over_experts_and_others_is_refused(group: EPGroup) -> None:
    model = OverRanks(group)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ConfigError, match=r"^LBFGS.step: .* give it .*replicated_parameters"):
        optimizer.step(lambda: model(tokens(group.rank)))


def test_expert_parameter_frozen_on_one_rank_is_told_to_all(group: EPGroup) -> None:
    model = OverRanks(group)
    model.experts.get_parameter("down_proj").requires_grad_(group.rank == 0)
    message = "^dispatch: down_proj is frozen on rank 1, while the other ranks train it"
    with pytest.raises(ConfigError, match=message):
        model(tokens(group.rank))
    model.experts.get_parameter("down_proj").requires_grad_(False)
    model(tokens(group.rank)).backward()


DRAWS: dict[str, Callable[[Tensor], object]] = {
    "normal": nn.init.normal_,
    "trunc_normal": lambda tensor: nn.init.trunc_normal_(tensor, std=0.02),
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "uniform of data": lambda tensor: tensor.data.uniform_(-1, 1),
    "exponential": lambda tensor: tensor.data.exponential_(2.0),
    "bernoulli": lambda tensor: tensor.data.bernoulli_(0.5),
    "bernoulli of tensor": lambda tensor: tensor.data.bernoulli_(torch.rand(tensor.shape)),
    "normal by generator": lambda tensor: nn.init.normal_(
        tensor, generator=torch.Generator().manual_seed(3)
    ),
    "randn_like": lambda tensor: tensor.data.copy_(torch.randn_like(tensor)),
    "randint_like": lambda tensor: tensor.data.copy_(torch.randint_like(tensor, 3, 999)),
}


@pytest.mark.filterwarnings("error")
def test_random_numbers_are_those_of_a_process_that_draws_expert_by_expert(group: EPGroup) -> None:
    parameter = some_parameter(group, "gate_up_proj")
    # On a CPU torch draws experts of this size one after the other from a whole tensor, too.
    whole = torch.empty(parameter.shape)
    for name, draw in DRAWS.items():
        torch.manual_seed(1)
        draw(whole)
        wanted = torch.get_rng_state()
        torch.manual_seed(1)
        draw(parameter)
        assert torch.equal(torch.get_rng_state(), wanted), name
        assert torch.equal(parameter.full_tensor(), whole), name


def test_ranks_with_other_seeds_draw_their_own_experts(group: EPGroup) -> None:
    with torch.no_grad():
        parameter = some_parameter(group, "gate_up_proj")
        assert isinstance(parameter, ExpertTensor)
        torch.manual_seed(group.rank)
        parameter.normal_()
        for rank, piece in enumerate(parameter.full_tensor().chunk(NUM_RANKS)):
            alone = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rank))
            assert torch.equal(piece, alone.chunk(NUM_RANKS)[rank])
