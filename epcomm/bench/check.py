"""Check the sums of a contender before it is measured, by a formula in float64.

Expert e multiplies its rows by 1, 2 or 4, so y = x * sum of w_k * factor(e_k), which is wrong if a
row is missing, or is another token's or at another expert. No contender runs code of this module.
"""

import torch
from torch import Tensor

from epcomm.bench.contenders.base import Contender, DispatchedT, Grouped
from epcomm.bench.ranks import faults_of_all
from epcomm.errors import EPError
from epcomm.testing.data import RankBatch


class CheckError(Exception):
    """A contender moves or sums rows incorrectly, so it is not measured."""


def check_contender(contender: Contender[DispatchedT], batch: RankBatch, first_expert: int) -> None:
    """Run one call with the batch of this rank, and compare y with a formula.

    Collective: yes.
    Raises:
        CheckError: raised on all ranks, with the fault of each rank.
    """
    try:
        dispatched = contender.dispatch(batch)
        results = run_experts(contender.group(dispatched), first_expert)
        fault = _find_fault(contender, contender.combine(results, dispatched), batch)
    except EPError as error:
        fault = str(error)
    if faults := faults_of_all(fault):
        raise CheckError(f"{contender.name}: {faults}; nothing was measured")


def expert_factor(expert: Tensor | int) -> Tensor | float:
    """Return what an expert multiplies by: a power of two, so that products are exact."""
    return 2.0 ** (expert % 3)


def run_experts(grouped: Grouped, first_expert: int) -> Tensor:
    """Return the results [C, H] of this rank's experts; undefined where rows are. Host sync."""
    results = grouped.rows.clone(memory_format=torch.contiguous_format)
    for local, run in enumerate(grouped.runs()):
        results[run.start : run.stop] *= float(expert_factor(first_expert + local))
    return results


def _find_fault(contender: Contender, y: Tensor, batch: RankBatch) -> str | None:
    """Return how far y is from the dense result, or None if within the tolerance."""
    if y.shape != batch.x.shape or y.dtype != batch.x.dtype:
        return f"y is {list(y.shape)} {y.dtype}, expected {list(batch.x.shape)} {batch.x.dtype}"
    num_roundings = contender.num_roundings
    factors = batch.topk_weights.double() * expert_factor(batch.topk_ids)
    x, factor = batch.x.double(), factors.sum(dim=1, keepdim=True)
    expected = x * factor
    limit = tolerance(y.dtype, top_k=batch.topk_ids.shape[1], num_roundings=num_roundings)
    # Below the smallest normal number, the rounding error is absolute, not relative.
    allowed = limit * expected.abs() + num_roundings * torch.finfo(y.dtype).tiny
    # The worst case: all terms of a token have the same error.
    largest = x.abs().amax(dim=1, keepdim=True)
    allowed += (1 + limit) * contender.row_error * largest * factor
    excess = (y.double() - expected).abs() - allowed
    # The negation makes NaN fail too.
    if not bool((excess <= 0).all()):
        return f"y is beyond the tolerance of {limit:.1e} in {int((~(excess <= 0)).sum())} elements"
    return None


def tolerance(dtype: torch.dtype, *, top_k: int, num_roundings: int) -> float:
    """Return the largest relative error of an element of y.

    The terms of an element have one sign, x times positive weights, so nothing cancels: each cast
    adds half a unit in the last place, and each of K products and sums the same in float32.
    """
    unit, unit_fp32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    return (1 + unit) ** num_roundings * (1 + unit_fp32) ** (2 * top_k) - 1
