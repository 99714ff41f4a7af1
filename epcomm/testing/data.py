"""Seeded data of all ranks, which every rank can make, so that checks need no communication."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Generator, Tensor

from epcomm.records import TopKOutput
from epcomm.types import sum_dtype
from epcomm.weights.unquantized import Activation, ExpertFormat, ExpertWeights

# Distance of the seeds of two ranks: a prime, so that no two batches share a seed.
_SEED_STRIDE = 7919
ChooseIds = Callable[[int, int, int, Generator], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class RankBatch:
    """The part of one rank in a batch.

    x: [T, H].   topk_ids: [T, K], int64.   topk_weights: [T, K], float32, or float64 for float64
    rows.   dy: [T, H], the gradient of the output y.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    dy: Tensor

    @property
    def topk(self) -> TopKOutput:
        """The routing of the tokens."""
        return TopKOutput(topk_ids=self.topk_ids, topk_weights=self.topk_weights)

    def to(self, device: torch.device) -> Self:
        return replace(self, **{name: each.to(device) for name, each in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """The recipe of the batches of all ranks.

    tokens_of_rank: maps (rank, world_size) to T.
    choose_ids: maps (T, top_k, num_experts, generator) to topk_ids [T, K].
    """

    hidden_size: int = 32
    num_local_experts: int = 2
    top_k: int = 2
    dtype: torch.dtype = torch.float32
    seed: int = 0
    tokens_of_rank: Callable[[int, int], int]
    choose_ids: ChooseIds

    def num_experts(self, world_size: int) -> int:
        """Return P, the physical experts of all ranks."""
        return self.num_local_experts * world_size

    def num_topk(self, world_size: int) -> int:
        """Return K, which is at most the number of experts."""
        return min(self.top_k, self.num_experts(world_size))


SWIGLU = ExpertFormat()


def make_batch(spec: BatchSpec, rank: int, world_size: int, *, number: int = 0) -> RankBatch:
    """Make batch `number` of `rank`, equal on every rank that makes it."""
    generator = Generator().manual_seed(spec.seed + _SEED_STRIDE * (rank + 101 * number))
    num_tokens = spec.tokens_of_rank(rank, world_size)
    top_k, shape = spec.num_topk(world_size), (num_tokens, spec.hidden_size)
    # Draw float64 rows in float64, for full precision.
    made = sum_dtype(spec.dtype)
    return RankBatch(
        x=torch.randn(shape, generator=generator, dtype=made, device="cpu").to(spec.dtype),
        topk_ids=spec.choose_ids(num_tokens, top_k, spec.num_experts(world_size), generator),
        topk_weights=torch.rand(num_tokens, top_k, generator=generator, dtype=made, device="cpu")
        + 0.1,
        dy=torch.randn(shape, generator=generator, dtype=made, device="cpu").to(spec.dtype),
    )


def make_weights(
    spec: BatchSpec,
    world_size: int,
    *,
    intermediate_size: int = 16,
    expert_format: ExpertFormat = SWIGLU,
    has_bias: bool = False,
    number: int = 0,
    device: torch.device | None = None,
) -> ExpertWeights:
    """Make the experts of all ranks, equal on every rank."""
    generator = Generator().manual_seed(spec.seed + 104729 * (number + 1))
    num_experts, hidden_size = spec.num_experts(world_size), spec.hidden_size
    first = intermediate_size * (2 if expert_format.activation.is_gated else 1)
    made = sum_dtype(spec.dtype)

    def matrix(rows: int, columns: int) -> Tensor:
        shape = (num_experts, rows, columns)
        values = torch.randn(shape, generator=generator, dtype=made, device="cpu") / columns**0.5
        stored = values.transpose(1, 2).contiguous() if expert_format.is_transposed else values
        return stored.to(device, spec.dtype).requires_grad_()

    def bias(size: int) -> Tensor | None:
        values = torch.randn(num_experts, size, generator=generator, dtype=made, device="cpu") / 2
        return values.to(device, spec.dtype).requires_grad_() if has_bias else None

    return ExpertWeights(
        gate_up_proj=matrix(first, hidden_size),
        down_proj=matrix(hidden_size, intermediate_size),
        gate_up_bias=bias(first),
        down_bias=bias(hidden_size),
        format=expert_format,
    )


def _draw(shape: Sequence[int], generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")


def random_ids(num_tokens: int, top_k: int, num_experts: int, generator: Generator) -> Tensor:
    """Choose distinct uniform ids."""
    return _draw((num_tokens, num_experts), generator).argsort(dim=1)[:, :top_k]


def holed_ids(num_tokens: int, top_k: int, num_experts: int, generator: Generator) -> Tensor:
    """Choose distinct uniform ids, about half replaced by -1; the first token has only -1."""
    ids = random_ids(num_tokens, top_k, num_experts, generator)
    ids[torch.rand(ids.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.5] = -1
    ids[:1] = -1
    return ids


def repeated_ids(num_tokens: int, top_k: int, num_experts: int, generator: Generator) -> Tensor:
    """Choose uniform ids; about half repeat the previous entry; the first token has one id."""
    ids = random_ids(num_tokens, top_k, num_experts, generator)
    repeats = torch.rand(ids.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.5
    repeats[:1] = True
    for k in range(1, ids.shape[1]):
        ids[:, k] = torch.where(repeats[:, k], ids[:, k - 1], ids[:, k])
    return ids


def last_expert_ids(num_tokens: int, top_k: int, num_experts: int, generator: Generator) -> Tensor:
    """Send every token only to the last expert."""
    ids = torch.full((num_tokens, top_k), -1, device="cpu")
    ids[:, -1] = num_experts - 1
    return ids


def only_id(expert: int) -> ChooseIds:
    """Return a function that chooses this id in all entries of all tokens."""
    return lambda num_tokens, top_k, *_: torch.full((num_tokens, top_k), expert, device="cpu")


ACTIVATIONS = {
    "swiglu": SWIGLU,
    "clamped_swiglu": ExpertFormat(
        activation=Activation.CLAMPED_SWIGLU,
        is_transposed=True,
        is_interleaved=True,
        alpha=1.702,
        limit=0.75,
    ),
    "limited_swiglu": ExpertFormat(activation=Activation.LIMITED_SWIGLU, limit=0.75),
    "relu2": ExpertFormat(activation=Activation.RELU2),
}
