"""Brute-force routing in pure Python and float64; shares no code with the reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from epcomm.routing import RoutingSpec


@dataclass(frozen=True, kw_only=True)
class OracleRow:
    """The routing of one token, best expert first.

    gap: smallest distance between two scores whose order decides something, honest ties apart.
        Below the rounding of the tested dtype the order is arbitrary.
    tied: some honest tie was decided by the index.
    """

    ids: list[int]
    weights: list[float]
    gap: float
    tied: bool


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A ranked expert or group: its value decides, then its index; equal origins make a tie."""

    index: int
    value: float
    origin: tuple[float, ...]


def route_row(
    logits: Sequence[float], spec: RoutingSpec, bias: Sequence[float] | None
) -> OracleRow:
    """Route one token.

    Args:
        logits: E floats, NaN and infinities allowed, but not two +inf with softmax.
        bias: E floats or None.
    """
    num_experts = len(logits)
    bias = bias or [0.0] * num_experts
    inner = [value if spec.correction_bias == "score" else 0.0 for value in bias]
    outer = [value if spec.correction_bias == "selection" else 0.0 for value in bias]
    adjusted = [cap(z, spec.softcap) + b for z, b in zip(logits, inner, strict=True)]
    valid = [e for e in range(num_experts) if not math.isnan(logits[e])]
    scores = dict(zip(valid, score([adjusted[e] for e in valid], spec), strict=True))
    choices = {e: scores[e] + outer[e] for e in valid}
    origins: dict[int, tuple[float, ...]] = {e: (adjusted[e], outer[e]) for e in valid}
    group_size = num_experts // spec.num_groups
    groups = [
        group_candidate(g, [choices.get(e, -math.inf) for e in members(g, group_size)], spec)
        for g in range(spec.num_groups)
    ]
    ranked_groups = rank(groups)
    kept = {candidate.index for candidate in ranked_groups[: spec.topk_groups]}
    for e in valid:
        if e // group_size not in kept:
            choices[e] = 0.0 if spec.dropped_groups == "zero" else -math.inf
            origins[e] = (choices[e],)
    ranked = rank([Candidate(index=e, value=choices[e], origin=origins[e]) for e in valid])
    order = [candidate.index for candidate in ranked]
    order += [e for e in range(num_experts) if e not in valid]
    ids = order[: spec.top_k]
    dropped = {e for e in valid if e // group_size not in kept}
    if spec.dropped_groups == "zero" and spec.correction_bias == "selection":
        dropped = set()
    weights = weigh([None if e in dropped else scores.get(e) for e in ids], spec)
    edge = ranked_groups[spec.topk_groups - 1 : spec.topk_groups + 1]
    decisive = [*pairwise(edge), *pairwise(ranked[: spec.top_k + 1])]
    return OracleRow(
        ids=ids,
        weights=weights,
        gap=min((a.value - b.value for a, b in decisive if not is_tie(a, b)), default=math.inf),
        tied=any(is_tie(a, b) for a, b in decisive),
    )


def route_rows(logits: Tensor, spec: RoutingSpec, bias: Tensor | None) -> list[OracleRow]:
    bias_values = None if bias is None else bias.double().tolist()
    return [route_row(row, spec, bias_values) for row in logits.double().tolist()]


def cap(z: float, softcap: float | None) -> float:
    return z if softcap is None else softcap * math.tanh(z / softcap)


def members(group: int, group_size: int) -> range:
    return range(group * group_size, (group + 1) * group_size)


def score(logits: list[float], spec: RoutingSpec) -> list[float]:
    if spec.score_function == "sigmoid":
        return [
            math.exp(z) / (1 + math.exp(z)) if z < 0 else 1 / (1 + math.exp(-z)) for z in logits
        ]
    if spec.score_function == "sqrt_softplus":
        return [math.sqrt(max(z, 0.0) + math.log1p(math.exp(-abs(z)))) for z in logits]
    return logits if spec.softmax_order == "after_topk" else softmax(logits)


def softmax(logits: list[float]) -> list[float]:
    top = max(logits, default=0.0)
    if top == -math.inf:
        return [0.0 for _ in logits]
    powers = [1.0 if z == top else math.exp(z - top) for z in logits]
    return [power / sum(powers) for power in powers]


def group_candidate(group: int, choices: list[float], spec: RoutingSpec) -> Candidate:
    best = tuple(sorted(choices, reverse=True)[: spec.group_score_top_n])
    return Candidate(index=group, value=sum(best), origin=best)


def rank(candidates: list[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: (-candidate.value, candidate.index))


def is_tie(first: Candidate, second: Candidate) -> bool:
    """Return whether values are equal by origin and not by rounding; -inf has only one origin."""
    return first.origin == second.origin or first.value == second.value == -math.inf


def weigh(scores: list[float | None], spec: RoutingSpec) -> list[float]:
    """Return the weights of the selected scores; None is an expert whose weight must be 0."""
    if spec.softmax_order == "after_topk":
        weights = softmax([-math.inf if s is None else s for s in scores])
    else:
        weights = [s or 0.0 for s in scores]
    if spec.renormalize:
        total = sum(weights)
        if spec.epsilon_mode == "added":
            total += spec.epsilon
        if spec.epsilon_mode == "clamp":
            total = max(total, spec.epsilon)
        weights = [weight / total if total else 0.0 for weight in weights]
    return [weight * spec.routed_scaling_factor for weight in weights]
