"""Check the results of a contender before it is measured, by a formula in float64.

Expert e multiplies its row by 1, 2 or 4, so y = x * sum of w_k * factor(e_k), and every rank can
compute the rows that its experts must receive, since it can make the batch of every rank. No
contender runs code of this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epcomm.bench.contenders.base import Contender, DispatchedT, Grouped
from epcomm.bench.ranks import faults_of_all
from epcomm.errors import EPError
from epcomm.testing.data import RankBatch


class CheckError(Exception):
    """A contender moves or sums rows incorrectly, so it is not measured."""


def check_contender(
    contender: Contender[DispatchedT], batches: Sequence[RankBatch], rank: int, num_local: int
) -> None:
    """Run one call, and compare the received rows and y with a formula. batches: of all ranks.

    Collective: yes.
    Raises:
        CheckError: raised on all ranks, with the fault of each rank.
    """
    try:
        fault = _find_fault(contender, batches, rank, num_local)
    except EPError as error:
        fault = str(error)
    if faults := faults_of_all(fault):
        raise CheckError(f"{contender.name}: {faults}; nothing was measured")


def _find_fault(
    contender: Contender[DispatchedT], batches: Sequence[RankBatch], rank: int, num_local: int
) -> str | None:
    dispatched = contender.dispatch(batches[rank])
    grouped = contender.group(dispatched)
    first_expert = rank * num_local
    fault = _find_row_fault(contender, grouped, batches, first_expert)
    y = contender.combine(run_experts(grouped, first_expert), dispatched)
    return fault or _find_sum_fault(contender, y, batches[rank])


def expert_factor(expert: Tensor | int) -> Tensor | float:
    """Return what an expert multiplies by: a power of two, so that products are exact."""
    return 2.0 ** (expert % 3)


def run_experts(grouped: Grouped, first_expert: int) -> Tensor:
    """Return the results [C, H] of this rank's experts; undefined where rows are. Host sync."""
    results = grouped.rows.clone(memory_format=torch.contiguous_format)
    for local, run in enumerate(grouped.runs()):
        results[run.start : run.stop] *= float(expert_factor(first_expert + local))
    return results


def _find_row_fault(
    contender: Contender, grouped: Grouped, batches: Sequence[RankBatch], first_expert: int
) -> str | None:
    """Return the fault of the rows of this rank's experts, which must be their tokens, or None."""
    order = contender.source_order
    sources = range(len(batches)) if order is None else order
    for local, run in enumerate(grouped.runs()):
        rows = grouped.rows[run.start : run.stop]
        expected = _rows_of_expert(first_expert + local, [batches[rank] for rank in sources])
        if order is None:
            rows, expected = _sorted(rows), _sorted(expected)
        if not _are_equal(rows, expected, contender.row_error):
            return (
                f"expert {first_expert + local} got {len(rows)} rows, not its {len(expected)} "
                "tokens"
            )
    return None


def _find_sum_fault(contender: Contender, y: Tensor, batch: RankBatch) -> str | None:
    """Return how far y is from the dense result, or None if within the tolerance."""
    if y.shape != batch.x.shape or y.dtype != batch.x.dtype:
        return f"y is {list(y.shape)} {y.dtype}, expected {list(batch.x.shape)} {batch.x.dtype}"
    num_roundings = contender.num_roundings
    factors = batch.topk_weights.double() * expert_factor(batch.topk_ids)
    expected = batch.x.double() * factors.sum(dim=1, keepdim=True)
    limit = tolerance(y.dtype, top_k=batch.topk_ids.shape[1], num_roundings=num_roundings)
    # Below the smallest normal number, the rounding error is absolute, not relative.
    allowed = limit * expected.abs() + num_roundings * torch.finfo(y.dtype).tiny
    # The worst case: all terms of a token have the same error.
    allowed += (
        (1 + limit) * contender.row_error * _largest(batch.x) * factors.sum(dim=1, keepdim=True)
    )
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


def _rows_of_expert(expert: int, batches: Sequence[RankBatch]) -> Tensor:
    """Return the tokens of `expert`, [N, H], in the order of `batches`."""
    return torch.cat([batch.x[(batch.topk_ids == expert).any(dim=1)] for batch in batches])


def _are_equal(rows: Tensor, expected: Tensor, row_error: float) -> bool:
    # Without an error, rows must be bit-equal.
    if not row_error:
        return torch.equal(_bits(rows), _bits(expected))
    if rows.shape != expected.shape:
        return False
    error = (rows.double() - expected.double()).abs()
    return bool((error <= row_error * _largest(expected)).all())


def _largest(rows: Tensor) -> Tensor:
    """Return the largest absolute value of each row, [N, 1], float64."""
    return rows.double().abs().amax(dim=1, keepdim=True)


def _bits(rows: Tensor) -> Tensor:
    """View rows as bytes, in which -0.0 differs from 0.0."""
    return rows.contiguous().view(torch.uint8)


def _sorted(rows: Tensor) -> Tensor:
    """Put rows in an order that only their values decide."""
    marks = torch.linspace(1, 2, rows.shape[1], dtype=torch.float64, device=rows.device)
    return rows[(rows.double() * marks).sum(dim=1).argsort()]
