"""Layers with placed experts, and what their ranks hold, for tests on several ranks."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, ExpertPlacement, ExpertWeights, balance
from epcomm.testing.buffer_suite import BATCH_SPECS
from epcomm.testing.data import RankBatch, make_batch, make_weights
from epcomm.testing.oracle import OracleResult, run_oracle
from epcomm.testing.poison import poisoned_memory

SPEC = BATCH_SPECS["uneven"]


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A layer, the experts that it was made of, [E, ...], and the batches of all ranks."""

    layer: ExpertParallelExperts
    weights: ExpertWeights
    batches: list[RankBatch]

    @property
    def mine(self) -> RankBatch:
        return self.batches[self.layer.group.rank]

    def forward(self, *, decode: bool = False, grad: bool = False) -> Tensor:
        with poisoned_memory(), torch.set_grad_enabled(grad):
            return self.layer(self.mine.x, self.mine.topk, decode=decode)

    def expected(self) -> OracleResult:
        return run_oracle(self.batches, self.weights)


def placed_layer(group: EPGroup, config: EPConfig, number: int = 0) -> Placed:
    world_size = group.world_size
    weights = make_weights(SPEC, world_size, number=number)
    same = 1 if config.replicated else world_size
    batches = [make_batch(SPEC, rank % same, world_size) for rank in range(world_size)]
    layer = ExpertParallelExperts(weights, group, config, top_k=SPEC.num_topk(world_size))
    return Placed(layer=layer, weights=weights, batches=batches)


def any_placement(layer: ExpertParallelExperts, seed: int) -> ExpertPlacement:
    """Balance random loads, with the ranks and the experts of each in random order."""
    numbers = random.Random(seed)
    found = balance(
        [numbers.random() ** 4 for _ in range(layer.num_logical_experts)],
        num_ranks=layer.group.world_size,
        num_physical_experts=layer.num_experts,
    )
    held = [list(found.experts_of_rank(rank)) for rank in range(found.num_ranks)]
    numbers.shuffle(held)
    for experts in held:
        numbers.shuffle(experts)
    return replace(found, physical_to_logical=tuple(e for experts in held for e in experts))


def gather_local(layer: ExpertParallelExperts, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return [P, ...] of all ranks' [L, ...], by name."""
    pieces = {name: getattr(t, "_local_tensor", t).detach() for name, t in tensors.items()}
    group = layer.group
    return {
        name: group.collectives.all_gather(piece.contiguous()).flatten(0, 1)
        for name, piece in pieces.items()
    }


def expect_copies_of(layer: ExpertParallelExperts, whole: Mapping[str, Tensor]) -> None:
    """Check that every physical expert is bit-equal to its logical one."""
    copies = list(layer.placement.physical_to_logical)
    for name, held in gather_local(layer, layer.expert_parameters()).items():
        assert torch.equal(held, whole[name].detach()[copies]), name
