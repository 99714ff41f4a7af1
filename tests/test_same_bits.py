"""Layers with sum_groups have the same bits on any number of ranks, whatever the batch around.

Every rank computes the whole batch alone, in a group of its own, and compares its part with it.
tests/dispatchers/test_sum_groups.py compares the sums with their definition.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import (
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    ExpertParallelMoE,
    ExpertPlacement,
    Fp8BlockWeights,
    TopKOutput,
)
from epcomm.errors import ConfigError
from epcomm.weights.unquantized import ExpertWeights
from tests.cases.blocks import BLOCKS, HIDDEN

H, INNER, E, K, TOKENS, GROUPS = 64, 32, 16, 4, 24, 8
LIMITED = EPConfig(sum_groups=GROUPS, max_tokens_per_rank=32)
CONFIGS = {
    "collective": EPConfig(sum_groups=GROUPS, mode="normal", backend="collective"),
    "shared_memory": EPConfig(sum_groups=GROUPS, mode="normal", backend="shared_memory"),
    "standard": EPConfig(sum_groups=GROUPS, mode="standard", backend="collective"),
    "decode": replace(LIMITED, mode="low_latency", backend="collective"),
    "auto": replace(LIMITED, mode="auto"),
}


@dataclass(frozen=True, eq=False)
class Batch:
    """Tokens with their routing and the gradients of their results."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    grad_y: Tensor

    @classmethod
    def make(cls, dtype: torch.dtype) -> "Batch":
        generator = torch.Generator().manual_seed(11)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        ids = normal(TOKENS, E).argsort(dim=1)[:, :K]
        ids[normal(TOKENS, K) > 1] = -1
        x, grad_y = normal(TOKENS, H).to(dtype), normal(TOKENS, H).to(dtype)
        return cls(x=x, ids=ids, weights=normal(TOKENS, K), grad_y=grad_y)

    def of(self, tokens: list[int]) -> "Batch":
        return Batch(*(each[tokens] for each in vars(self).values()))

    def padded(self, number: int) -> "Batch":
        """Append tokens without experts, which hold NaN."""
        new = (
            torch.full(
                (number, *each.shape[1:]),
                float("nan") if each.is_floating_point() else -1,
                dtype=each.dtype,
            )
            for each in vars(self).values()
        )
        return Batch(*map(torch.cat, zip(vars(self).values(), new, strict=True)))


@pytest.fixture(scope="module")
def alone() -> Iterator[EPGroup]:
    """Yield a group of this rank alone. Collective."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine = groups[dist.get_rank()]
    with EPGroup(mine) as group:
        yield group


def make_layer(
    group: EPGroup, config: EPConfig, dtype: torch.dtype, *, is_fp8: bool = False
) -> ExpertParallelExperts:
    generator = torch.Generator().manual_seed(3)
    weights = ExpertWeights(
        gate_up_proj=torch.randn(E, 2 * INNER, H, generator=generator).to(dtype) / 8,
        down_proj=torch.randn(E, H, INNER, generator=generator).to(dtype) / 8,
    )
    experts = Fp8BlockWeights.from_unquantized(weights) if is_fp8 else weights
    return ExpertParallelExperts(experts, group, config, top_k=K)


def run(
    layer: ExpertParallelExperts, batch: Batch, *, trains: bool, decode: bool = False
) -> list[Tensor]:
    """Return y, and with `trains` the gradients of x and of the router weights."""
    x = batch.x.clone().requires_grad_(trains)
    weights = batch.weights.clone().requires_grad_(trains)
    with torch.set_grad_enabled(trains):
        y = layer(x, TopKOutput(topk_ids=batch.ids, topk_weights=weights), decode=decode)
        if trains:
            y.backward(batch.grad_y)
    layer.check()
    return [y.detach(), x.grad, weights.grad] if trains else [y]  # type: ignore[list-item]


def expert_gradients(layer: ExpertParallelExperts) -> list[Tensor]:
    found = [each.grad for each in layer.expert_parameters().values()]
    return [each.to_local() if hasattr(each, "to_local") else each for each in found]  # type: ignore[union-attr]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The results of one rank for the whole batch.

    results: y, and the gradients of x and of the router weights.
    """

    results: list[Tensor]
    expert_gradients: list[Tensor]


@pytest.fixture(scope="module")
def reference_of(alone: EPGroup) -> Callable[[torch.dtype], Reference]:
    @cache
    def compute(dtype: torch.dtype) -> Reference:
        layer = make_layer(alone, CONFIGS["collective"], dtype)
        results = run(layer, Batch.make(dtype), trains=True)
        return Reference(results=results, expert_gradients=expert_gradients(layer))

    return compute


