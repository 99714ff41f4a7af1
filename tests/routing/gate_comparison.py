"""Compare a router with the reference: which tokens may differ, and by how much."""

from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.records import TopKOutput
from epcomm.routing import RoutingSpec, route
from epcomm.routing.reference import _find_dropped, score_all

# Units in the last place of float32: scores this close may change places, because exp and sums
# round differently on each device, and weights may differ by as many units.
SCORE_UNITS, WEIGHT_UNITS = 4, 8
# torch on a CPU rounds one tanh in 2000 to the other side, and one unit in the last place of a
# logit of 16 is 16 units of its exp: the same number more for each unit of the softcap.
UNITS_OF_SOFTCAP = 2


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of one batch.

    num_excused: tokens whose experts differ where scores are within rounding of each other.
    wrong: one line for each kind of token that differs without such a reason.
    max_units: largest difference of weights of the tokens with the same experts.
    """

    num_tokens: int
    num_excused: int
    wrong: tuple[str, ...]
    max_units: float


def compare(
    found: TopKOutput, logits: Tensor, spec: RoutingSpec, bias: Tensor | None
) -> Comparison:
    """Compare the routing of a batch with the reference, in any order within K."""
    expected = route(logits, spec, correction_bias=bias)
    shape = (logits.shape[0], logits.shape[1])
    is_found, is_expected = (
        torch.zeros(shape, dtype=torch.bool, device=logits.device).scatter(1, each.topk_ids, True)
        for each in (found, expected)
    )
    differs = (is_found != is_expected).any(1)
    ours, theirs = (
        torch.zeros(shape, device=logits.device).scatter(1, each.topk_ids, each.topk_weights)
        for each in (found, expected)
    )
    units = _units(ours, theirs)[~differs]
    limit: float = WEIGHT_UNITS
    if not logits.is_cuda:
        limit += UNITS_OF_SOFTCAP * (spec.softcap or 0.0)
    wrong = []
    if (is_found.sum(1) != spec.top_k).any():
        wrong.append("experts of a token are not distinct")
    if units.numel() and not units.max() <= limit:
        wrong.append(f"weights differ by {units.max()} units")
    is_close, is_tie = _border(logits, spec, bias, is_found, is_expected)
    if (differs & ~is_close).any():
        token = int((differs & ~is_close).nonzero()[0])
        wrong.append(f"experts of token {token} differ: {found.topk_ids[token].tolist()}")
    if (differs & is_tie).any():
        wrong.append(f"a tie is broken otherwise at {int((differs & is_tie).nonzero()[0])}")
    return Comparison(
        num_tokens=shape[0],
        num_excused=int(differs.sum()),
        wrong=tuple(wrong),
        max_units=float(units.max()) if units.numel() else 0.0,
    )


def _border(
    logits: Tensor, spec: RoutingSpec, bias: Tensor | None, ours: Tensor, theirs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return of each token whether a border lies between close scores, and whether equals changed.

    The second is about experts with the same logit and bias, one chosen here and one there; with
    groups, what changed may be a whole group.
    """
    scores = score_all(logits, spec, bias)
    if spec.correction_bias == "selection" and bias is not None:
        scores = scores + bias.float()
    scores = scores.masked_fill(logits.isnan(), float("-inf"))
    is_close = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    if spec.drops_groups:
        grouped = scores.view(len(logits), spec.num_groups, -1)
        sums = grouped.topk(spec.group_score_top_n, dim=-1).values.sum(-1)
        is_close |= _is_close_at(sums, spec.topk_groups)
        fill = 0.0 if spec.dropped_groups == "zero" else float("-inf")
        dropped = _find_dropped(scores, spec)
        scores = scores.masked_fill(dropped, fill)
    is_close |= _is_close_at(scores, spec.top_k)
    values = logits.float().nan_to_num(nan=-1e38)
    offset = torch.zeros_like(values) if bias is None else bias.float().expand_as(values)
    gone, new = theirs & ~ours, ours & ~theirs
    same = (values[:, :, None] == values[:, None]) & (offset[:, :, None] == offset[:, None])
    is_tie = (same & gone[:, :, None] & new[:, None]).flatten(1).any(1)
    return is_close, is_tie & (not spec.drops_groups)


def _is_close_at(scores: Tensor, count: int) -> Tensor:
    """Return whether the last score that is taken is close to the first that is not."""
    if count >= scores.shape[1]:
        return torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    best = scores.topk(count + 1, dim=1).values
    return _units(best[:, count - 1], best[:, count]) <= SCORE_UNITS


def _units(first: Tensor, second: Tensor) -> Tensor:
    """Return differences in units in the last place of float32, of the larger value."""
    largest = torch.maximum(first.abs(), second.abs()).float()
    unit = torch.nextafter(largest, torch.full_like(largest, float("inf"))) - largest
    apart = (first.double() - second.double()).abs()
    return torch.where(first == second, 0.0, apart / unit.double())
