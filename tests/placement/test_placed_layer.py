from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from epcomm import (
    ConfigError,
    EPConfig,
    EPError,
    EPGroup,
    ExpertParallelExperts,
    ExpertParallelMoE,
    ExpertPlacement,
    ExpertWeights,
    TopKOutput,
)
from epcomm.placement.replicas import ReplicaTables
from epcomm.records import ReplicaTable
from epcomm.testing import layer_suite
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error
from tests.cases.blocks import HIDDEN, qwen3_moe
from tests.placement.layers import any_placement, expect_copies_of, gather_local, placed_layer

pytestmark = pytest.mark.ranks(2)
CONFIGS = {
    "normal": {"mode": "normal"},
    "standard": {"mode": "standard"},
    "replicated": {"mode": "standard", "replicated": True},
    "low_latency": {"mode": "low_latency", "max_tokens_per_rank": 32},
}


def config_of(name: str, num_redundant: int) -> EPConfig:
    return EPConfig(redundant_experts=num_redundant, **CONFIGS[name])


@pytest.mark.ranks(2, slow=(4, 8))
@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_are_those_without_copies(name: str, group: EPGroup) -> None:
    placed = placed_layer(group, config_of(name, group.world_size))
    assert placed.layer.num_experts == placed.weights.num_experts + group.world_size
    expect_copies_of(placed.layer, placed.weights.tensors())
    expected = placed.expected().y[group.rank]
    # Two calls, which take different copies.
    for _ in range(2):
        assert relative_error(placed.forward(), expected) <= FP32_TOLERANCE


def test_whole_parameters_are_read_anew_where_their_experts_are_copied(group: EPGroup) -> None:
    placed = placed_layer(group, config_of("normal", 2))
    for name in list(placed.layer.expert_parameters()):
        whole = placed.weights.tensors()[name].clone()
        setattr(placed.layer, name, torch.nn.Parameter(whole))
    expected = placed.expected().y[group.rank]
    assert relative_error(placed.forward(), expected) <= FP32_TOLERANCE
    with torch.no_grad():
        for parameter in placed.layer.parameters():
            parameter.zero_()
    assert placed.forward().eq(0).all()


def test_first_placement_has_the_hosts_of_its_group() -> None:
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("host", "place"))
    with EPGroup(mesh) as group:
        placement = placed_layer(group, config_of("normal", 2)).layer.placement
        assert placement.num_hosts == 2


@pytest.mark.ranks(2, slow=(4, 8))
@pytest.mark.parametrize("name", ["normal", "standard"])
def test_gradients_of_copies_add_up_to_those_without(name: str, group: EPGroup) -> None:
    placed = placed_layer(group, config_of(name, group.world_size))
    layer = placed.layer
    (placed.forward(grad=True) * placed.mine.dy).sum().backward()
    grads = {n: p.grad for n, p in layer.expert_parameters().items() if p.grad is not None}
    expected = placed.expected().weight_grads
    assert set(grads) == set(expected)
    for role, gradient in gather_local(layer, grads).items():
        copies = torch.tensor(layer.placement.physical_to_logical)
        total = torch.zeros_like(expected[role]).index_add_(0, copies, gradient.double())
        assert relative_error(total, expected[role]) <= FP32_TOLERANCE


# The scenario that is left out uses dispatchers directly, which take physical ids.
SCENARIOS = [name for name in layer_suite.SCENARIOS if name != "interleaved"]


