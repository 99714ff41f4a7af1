"""Expert parallelism with DDP and FSDP, sums and norms of gradients: equal to one process.

The loss of every rank is a mean over its own tokens, and the one process minimises the mean of the
ranks' losses, as data parallelism does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from epcomm import ConfigError, EPConfig, EPGroup, ExpertParallelMoE, TopKOutput, idle_step
from epcomm.buffers.collective.all_to_all import RowsBuffer
from epcomm.dispatchers.dispatcher import Dispatcher
from epcomm.sharding.shards import cut_share, expert_shards, is_expert_tensor, sharded_parameters
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error
from epcomm.training.checkpoints import gather_state_dict, load_full_state_dict
from epcomm.training.gradients import (
    clip_grad_norm,
    ignore_experts_in_ddp,
    scale_expert_gradients,
    sum_expert_gradients,
    sum_replicated_gradients,
)
from tests.cases.blocks import BLOCKS, HIDDEN, qwen3_moe
from tests.cases.expert_models import TOP_K, InOneProcess, OverRanks
from tests.cases.expert_models import tokens as expert_tokens
from tests.cases.meshes import mesh_of
from tests.cases.recorder import LIMIT_S

NUM_RANKS = 2
pytestmark = pytest.mark.ranks(NUM_RANKS)
# Numbers of ranks for tests that depend on the order of sums, or on several groups of experts.
MORE_RANKS = 4
NUM_TOKENS = (5, 2, 3, 9)


class TinyModel(nn.Module):
    """Two MoE blocks between linear layers, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList([qwen3_moe(), qwen3_moe()])
        self.head = nn.Linear(HIDDEN, 1)
        self.is_checkpointed = False
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for linear in (self.embed, self.head):
                for parameter in linear.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """Compute a scalar loss, the mean over tokens, from x [1, T, H]."""
        x = self.embed(x)
        for block in self.blocks:
            y = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            x = x + y
        return self.head(x).square().mean()


def spread(group: EPGroup) -> TinyModel:
    model = TinyModel()
    for place, block in enumerate(model.blocks):
        model.blocks[place] = ExpertParallelMoE.from_transformers(block, group, EPConfig())
    return model.to(group.device)


