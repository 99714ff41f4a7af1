from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from epcomm.bench.check import check_contender, tolerance
from epcomm.bench.contenders.base import Contender
from epcomm.bench.run import ALTERNATIVES
from epcomm.testing.data import BatchSpec, make_batch, random_ids

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
def test_sums_are_the_formula_rounded_once(name: str, tokens: str, dtype: torch.dtype) -> None:
    spec = spec_of(tokens, dtype)
    rank, alternative = dist.get_rank(), make_alternative(name, spec)
    check_contender(alternative, make_batch(spec, rank, 2), rank * spec.num_local_experts)


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


def test_the_tolerance_follows_the_dtype() -> None:
    one = tolerance(torch.bfloat16, top_k=8, num_roundings=1)
    assert one == pytest.approx(2**-8, rel=1e-2)
    assert tolerance(torch.bfloat16, top_k=8, num_roundings=2) == pytest.approx(2 * one, rel=1e-2)
    assert tolerance(torch.float32, top_k=8, num_roundings=2) < 2e-6
