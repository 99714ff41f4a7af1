"""Check the results of a contender before it is measured.

Experts return their row, so y = x * (sum of the token's router weights), and every rank can compute
the rows that its experts must receive, since it can make the batch of every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import Contender, Grouped
from epcomm.testing.data import RankBatch

DispatchedT = TypeVar("DispatchedT")


class CheckError(Exception):
    """A contender moved or summed something wrong; nothing may be measured."""


def check_contender(
    contender: Contender[DispatchedT], batches: Sequence[RankBatch], rank: int, num_local: int
) -> None:
    """Run one call and compare what the experts receive and what comes back.

    Args:
        contender: what is to be measured.
        batches: of all ranks.
        rank: this one.
        num_local: L.

    Collective: yes.
    Raises:
        CheckError: on all ranks, with the fault of each.
    """
    dispatched = contender.dispatch(batches[rank])
    grouped = contender.group(dispatched)
    fault = find_row_fault(grouped, batches, rank * num_local)
    y = contender.combine(grouped.rows.contiguous(), dispatched)
    fault = fault or find_sum_fault(y, batches[rank], contender.num_roundings)
    faults: list[str | None] = [None] * len(batches)
    dist.all_gather_object(faults, fault)
    found = [f"rank {where}: {what}" for where, what in enumerate(faults) if what]
    if found:
        raise CheckError(f"{contender.name}: {'; '.join(found)}; nothing was measured")


def find_row_fault(grouped: Grouped, batches: Sequence[RankBatch], first_expert: int) -> str | None:
    """Return the fault of the rows of this rank's experts, which must be their tokens, or None."""
    counts = grouped.num_rows_per_expert.tolist()
    start = 0
    for local, count in enumerate(counts):
        rows = grouped.rows[start : start + count]
        expected = _rows_of_expert(first_expert + local, batches)
        if not torch.equal(_bits(rows), _bits(expected)):
            return f"expert {first_expert + local} got {count} rows, not its {len(expected)} tokens"
        start += count
    return None


def find_sum_fault(y: Tensor, batch: RankBatch, num_roundings: int) -> str | None:
    """Return how far y is from the dense result, or None if within the tolerance."""
    if y.shape != batch.x.shape or y.dtype != batch.x.dtype:
        return f"y is {list(y.shape)} {y.dtype}, expected {list(batch.x.shape)} {batch.x.dtype}"
    expected = batch.x.double() * batch.topk_weights.double().sum(dim=1, keepdim=True)
    limit = tolerance(y.dtype, top_k=batch.topk_ids.shape[1], num_roundings=num_roundings)
    # Below the smallest normal number a rounding is absolute.
    allowed = limit * expected.abs() + num_roundings * torch.finfo(y.dtype).tiny
    excess = (y.double() - expected).abs() - allowed
    # Not `> 0`: NaN must fail too.
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
    """Return the tokens of `expert`, [N, H], by rank, then token."""
    return torch.cat([batch.x[(batch.topk_ids == expert).any(dim=1)] for batch in batches])


def _bits(rows: Tensor) -> Tensor:
    """View rows as bytes, in which -0.0 differs from 0.0."""
    return rows.contiguous().view(torch.uint8)