def parts(world_size: int, *, shuffled: bool) -> list[list[int]]:
    """Return the tokens of each rank: contiguous and uneven, or shuffled with an idle rank."""
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(5)).tolist()
    borders = [0, 1, 9, 9, 14, 17, 18, 20, TOKENS]
    steps = borders[:: 8 // world_size]
    found = [list(range(*pair)) for pair in pairwise(steps)]
    if not shuffled:
        return found
    found = [[order[token] for token in part] for part in found]
    return [*found[1:-1], [*found[0], *found[-1]], []] if world_size > 1 else found


# The backend does not depend on the dtype, but the products of experts do.
CASES = [(name, torch.bfloat16) for name in CONFIGS]
CASES += [(name, torch.float32) for name in ("collective", "auto")]


@pytest.mark.ranks(1, 2, 4, slow=(8,))
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_bits_are_those_of_one_rank(
    group: EPGroup, reference_of: Callable[[torch.dtype], Reference], name: str, dtype: torch.dtype
) -> None:
    batch, reference = Batch.make(dtype), reference_of(dtype)
    layer = make_layer(group, CONFIGS[name], dtype)
    trains, wanted = layer.plan.prefill.caps.trainable, reference.results
    for shuffled in (False, True):
        mine = parts(group.world_size, shuffled=shuffled)[group.rank]
        for is_trained in (False, True)[: 1 + trains]:
            found = run(layer, batch.of(mine).padded(3), trains=is_trained, decode=not is_trained)
            for mine_all, theirs in zip(found, wanted, strict=False):
                assert torch.equal(mine_all[: len(mine)], theirs[mine])
        if trains and not shuffled:
            local = slice(group.rank * (E // group.world_size), None)
            pairs = zip(expert_gradients(layer), reference.expert_gradients, strict=True)
            assert all(torch.equal(each, other[local][: len(each)]) for each, other in pairs)
    # Micro-batches of seven tokens; ranks with fewer tokens take part without any.
    for first in range(0, TOKENS, 7):
        mine = parts(group.world_size, shuffled=True)[group.rank][first : first + 7]
        (y,) = run(layer, batch.of(mine), trains=False)
        assert torch.equal(y, wanted[0][mine])


@pytest.mark.ranks(1, 2, 4)
def test_decode_of_fp8_experts_has_the_bits_of_prefill(group: EPGroup, alone: EPGroup) -> None:
    batch, dtype = Batch.make(torch.bfloat16), torch.bfloat16
    (wanted,) = run(make_layer(alone, CONFIGS["standard"], dtype, is_fp8=True), batch, trains=False)
    mine = parts(group.world_size, shuffled=True)[group.rank]
    for config in CONFIGS.values():
        layer = make_layer(group, config, dtype, is_fp8=True)
        for decode in (False, True):
            (y,) = run(layer, batch.of(mine), trains=False, decode=decode)
            assert torch.equal(y, wanted[mine])


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_do_not_depend_on_the_placement(
    group: EPGroup, reference_of: Callable[[torch.dtype], Reference], name: str
) -> None:
    batch, dtype = Batch.make(torch.bfloat16), torch.bfloat16
    redundant = 0 if group.world_size == 1 else 8
    wanted = reference_of(dtype).results
    mine = parts(group.world_size, shuffled=True)[group.rank]
    layer = make_layer(group, replace(CONFIGS[name], redundant_experts=redundant), dtype)
    order = torch.randperm(E, generator=torch.Generator().manual_seed(2)).tolist()
    placed = (*order, *order[:redundant])
    layer.rebalance(
        ExpertPlacement(num_experts=E, num_ranks=group.world_size, physical_to_logical=placed)
    )
    for trains in (False, True)[: 1 + layer.plan.prefill.caps.trainable]:
        found = run(layer, batch.of(mine), trains=trains)
        for ours, theirs in zip(found, wanted, strict=False):
            assert torch.equal(ours, theirs[mine])


@pytest.mark.ranks(2)
def test_blocks_compute_router_and_shared_experts_alike(group: EPGroup, alone: EPGroup) -> None:
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    config = EPConfig(sum_groups=4, mode="normal", block_tokens=8)
    with pytest.raises(ConfigError, match=r"depend on the number of tokens .*block_tokens"):
        ExpertParallelMoE.from_transformers(
            BLOCKS["deepseek_v3"](), group, replace(config, block_tokens=None)
        )
    block, whole = (
        ExpertParallelMoE.from_transformers(BLOCKS["deepseek_v3"](), each, config)
        for each in (group, alone)
    )
    mine = parts(group.world_size, shuffled=True)[group.rank]
    with torch.no_grad():
        assert torch.equal(block(x[mine]), whole(x)[mine])


@pytest.mark.ranks(1)
def test_gate_of_shared_experts_does_not_depend_on_the_number_of_tokens(group: EPGroup) -> None:
    """On CPUs a sigmoid computes the last elements of a tensor in another way."""
    config = EPConfig(sum_groups=4, mode="normal", block_tokens=16)
    block = ExpertParallelMoE.from_transformers(BLOCKS["qwen2_moe"](), group, config)
    x = 4 * torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = block(x)
        # Without the block, token 4 differs in a batch of five.
        for num_tokens in (0, 3, 5, 15):
            assert torch.equal(block(x[:num_tokens]), whole[:num_tokens])
