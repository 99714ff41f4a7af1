from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from epcomm.bench.check import CheckError, check_contender, tolerance
from epcomm.bench.contenders.base import Contender
from epcomm.bench.run import ALTERNATIVES
from epcomm.testing.data import BatchSpec, RankBatch, make_batch, random_ids

# All ranks of AllGather have the same T.
TOKENS: dict[str, Callable[[int, int], int]] = {
    "even": lambda rank, world_size: 5,
    "uneven": lambda rank, world_size: 3 + 4 * rank,
    "a rank without tokens": lambda rank, world_size: 0 if rank == 1 else 6,
    "no tokens anywhere": lambda rank, world_size: 0,
    "only the last rank has tokens": lambda rank, world_size: 7 * (rank == world_size - 1),
}


def spec_of(tokens: str, dtype: torch.dtype = torch.float32) -> BatchSpec:
    return BatchSpec(
        num_local_experts=3,
        top_k=3,
        dtype=dtype,
        tokens_of_rank=TOKENS[tokens],
        choose_ids=random_ids,
    )


def make_alternative(name: str, spec: BatchSpec) -> Contender:
    return ALTERNATIVES[name](spec.num_experts(dist.get_world_size()))


def batches_of(spec: BatchSpec) -> list[RankBatch]:
    world_size = dist.get_world_size()
    return [make_batch(spec, rank, world_size) for rank in range(world_size)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "tokens", "dtype"),
    [
        *(("expert_rows", tokens, torch.float32) for tokens in TOKENS),
        *(("all_gather", tokens, torch.float32) for tokens in ("even", "no tokens anywhere")),
        *(
            (name, "even", dtype)
            for name in ALTERNATIVES
            for dtype in (torch.bfloat16, torch.float16)
        ),
    ],
)
def test_rows_arrive_bit_equal_and_sums_are_rounded_once(
    name: str, tokens: str, dtype: torch.dtype
) -> None:
    spec = spec_of(tokens, dtype)
    alternative = make_alternative(name, spec)
    check_contender(alternative, batches_of(spec), dist.get_rank(), spec.num_local_experts)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ALTERNATIVES)
def test_a_batch_may_be_combined_after_another_dispatch(name: str) -> None:
    spec, rank = spec_of("even"), dist.get_rank()
    alternative = make_alternative(name, spec)
    batches = [make_batch(spec, rank, 2, number=number) for number in range(2)]
    waiting = [alternative.dispatch(batch) for batch in batches]
    for batch, dispatched in zip(batches, waiting, strict=True):
        y = alternative.combine(alternative.group(dispatched).rows, dispatched)
        expected = batch.x * batch.topk_weights.sum(dim=1, keepdim=True)
        torch.testing.assert_close(y, expected)


@pytest.mark.ranks(2)
def test_one_wrong_bit_on_one_rank_fails_the_check_on_all() -> None:
    spec = spec_of("even")
    batches = batches_of(spec)
    seen = list(batches)
    if dist.get_rank() == 1:
        x = batches[1].x.clone()
        x.view(torch.int32)[2, 3] ^= 1
        seen[1] = replace(batches[1], x=x)
    alternative = make_alternative("expert_rows", spec)
    with pytest.raises(CheckError, match=r"expert_rows: rank \d: expert .* nothing was measured"):
        check_contender(alternative, seen, dist.get_rank(), spec.num_local_experts)


def test_the_tolerance_follows_the_dtype() -> None:
    one = tolerance(torch.bfloat16, top_k=8, num_roundings=1)
    assert one == pytest.approx(2**-8, rel=1e-2)
    assert tolerance(torch.bfloat16, top_k=8, num_roundings=2) == pytest.approx(2 * one, rel=1e-2)
    assert tolerance(torch.float32, top_k=8, num_roundings=2) < 2e-6
