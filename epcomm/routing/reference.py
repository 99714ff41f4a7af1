"""Route in plain torch: the definition that every device kernel is checked against.

Ties, NaN logits, rows without a finite logit and weights that sum to zero each have one defined
result, whatever the device; `route` lists them.
"""

import math
from functools import reduce

import torch
from torch import Tensor

from epcomm.errors import ConfigError, ShapeError
from epcomm.records import TopKOutput
from epcomm.routing.spec import (
    CorrectionBias,
    DroppedGroups,
    EpsilonMode,
    RoutingSpec,
    ScoreFunction,
    SoftmaxOrder,
)
from epcomm.types import sum_dtype

_FILL = {DroppedGroups.NEG_INF: -math.inf, DroppedGroups.ZERO: 0.0}


def route(
    logits: Tensor,
    spec: RoutingSpec,
    *,
    correction_bias: Tensor | None = None,
    hidden_states: Tensor | None = None,
) -> TopKOutput:
    """Choose the experts of each token and their weights.

    All arithmetic is float64 for float64 logits, else float32. The weights are differentiable with
    respect to the logits, and to a bias inside the score; the choice is not.

    Ties go to the lowest id, among groups as among experts. A NaN logit ranks last, after -inf;
    its expert weighs 0 and the others are weighed as if it were absent. +inf counts as the largest
    finite number. With softmax, a row without any logit above -inf weighs 0, and so does, under
    renormalisation, a selection whose scores sum to 0. An expert of a dropped group is selected
    only where NaN, -inf or the ZERO fill leave too few others; it weighs 0, except that with the
    ZERO fill and a bias for the selection it keeps its score, as the models with that pair do.

    Args:
        logits: [T, E], floating point; T = 0 is legal.
        spec: the routing of the model.
        correction_bias: [E]; required where the spec has a bias, refused where it has none.
        hidden_states: [T, H]; only a custom function reads it.

    Returns:
        topk_ids [T, K], int64, distinct, best selection score first.
        topk_weights [T, K], float32, or float64 for float64 logits.

    Collective: none.
    Host sync: none.   Graph capture: yes.   Deterministic: yes.
    Lifetime: ordinary tensors, owned by the caller.
    Raises:
        ShapeError: a wrong shape or dtype, also of what a custom function returned.
        ConfigError: more experts asked for than the logits have, or a bias where none belongs.
    Source: the routers of transformers, SGLang, vLLM and Megatron-LM; ours: one definition of
        ties, NaN and zero sums.
    """
    check_arguments(logits, spec, correction_bias)
    if spec.custom_function is None:
        return _route_by_spec(logits, spec, correction_bias)
    topk = spec.custom_function(
        logits, top_k=spec.top_k, correction_bias=correction_bias, hidden_states=hidden_states
    )
    _check_custom_output(topk, (logits.shape[0], spec.top_k))
    return topk


def _route_by_spec(logits: Tensor, spec: RoutingSpec, bias: Tensor | None) -> TopKOutput:
    scores = score_all(logits, spec, bias)
    topk_ids, is_dropped = _select(scores, spec, bias, torch.isnan(logits))
    selects = spec.correction_bias is CorrectionBias.SELECTION
    is_weightless = None
    if is_dropped is not None and not (selects and spec.dropped_groups is DroppedGroups.ZERO):
        is_weightless = is_dropped.gather(1, topk_ids)
    weights = _weigh(scores.gather(1, topk_ids), spec, is_weightless)
    return TopKOutput(topk_ids=topk_ids, topk_weights=weights)


def weigh_chosen(
    logits: Tensor,
    spec: RoutingSpec,
    *,
    correction_bias: Tensor | None,
    topk_ids: Tensor,
    is_weightless: Tensor | None = None,
) -> Tensor:
    """Return the weights [T, K] that route() gives to chosen experts; differentiable.

    is_weightless: [T, K], bool; entries that weigh 0 and get no gradient; None: none.

    Local.   Host sync: none.
    """
    return _weigh(score_all(logits, spec, correction_bias).gather(1, topk_ids), spec, is_weightless)