@pytest.mark.slow
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["normal", "low_latency"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_layer_of_moved_experts_equals_the_oracle(scenario: str, name: str, group: EPGroup) -> None:
    def moved(weights: ExpertWeights, top_k: int) -> ExpertParallelExperts:
        config = config_of(name, group.world_size)
        layer = ExpertParallelExperts(weights, group, config, top_k=top_k)
        layer.rebalance(any_placement(layer, seed=0))
        return layer

    env = layer_suite.LayerEnv(group=group, make_layer=moved, has_gradients=False)
    layer_suite.run_scenario(scenario, env)


@pytest.mark.slow
@pytest.mark.ranks(2, 4)
def test_near_copies_give_the_same_and_fewer_rows_leave(group: EPGroup) -> None:
    placed = placed_layer(group, config_of("normal", group.world_size))
    layer, ids = placed.layer, placed.mine.topk_ids
    num_left = []
    for prefers_near in (False, True):
        layer.rebalance(replace(layer.placement, prefers_near=prefers_near))
        table = layer.replica_table
        physical = table.choose(ids)
        here = physical // layer.placement.num_local_experts
        ranks = torch.where(physical < 0, -1, here)
        y = placed.forward(grad=True).detach()
        assert relative_error(y, placed.expected().y[group.rank]) <= FP32_TOLERANCE
        leaves = [len(set(row) - {-1, group.rank}) for row in ranks.tolist()]
        num_left.append(group.collectives.all_gather(torch.tensor(sum(leaves))).sum())
    assert num_left[1] < num_left[0]


@pytest.mark.slow
def test_ranks_with_the_same_tokens_cannot_prefer_near_copies(group: EPGroup) -> None:
    layer = placed_layer(group, config_of("replicated", 2)).layer
    with pytest.raises(ConfigError, match="expected False if all ranks have the same tokens"):
        layer.rebalance(replace(layer.placement, prefers_near=True))


def test_a_share_is_that_of_experts_in_their_order(group: EPGroup) -> None:
    placed = placed_layer(group, config_of("normal", 2))
    held = list(placed.layer.placement.experts_of_rank(group.rank))
    share = placed.weights.with_tensors(
        {name: tensor.detach()[held] for name, tensor in placed.weights.tensors().items()}
    )
    config, top_k = placed.layer.config, placed.layer.top_k
    layer = ExpertParallelExperts(share, group, config, top_k=top_k, is_local=True)
    assert layer.placement == placed.layer.placement
    expect_copies_of(layer, placed.weights.tensors())


def test_a_block_with_copies_computes_what_it_computes_alone(group: EPGroup) -> None:
    with torch.no_grad():
        calls_of_block(group, "reference")


@pytest.mark.slow
def test_the_gate_of_a_block_chooses_the_copies_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    with EPGroup() as group, torch.no_grad():
        by_reference = calls_of_block(group, "reference")
        monkeypatch.setattr(ReplicaTable, "choose", None)
        by_gate = calls_of_block(group, "triton")
        assert all(torch.equal(*pair) for pair in zip(by_reference, by_gate, strict=True))


def calls_of_block(group: EPGroup, router: str) -> list[Tensor]:
    """Return the expert ids of three calls, one of them after a move, and the load.

    Every call must return the result of the plain block.
    """
    block = qwen3_moe()
    x = torch.randn(2, 7, HIDDEN, generator=torch.Generator().manual_seed(1))
    config = EPConfig(redundant_experts=2, router=router, record_load=True)
    moe = ExpertParallelMoE.from_transformers(block, group, config)
    seen: list[Tensor] = []
    choose = ReplicaTables.choose

    def spy(tables: ReplicaTables, topk: TopKOutput) -> TopKOutput:
        topk = choose(tables, topk)
        seen.append(topk.topk_ids)
        return topk

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ReplicaTables, "choose", spy)
        for call in range(3):
            y = moe(x)
            assert relative_error(y, block(x)) <= FP32_TOLERANCE
            if call == 1:
                places = moe.experts.placement.physical_to_logical[::-1]
                moe.experts.rebalance(replace(moe.experts.placement, physical_to_logical=places))
    assert not torch.equal(seen[0], seen[1])
    return [*seen, moe.load_table.sum(0)]


PLACEMENT = ExpertPlacement(num_experts=3, num_ranks=2, physical_to_logical=(0, 1, 2, 0))


def chosen(tables: ReplicaTables, ids: list[list[int]]) -> list[list[int]]:
    weights = torch.ones(len(ids), len(ids[0]))
    return tables.choose(
        TopKOutput(topk_ids=torch.tensor(ids), topk_weights=weights)
    ).topk_ids.tolist()


def tables_of(rank: int, *, is_replicated: bool = False) -> ReplicaTables:
    device = torch.device("cpu")
    return ReplicaTables(PLACEMENT, rank=rank, is_replicated=is_replicated, device=device)


def test_tokens_ranks_and_calls_take_turns_among_copies() -> None:
    ids = [[0, 1], [0, -1], [2, 0]]
    first = [[0, 1], [3, -1], [2, 0]]
    second = [[3, 1], [0, -1], [2, 3]]
    tables = tables_of(0)
    with torch.no_grad():
        assert [chosen(tables, ids) for _ in range(3)] == [first, second, first]
    with torch.no_grad():
        assert chosen(tables_of(1), ids) == second
    # Recomputation of activations must choose as the first run.
    tables = tables_of(0)
    with torch.enable_grad():
        assert [chosen(tables, ids) for _ in range(2)] == [first, first]


def test_ranks_with_the_same_tokens_choose_alike_in_every_call() -> None:
    ids = [[0, 1], [0, 2]]
    with torch.no_grad():
        found = [
            chosen(tables, ids)
            for tables in (tables_of(0, is_replicated=True), tables_of(1, is_replicated=True))
            for _ in range(2)
        ]
    assert found == [[[0, 1], [3, 2]]] * 4


@pytest.mark.parametrize("wrong", [-2, 4])
def test_an_id_of_no_logical_expert_is_refused_on_all_ranks(wrong: int, group: EPGroup) -> None:
    placed = placed_layer(group, config_of("normal", 2))
    assert placed.layer.num_logical_experts == 4
    if group.rank == 1:
        placed.mine.topk_ids[-1, 0] = wrong
    with pytest.raises(EPError, match="rank 1"):
        placed.forward()


def test_redundant_experts_that_do_not_fit_are_refused(group: EPGroup) -> None:
    for number, message in ((1, "num_experts is 5"), (6, "to 8, one of each on every rank")):
        with pytest.raises(ConfigError, match=message):
            placed_layer(group, config_of("normal", number))
    assert placed_layer(group, config_of("normal", 4)).layer.num_experts == 8