def tokens(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(1, NUM_TOKENS[rank], HIDDEN, generator=generator)


def expected_gradients(ranks: range | list[int] = range(NUM_RANKS)) -> dict[str, Tensor]:
    """Return gradients of the mean of all ranks' losses; ranks left out have loss 0."""
    model = TinyModel()
    for rank in ranks:
        (model(tokens(rank)) / NUM_RANKS).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


def check(model: nn.Module, group: EPGroup, expected: dict[str, Tensor]) -> None:
    """Check all gradients; those of this rank's experts are compared with their part."""
    errors = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        wanted = expected[name]
        shard = parameter.held if is_expert_tensor(parameter) else None
        if shard is not None:
            wanted = cut_share(wanted, shard)
        assert parameter.grad is not None, name
        actual = parameter.grad
        if isinstance(actual, DTensor):
            actual = actual.full_tensor() if shard is None else actual.to_local()
        errors[name] = relative_error(actual, wanted.to(group.device))
    assert errors.keys() == expected.keys()
    assert max(errors.values()) <= FP32_TOLERANCE, errors


def in_ddp(model: nn.Module) -> nn.Module:
    ignore_experts_in_ddp(model)
    scale_expert_gradients(model, 1 / dist.get_world_size())
    return DistributedDataParallel(model)


def in_fsdp(model: nn.Module) -> nn.Module:
    scale_expert_gradients(model, 1 / dist.get_world_size())
    fully_shard(model, ignored_params=set(sharded_parameters(model)))
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": in_ddp, "fsdp": in_fsdp}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_expert_gradients_scaled_by_one_over_w_match_a_mean(wrapper: str, group: EPGroup) -> None:
    model = spread(group)
    model.is_checkpointed = True
    wrapped = WRAPPERS[wrapper](model)
    wrapped(tokens(group.rank).to(group.device)).backward()
    check(wrapped, group, expected_gradients())


def shared_in_fsdp(moe: nn.Module) -> nn.Module:
    fully_shard(moe.get_submodule("shared_expert"))
    return moe


@pytest.mark.parametrize("wrap", [in_ddp, shared_in_fsdp])
def test_chunks_are_in_flight_while_other_gradients_are_reduced(
    wrap: Callable[[nn.Module], nn.Module], group: EPGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After the first step DDP reduces the first gradient as soon as it is computed.
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
    world: Any = dist.group.WORLD  # torch does not declare its sequence number
    combine, num_before = RowsBuffer.combine, None
    late_calls: list[int] = []

    def late(*args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Return gradients of rows after DDP or FSDP has begun a collective in this backward."""
        if options.get("row_scalars") is not None and num_before is not None:
            deadline_s = time.monotonic() + LIMIT_S
            while world._get_sequence_number_for_group() == num_before:
                assert time.monotonic() < deadline_s, "collectives wait for chunks"
                time.sleep(1e-3)
            late_calls.append(num_before)
        return combine(*args, **options)

    monkeypatch.setattr(RowsBuffer, "combine", late)
    found = []
    for chunks in (None, 2):
        with monkeypatch.context() as patch:
            if chunks is None:
                patch.setattr(Dispatcher, "is_asynchronous", False)
            config = EPConfig(backend="collective", chunks=chunks)
            model = wrap(ExpertParallelMoE.from_transformers(BLOCKS["qwen2_moe"](), group, config))
            for step in range(2):
                model.zero_grad()
                loss = model(tokens(group.rank).requires_grad_()).square().mean()
                if chunks and step == 1:
                    num_before = world._get_sequence_number_for_group()
                loss.backward()
        grads = [each.grad for each in model.parameters()]
        found.append([each.to_local() if isinstance(each, DTensor) else each for each in grads])
    assert len(late_calls) == 2
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) <= FP32_TOLERANCE


@pytest.mark.parametrize("wrapper", [None, *WRAPPERS])
def test_rank_without_data_takes_an_idle_step(wrapper: str | None, group: EPGroup) -> None:
    busy = [1]
    model = spread(group)
    x = tokens(group.rank).to(group.device)
    if wrapper is None:
        scale_expert_gradients(model, 1 / NUM_RANKS)
    wrapped = model if wrapper is None else WRAPPERS[wrapper](model)
    if group.rank in busy:
        wrapped(x).backward()
    elif wrapper is None:
        idle_step(wrapped)
    else:
        idle_step(wrapped, run_token=lambda: wrapped(x[:, :1]))
    if wrapper is None:
        sum_replicated_gradients(model, group)
        for parameter in model.parameters():
            if not is_expert_tensor(parameter) and parameter.grad is not None:
                parameter.grad /= NUM_RANKS
    check(wrapped, group, expected_gradients(busy))
    with torch.no_grad():
        wrapped(x) if group.rank in busy else idle_step(wrapped, run_token=lambda: wrapped(x))


@pytest.mark.parametrize(("wrapper", "name"), [("ddp", "DDP"), ("fsdp", "FSDP")])
def test_idle_step_of_a_wrapped_model_wants_to_know_how_to_run_it(
    wrapper: str, name: str, group: EPGroup
) -> None:
    model = WRAPPERS[wrapper](OverRanks(group))
    with pytest.raises(ConfigError, match=rf"is inside {name}, .*pass run_token=lambda"):
        idle_step(model)
    # DDP exchanges nothing in evaluation.
    if wrapper == "ddp":
        with torch.no_grad():
            model(expert_tokens(0)) if group.rank else idle_step(model)


@pytest.mark.ranks(MORE_RANKS)
def test_sum_of_gradients_is_bit_equal_on_all_and_counts_missing_ones_as_0(group: EPGroup) -> None:
    model = nn.Module()
    generator = torch.Generator().manual_seed(group.rank)
    shapes = {"a": (7,), "b": (2, 3), "c": (1,)}
    for name, shape in shapes.items():
        parameter = nn.Parameter(torch.zeros(shape, device=group.device))
        model.register_parameter(name, parameter)
        if not (name == "b" and group.rank == 1):
            parameter.grad = torch.randn(shape, generator=generator).to(group.device)
    model.register_parameter(
        "narrow_one", nn.Parameter(torch.zeros(3, dtype=torch.bfloat16, device=group.device))
    )
    model.narrow_one.grad = torch.full_like(model.narrow_one, 1.0 + group.rank)  # type: ignore[union-attr]
    before = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    sum_replicated_gradients(model, group)
    for name, parameter in model.named_parameters():
        parts = group.collectives.all_gather(before[name])
        torch.testing.assert_close(parameter.grad, parts.sum(0))
        everyones = group.collectives.all_gather(parameter.grad.contiguous())
        assert torch.equal(everyones, parameter.grad.expand_as(everyones))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_state_and_clip_beside_data_parallelism(wrapper: str, group: EPGroup) -> None:
    wrapped = WRAPPERS[wrapper](spread(group))
    state = gather_state_dict(wrapped, group)
    prefix = "module." if wrapper == "ddp" else ""
    for name, tensor in TinyModel().state_dict().items():
        assert torch.equal(state[f"{prefix}{name}"].cpu(), tensor), name
    wrapped(tokens(group.rank).to(group.device)).backward()
    if wrapper == "fsdp":
        with pytest.raises(ConfigError, match="a parameter is a DTensor"):
            sum_replicated_gradients(wrapped, group)
    expected = expected_gradients()
    wanted = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    norm = clip_grad_norm(wrapped, group, float(wanted) / 4)
    assert relative_error(norm, wanted.to(group.device)) <= FP32_TOLERANCE
    check(wrapped, group, {name: gradient / 4 for name, gradient in expected.items()})
    assert float(clip_grad_norm(wrapped, group, 1e9)) <= float(wanted) / 4 * (1 + 1e-5)
    check(wrapped, group, {name: gradient / 4 for name, gradient in expected.items()})


def test_idle_step_beside_ranks_that_train_the_head_alone(group: EPGroup) -> None:
    model = spread(group)
    for parameter in [*model.embed.parameters(), *model.blocks.parameters()]:
        parameter.requires_grad_(False)
    if group.rank == 0:
        model(tokens(0).to(group.device)).backward()
        assert model.head.weight.grad is not None
    else:
        idle_step(model)


@pytest.mark.ranks(1, slow=(2,))
def test_compiled_model_breaks_its_graph_once_at_experts(num_ranks: int, group: EPGroup) -> None:
    """Each rank compiles, which takes seconds, so there are few ranks."""
    placed = EPConfig(redundant_experts=2, record_load=True)
    config = EPConfig() if num_ranks == 1 else placed
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    block = qwen3_moe().to(group.device)
    moe = ExpertParallelMoE.from_transformers(block, group, config)
    x = tokens(group.rank).to(group.device)
    expected = moe(x)
    compiled = torch.compile(moe, backend=count)
    y = compiled(x)
    assert torch.equal(y, expected)
    if config.record_load:
        load = moe.load_table.sum().item()
        compiled(x)
        # Two calls have been counted so far.
        assert moe.load_table.sum().item() == load // 2 * 3
    # One layer before the experts, for the routing, and one after them.
    assert len(graphs) == 2
    y.sum().backward()
    gate = moe.get_parameter("gate.weight")
    compiled_grad, gate.grad = gate.grad, None
    moe(x).sum().backward()
    torch.testing.assert_close(compiled_grad, gate.grad)


class DispatchesOnce(nn.Module):
    """A user's layer, made of a dispatcher."""

    def __init__(self, model: OverRanks) -> None:
        super().__init__()
        self.dispatcher = model.experts.phases.prefill

    def forward(self, x: Tensor) -> Tensor:
        """Dispatch x [T, H] to expert 0."""
        ids = torch.zeros(x.shape[0], TOP_K, dtype=torch.int64)
        weights = torch.ones(ids.shape)
        self.dispatcher.dispatch(x, TopKOutput(topk_ids=ids, topk_weights=weights))
        return x


def test_export_is_refused_before_anything_is_sent(group: EPGroup) -> None:
    model, x = OverRanks(group), expert_tokens(group.rank)
    for exported, name in (
        (model, "ExpertParallelExperts.forward"),
        (DispatchesOnce(model), "Dispatcher.dispatch"),
    ):
        with pytest.raises(ConfigError, match=f"^torch.export: {name} cannot be exported"):
            torch.export.export(exported, (x,))
    model(x).backward()


def sums(model: OverRanks, mesh: DeviceMesh, groups: Groups) -> nn.Module:
    (model(expert_tokens(dist.get_rank())) / MORE_RANKS).backward()
    sum_expert_gradients(model, groups.copies)
    sum_replicated_gradients(model, groups.all)
    return model


def copies_beside_ddp(model: OverRanks, mesh: DeviceMesh, groups: Groups) -> nn.Module:
    wrapped = in_ddp(model)
    wrapped(expert_tokens(dist.get_rank())).backward()
    sum_expert_gradients(model, groups.copies)
    return wrapped


def copies_beside_fsdp(model: OverRanks, mesh: DeviceMesh, groups: Groups) -> nn.Module:
    in_fsdp(model)
    model(expert_tokens(dist.get_rank())).backward()
    sum_expert_gradients(model, groups.copies)
    return model


def copies_in_fsdp(model: OverRanks, mesh: DeviceMesh, groups: Groups) -> nn.Module:
    """FSDP cuts the experts once more, over their copies, and takes the mean over these."""
    scale_expert_gradients(model, 1 / groups.expert.world_size)
    fully_shard(model.experts, mesh=mesh["dp"])
    fully_shard(model)
    model(expert_tokens(dist.get_rank())).backward()
    state, whole = gather_state_dict(model, groups.expert), InOneProcess().state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in whole.items())
    load_full_state_dict(model, {name: tensor * 2 for name, tensor in whole.items()})
    state = gather_state_dict(model, groups.expert)
    assert all(torch.equal(state[name], 2 * tensor) for name, tensor in whole.items())
    return model


class Sum(nn.Module):
    """A parametrisation with a parameter for all experts, which every rank has."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.delta = nn.Parameter(torch.randn(shape, generator=generator) / 4)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


def test_ddp_scales_parametrised_experts_and_not_what_is_added_to_them(group: EPGroup) -> None:
    alone = InOneProcess()
    added = Sum(alone.experts["down_proj"].shape)
    torch.nn.utils.parametrize.register_parametrization(alone.experts, "down_proj", added)
    for rank in range(2):
        (alone(expert_tokens(rank)) / 2).backward()
    model = OverRanks(group)
    own = Sum(added.delta.shape)
    torch.nn.utils.parametrize.register_parametrization(model.experts, "down_proj", own)
    wrapped = in_ddp(model)
    wrapped(expert_tokens(group.rank)).backward()
    (shard,) = set(expert_shards(model).values())
    experts = model.experts.expert_parameters()["parametrizations.down_proj.original"]
    mine = added.delta.grad.narrow(0, shard.first_expert, shard.num_local_experts)
    assert relative_error(experts.grad, mine) <= FP32_TOLERANCE
    assert relative_error(own.delta.grad, added.delta.grad) <= FP32_TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The ranks that share experts, those that hold copies of the same ones, and all."""

    expert: EPGroup
    copies: EPGroup
    all: EPGroup


@pytest.mark.ranks(MORE_RANKS)
@pytest.mark.parametrize("reduce", [sums, copies_beside_ddp, copies_beside_fsdp, copies_in_fsdp])
def test_gradients_of_expert_copies_are_summed_once(
    reduce: Callable[[OverRanks, DeviceMesh, Groups], nn.Module],
) -> None:
    alone = InOneProcess()
    for rank in range(MORE_RANKS):
        (alone(expert_tokens(rank)) / MORE_RANKS).backward()
    wanted = {name: parameter.grad for name, parameter in alone.named_parameters()}
    norm = torch.stack([g.norm() for g in wanted.values() if g is not None]).norm()
    mesh = mesh_of((2, 2), ("dp", "ep"))
    with EPGroup(mesh["ep"]) as expert, EPGroup(mesh["dp"]) as copies, EPGroup() as everyone:
        groups = Groups(expert=expert, copies=copies, all=everyone)
        model = reduce(OverRanks(expert), mesh, groups)
        for name, parameter in model.named_parameters():
            gradient, expected = parameter.grad, wanted[name.removeprefix("module.")]
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            assert relative_error(whole, expected) <= FP32_TOLERANCE, name
        assert relative_error(clip_grad_norm(model, expert, 1e9), norm) <= FP32_TOLERANCE