def score_all(logits: Tensor, spec: RoutingSpec, bias: Tensor | None) -> Tensor:
    """Return the scores of all experts, [..., E]; logits where softmax comes after top-k."""
    adjusted = _adjust_logits(logits, spec, bias)
    if spec.score_function is ScoreFunction.SIGMOID:
        return _sigmoid(adjusted)
    if spec.score_function is ScoreFunction.SQRT_SOFTPLUS:
        return _sqrt_softplus(adjusted)
    return adjusted if spec.softmax_order is SoftmaxOrder.AFTER_TOPK else _softmax(adjusted)


def _weigh(weights: Tensor, spec: RoutingSpec, is_weightless: Tensor | None) -> Tensor:
    """Turn the scores of the chosen experts into their weights, [T, K]."""
    ranked_by_logit = spec.softmax_order is SoftmaxOrder.AFTER_TOPK
    if is_weightless is not None:
        weights = weights.masked_fill(is_weightless, -math.inf if ranked_by_logit else 0.0)
    if ranked_by_logit:
        weights = _softmax(weights)
    if spec.renormalize:
        weights = _renormalize(weights, spec)
    return weights * spec.routed_scaling_factor


def _adjust_logits(logits: Tensor, spec: RoutingSpec, bias: Tensor | None) -> Tensor:
    """Cast logits to sum_dtype(), apply softcap and inner bias, and turn NaN into -inf."""
    dtype, is_nan = sum_dtype(logits.dtype), torch.isnan(logits)
    # NaN passes the softcap as 0, so that its gradient is 0 and not NaN.
    logits = logits.to(dtype).masked_fill(is_nan, 0.0)
    if spec.softcap is not None:
        # torch divides by a Python number like this on GPUs; all devices then give the same bits.
        logits = spec.softcap * torch.tanh(logits * (1.0 / spec.softcap))
    if spec.correction_bias is CorrectionBias.SCORE and bias is not None:
        logits = logits + bias.to(dtype)
    # inf - inf would make a whole softmax row NaN.
    logits = logits.clamp(max=torch.finfo(dtype).max)
    return logits.masked_fill(is_nan, -math.inf)


def _softmax(logits: Tensor) -> Tensor:
    """Apply softmax over the last dimension; a row of -inf gives zeros."""
    is_empty = (logits == -math.inf).all(dim=-1, keepdim=True)
    return torch.softmax(logits.masked_fill(is_empty, 0.0), dim=-1).masked_fill(is_empty, 0.0)


def _sigmoid(logits: Tensor) -> Tensor:
    # On a CPU torch.sigmoid and softplus round differently in the tail of a vectorised loop, so
    # equal logits would not tie. Each row of a softmax over (x, 0) takes the same path.
    return torch.softmax(torch.stack((logits, torch.zeros_like(logits)), dim=-1), dim=-1)[..., 0]


def _sqrt_softplus(logits: Tensor) -> Tensor:
    # Beyond 20 log1p(exp(x)) is x, and below -20 it is exp(x), to float32 precision; for float64
    # precision the bound is 40. Below it sqrt(softplus(x)) would have the gradient 0 * inf, and
    # exp(x / 2) has the same value and a finite gradient.
    end = 40.0 if logits.dtype is torch.float64 else 20.0
    is_tail, is_head = logits < -end, logits > end
    # The gradient of clamp() at its bounds is 1 up to torch 2.13 and 0 in torch 2.15.
    tail = torch.exp(logits.masked_fill(~is_tail, -end) / 2)
    body = torch.log1p(torch.exp(logits.masked_fill(is_tail | is_head, 0.0))).sqrt()
    head = logits.masked_fill(~is_head, end).sqrt()
    return torch.where(is_tail, tail, torch.where(is_head, head, body))


