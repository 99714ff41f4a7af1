import copy
import random
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from epcomm import (
    ConfigError,
    EPConfig,
    EPGroup,
    EPTimeout,
    ExpertParallelExperts,
    ExpertPlacement,
    ShapeError,
)
from epcomm.collectives.base import Scalar
from epcomm.collectives.bounded import Step
from epcomm.placement import moving, rebalancing
from epcomm.testing.oracle import relative_error
from epcomm.training.checkpoints import gather_state_dict, load_full_state_dict
from epcomm.training.gradients import sum_replica_gradients
from epcomm.weights.quantized import QUANTIZED_KINDS, QuantizedWeights
from tests.placement.layers import (
    Placed,
    any_placement,
    expect_copies_of,
    gather_local,
    placed_layer,
)

# Difference of float32 sums in another order.
SAME = 1e-6


def addresses(layer: ExpertParallelExperts) -> list[int]:
    table = layer.replica_table
    tensors = [*layer.weights.tensors().values(), table.replicas, table.num_replicas]
    return [tensor.data_ptr() for tensor in tensors]


def config_of(num_redundant: int | None, **changes: object) -> EPConfig:
    return EPConfig(mode="normal", redundant_experts=num_redundant, **changes)


@pytest.mark.ranks(2, slow=(4, 8))
@pytest.mark.parametrize("copies_per_rank", [0, 1])
def test_layer_computes_the_same_after_every_move(
    copies_per_rank: int, monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    placed = placed_layer(group, config_of(copies_per_rank * group.world_size))
    layer, before = placed.layer, addresses(placed.layer)
    first = placed.forward()
    for seed in range(4):
        # Pieces of one row and of all rows.
        monkeypatch.setattr(moving, "PIECE_BYTES", 4**seed)
        placement = any_placement(layer, seed)
        layer.rebalance(placement)
        assert layer.placement == placement
        expect_copies_of(layer, placed.weights.tensors())
        assert relative_error(placed.forward(), first) <= SAME
    assert addresses(layer) == before


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", QUANTIZED_KINDS.values(), ids=QUANTIZED_KINDS)
def test_codes_and_scales_move_to_the_bit(kind: type[QuantizedWeights], group: EPGroup) -> None:
    placed = placed_layer(group, config_of(None))
    quantized = kind.from_unquantized(placed.weights)
    layer = ExpertParallelExperts(quantized, group, config_of(2), top_k=placed.layer.top_k)
    moved = Placed(layer=layer, weights=placed.weights, batches=placed.batches)
    first = moved.forward()
    layer.rebalance(any_placement(layer, 1))
    whole = {n: t.view(torch.uint8) for n, t in quantized.tensors().items()}
    held = list(layer.placement.experts_of_rank(group.rank))
    for name, tensor in layer.weights.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), whole[name][held])
    assert relative_error(moved.forward(), first) <= SAME