@torch.no_grad()
def _select(
    scores: Tensor, spec: RoutingSpec, bias: Tensor | None, is_nan: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the chosen ids [T, K], best first, and the mask of dropped experts [T, E] or None."""
    if spec.correction_bias is CorrectionBias.SELECTION and bias is not None:
        scores = scores + bias.to(scores.dtype)
    scores = scores.masked_fill(is_nan, -math.inf)
    is_dropped = None
    if spec.drops_groups:
        is_dropped = _find_dropped(scores, spec)
        scores = scores.masked_fill(is_dropped, _FILL[spec.dropped_groups])
    return _rank(scores, is_last=is_nan)[:, : spec.top_k].contiguous(), is_dropped


def _find_dropped(scores: Tensor, spec: RoutingSpec) -> Tensor:
    """Return which experts are outside the best groups, [T, E], bool."""
    num_tokens, num_experts = scores.shape
    group_size = num_experts // spec.num_groups
    grouped = scores.view(num_tokens, spec.num_groups, group_size)
    best = grouped.topk(spec.group_score_top_n, dim=-1).values
    # Scores are added from the largest one on every device; another order would break ties between
    # groups.
    group_scores = reduce(torch.add, best.unbind(-1))
    kept = _rank(group_scores)[:, : spec.topk_groups]
    is_dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, kept, False)
    return is_dropped.repeat_interleave(group_size, dim=1)


def _rank(scores: Tensor, *, is_last: Tensor | None = None) -> Tensor:
    """Return indices by falling score, ties by rising index, with `is_last` entries at the end."""
    # torch.topk leaves ties open; a stable sort that rises over negated scores does not.
    keys = -scores
    if is_last is not None:
        # A positive NaN sorts after +inf everywhere; a negated NaN does not in a radix sort.
        keys = keys.masked_fill(is_last, math.nan)
    return torch.argsort(keys, dim=-1, stable=True)


def _renormalize(weights: Tensor, spec: RoutingSpec) -> Tensor:
    total = weights.sum(dim=-1, keepdim=True)
    if spec.epsilon_mode is EpsilonMode.ADDED:
        total = total + spec.epsilon
    elif spec.epsilon_mode is EpsilonMode.CLAMP:
        total = total.clamp(min=spec.epsilon)
    # Scores are never negative: a zero sum means zero weights, and 0 / 1 keeps them.
    return weights / total.masked_fill(total == 0, 1.0)


def check_arguments(logits: Tensor, spec: RoutingSpec, bias: Tensor | None) -> None:
    """Check the arguments of route(), and raise its errors. Local; no host sync."""
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ShapeError(
            f"route: logits is {list(logits.shape)} {logits.dtype}, expected [T, E], floating "
            "point; flatten batch and sequence"
        )
    num_experts = logits.shape[1]
    spec.check_num_experts(num_experts)
    if spec.custom_function is None:
        _check_bias(spec, bias)
    if bias is not None and bias.shape != (num_experts,):
        raise ShapeError(
            f"route: correction_bias is {list(bias.shape)}, expected [{num_experts}], one value an "
            "expert; remove the other dimensions"
        )


def _check_bias(spec: RoutingSpec, bias: Tensor | None) -> None:
    wanted = spec.correction_bias is not CorrectionBias.NONE
    if wanted and bias is None:
        raise ConfigError(
            "route: correction_bias is None, expected [E] because spec.correction_bias is "
            f"{spec.correction_bias.value!r}; pass the bias of the model"
        )
    if not wanted and bias is not None:
        raise ConfigError(
            "route: correction_bias is given, expected None because spec.correction_bias is "
            "'none'; set 'selection' or 'score' so that it is not lost"
        )


def _check_custom_output(topk: object, shape: tuple[int, int]) -> None:
    if not isinstance(topk, TopKOutput):
        raise ShapeError(
            f"route: custom_function returned {type(topk).__name__}, expected a TopKOutput; return "
            "TopKOutput(topk_ids=..., topk_weights=...)"
        )
    for name, tensor, dtypes in (
        ("topk_ids", topk.topk_ids, (torch.int64,)),
        ("topk_weights", topk.topk_weights, (torch.float32, torch.float64)),
    ):
        if tensor.shape != shape or tensor.dtype not in dtypes:
            raise ShapeError(
                f"route: custom_function returned {name} {list(tensor.shape)} {tensor.dtype}, "
                f"expected {list(shape)} {dtypes[0]}; fix the function"
            )