def step(placed: Placed, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (placed.forward(grad=True) * placed.mine.dy).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_optimizer_state_moves_on_request_and_is_refused_where_it_stayed(group: EPGroup) -> None:
    found: list[Tensor] = []
    for moves in (False, True):
        placed = placed_layer(group, config_of(0))
        layer = placed.layer
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
        step(placed, optimizer)
        if moves:
            layer.rebalance(any_placement(layer, 3), optimizer)
        step(placed, optimizer)
        found.append(placed.forward())
    # One copy of each expert: no sum of gradients has another order within an expert.
    assert relative_error(found[1], found[0]) <= SAME
    layer.rebalance(any_placement(layer, 4))
    with pytest.raises(ConfigError, match="a different placement from the parameter"):
        step(placed, optimizer)


@pytest.mark.ranks(2)
def test_bad_moves_are_refused_on_all_ranks_and_move_nothing(group: EPGroup) -> None:
    placed = placed_layer(group, config_of(2))
    layer = placed.layer
    good, old = any_placement(layer, 0), layer.placement
    other_ranks = ExpertPlacement.spread(num_experts=4, num_ranks=3, num_physical_experts=6)
    other_number = ExpertPlacement.spread(num_experts=4, num_ranks=2, num_physical_experts=8)
    mine = group.rank == 1
    for bad, message in (
        (other_ranks, "num_ranks of the placement is 3, expected 2"),
        (other_number, "num_physical_experts of the placement is 8, expected 6"),
        ("balanced", "placement is str"),
        (any_placement(layer, 5), "placement of rank 1 differ"),
    ):
        with pytest.raises(ConfigError, match=message):
            layer.rebalance(bad if mine else good)
    (placed.forward(grad=True) * placed.mine.dy).sum().backward()
    with pytest.raises(ConfigError, match="has a gradient"):
        layer.rebalance(good)
    assert layer.placement == old
    expect_copies_of(layer, placed.weights.tensors())
    placed.layer.zero_grad()
    with pytest.raises(ConfigError, match="is on meta"):
        copy.deepcopy(layer).to("meta").rebalance(good)
    unplaced = placed_layer(group, config_of(None)).layer
    with pytest.raises(ConfigError, match="has no placement"):
        unplaced.rebalance(good)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("averages", ["multi_avg_fn", "avg_fn"])
def test_average_of_a_layer_is_refused_until_it_moves_too(averages: str, group: EPGroup) -> None:
    layer = placed_layer(group, config_of(2)).layer
    make = {"multi_avg_fn": get_ema_multi_avg_fn, "avg_fn": get_ema_avg_fn}[averages]
    average = AveragedModel(layer, **{averages: make(0.5)})
    average.update_parameters(layer)
    placement = any_placement(layer, 3)
    layer.rebalance(placement)
    with pytest.raises(ShapeError, match="call rebalance\\(\\) with the same placement on copies"):
        average.update_parameters(layer)
    assert isinstance(average.module, ExpertParallelExperts)
    average.module.rebalance(placement)
    average.update_parameters(layer)
    for name, whole in gather_state_dict(layer, group).items():
        assert torch.equal(gather_state_dict(average.module, group)[name], whole)


@pytest.mark.ranks(2)
# Two exchanges of rows, one for each parameter; then ranks agree that all rows have arrived.
@pytest.mark.parametrize("after", [0, 1, 2])
def test_failure_on_the_way_leaves_the_old_placement(
    after: int, monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    placed = placed_layer(group, config_of(2))
    layer, old, num_calls = placed.layer, placed.layer.placement, 0
    exchanged = replace(old, physical_to_logical=old.physical_to_logical[::-1])
    monkeypatch.setattr(moving, "PIECE_BYTES", 1)
    collectives = group.collectives
    exchange = collectives.all_to_all

    def fail(send: Tensor, *, phase: str, **others: object) -> Tensor:
        nonlocal num_calls
        if phase.startswith("rebalance") and send.dtype is torch.uint8:
            num_calls += 1
        if num_calls > after:
            raise EPTimeout("rebalance: rank 1 did not arrive")
        return exchange(send, phase=phase, **others)

    def agree(record: Mapping[str, Scalar], *, what: str, **others: object) -> object:
        if "rows" in what:
            assert num_calls == 2
            raise EPTimeout("rebalance: rank 1 did not arrive")
        return ask(record, what=what, **others)

    ask = layer.group.calls.agree
    with monkeypatch.context() as patched:
        patched.setattr(collectives, "all_to_all", fail)
        patched.setattr(layer.group.calls, "agree", agree)
        with pytest.raises(EPTimeout):
            layer.rebalance(exchanged)
    assert layer.placement == old
    expect_copies_of(layer, placed.weights.tensors())
    expected = placed.expected().y[group.rank]
    assert relative_error(placed.forward(), expected) <= 1e-5
    layer.rebalance(exchanged)
    expect_copies_of(layer, placed.weights.tensors())


@pytest.mark.ranks(2)
def test_experts_of_a_layer_move_while_a_batch_of_another_is_in_flight(group: EPGroup) -> None:
    moved, other = (placed_layer(group, config_of(n), number=n or 0) for n in (2, None))
    dispatcher = other.layer.phases.of_phase(decode=False)
    with torch.no_grad():
        out = dispatcher.dispatch(other.mine.x, other.mine.topk)
        moved.layer.rebalance(any_placement(moved.layer, 7))
        first = moved.forward()
        y = dispatcher.combine(other.layer.runner.run(out, other.layer.weights))
    assert relative_error(y, other.expected().y[group.rank]) <= 1e-5
    assert relative_error(first, moved.expected().y[group.rank]) <= 1e-5


@pytest.mark.mpi_ranks(2)
def test_experts_move_over_mpi_as_ordinary_tensors(group: EPGroup) -> None:
    placed = placed_layer(group, config_of(2))
    layer, first = placed.layer, placed.forward()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    (placed.forward(grad=True) * placed.mine.dy).sum().backward()
    sum_replica_gradients(layer)
    optimizer.step()
    optimizer.zero_grad()
    whole = gather_state_dict(layer, group)
    second = placed.forward()
    assert relative_error(second, first) > SAME
    layer.rebalance(any_placement(layer, 2), optimizer)
    expect_copies_of(layer, whole)
    moments = {n: optimizer.state[p]["exp_avg"] for n, p in layer.named_parameters()}
    for held in gather_local(layer, moments).values():
        for copies in layer.placement.replicas:
            assert all(torch.equal(held[copies[0]], held[copy]) for copy in copies)
    assert relative_error(placed.forward(), second) <= SAME


@pytest.mark.ranks(2)
def test_a_layer_from_meta_is_loaded_into_its_placement(group: EPGroup) -> None:
    placed = placed_layer(group, config_of(2))
    with torch.device("meta"):
        empty = placed.weights.with_tensors(
            {n: torch.empty(t.shape) for n, t in placed.weights.tensors().items()}
        )
    layer = ExpertParallelExperts(empty, group, config_of(2), top_k=placed.layer.top_k)
    layer.to_empty(device=group.device)
    load_full_state_dict(layer, placed.weights.tensors())
    expect_copies_of(layer, placed.weights.tensors())
    layer.rebalance(any_placement(layer, 6))
    expect_copies_of(layer, placed.weights.tensors())
    assert "4 experts and 2 redundant ones on 2 ranks, 3 each" in layer.explain()


def test_a_rank_takes_what_it_holds_from_itself_and_else_from_its_host() -> None:
    old = ExpertPlacement(
        num_experts=4, num_ranks=4, num_hosts=2, physical_to_logical=(0, 1, 2, 3, 0, 2, 1, 3)
    )
    new = replace(old, physical_to_logical=(1, 0, 0, 3, 2, 0, 1, 3))
    found = [(each.source, each.target) for each in moving.transfers_between(old, new)]
    assert found == [(1, 0), (0, 1), (0, 2), (5, 4), (4, 5)]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_no_rank_sends_or_receives_more_than_a_piece_at_a_time(most: int) -> None:
    numbers = random.Random(most)
    transfers = [
        moving.Transfer(source=numbers.randrange(16), target=target) for target in range(16)
    ]
    pieces = moving._pieces(transfers, 4, 4, most)
    assert all(pieces)
    remote = [each for each in transfers if each.source // 4 != each.target // 4]
    assert sorted((e for piece in pieces for e in piece), key=transfers.index) == remote
    for piece in pieces:
        for ranks in ([e.source // 4 for e in piece], [e.target // 4 for e in piece]):
            assert max(map(ranks.count, ranks)) <= most


LOST_RANK, UNLUCKY_RANK = 2, 1
# Seconds of the last agreement, to which all ranks come together.
TIMEOUT_S = 4.0


def never() -> Step:
    """Begin an exchange in which the message of the lost rank does not arrive."""

    def step(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    return step


@pytest.mark.ranks(3)
@pytest.mark.parametrize("reaches", ["no rank", "one rank", "all ranks"])
def test_survivors_have_one_placement(reaches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process_group = dist.new_group()
    config = EPConfig(mode="normal", redundant_experts=3)
    group = EPGroup(process_group)
    placed = placed_layer(group, config)
    layer, collectives, bounded = placed.layer, group.collectives, group.collectives.bounded
    old = layer.placement
    new = replace(old, physical_to_logical=old.physical_to_logical[::-1])
    gather, agree = collectives.all_gather, group.calls.agree
    is_lost = group.rank == LOST_RANK

    def gathered(tensor: Tensor, *, phase: str = "") -> Tensor:
        is_last = phase.startswith("rebalance, all rows are there")
        if is_last and is_lost and reaches == "no rank":
            raise SystemExit
        found = gather(tensor, phase=phase)
        if is_last and group.rank == UNLUCKY_RANK and reaches == "one rank":
            bounded.run(never, phase)
        return found

    def agreed(
        record: Mapping[str, Scalar], *, what: str, findings: Mapping[str, Scalar] | None = None
    ) -> object:
        if is_lost and what == rebalancing._ALL_WRITE:
            raise SystemExit
        if what.startswith("rebalance, "):
            bounded.timeout_s = TIMEOUT_S
        return agree(record, what=what, findings=findings)

    monkeypatch.setattr(group.calls, "agree", agreed)
    monkeypatch.setattr(collectives, "all_gather", gathered)
    with pytest.raises(SystemExit if is_lost else EPTimeout):
        layer.rebalance(new)
    monkeypatch.undo()
    if not is_lost:
        assert layer.placement == (old if reaches == "no rank" else new)
        held = layer.weights.tensors()["down_proj"].detach()
        experts = list(layer.placement.experts_of_rank(group.rank))
        assert torch.equal(held, placed.weights.tensors()["down_proj"][experts])
        group.close(after_error=True)
    dist.barrier()
