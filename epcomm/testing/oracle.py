"""The oracle: a dense MoE layer over the tokens of all ranks, in float64 and plain torch.

It shares no code with the layers under test: every expert computes every token, and a table of
router weights [T, E] selects the results. Autograd computes the gradients of this formula.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.sharding.shards import is_expert_tensor
from epcomm.testing.data import RankBatch
from epcomm.weights.unquantized import ExpertWeights


@dataclass(frozen=True, kw_only=True, eq=False)
class OracleResult:
    """The results of all ranks, float64.

    y, dx, dw: one tensor for each rank, [T, H], [T, H], [T, K].
    weight_grads: gradients of all P experts by field of ExpertWeights, for fields that require
        grad.
    """

    y: list[Tensor]
    dx: list[Tensor]
    dw: list[Tensor]
    weight_grads: dict[str, Tensor]


def run_oracle(batches: Sequence[RankBatch], weights: ExpertWeights) -> OracleResult:
    """Compute y of all ranks, and all gradients of the sum over ranks of <y, dy>."""
    params = {
        name: tensor.detach().double().requires_grad_(tensor.requires_grad)
        for name, tensor in weights.tensors().items()
    }
    xs = [batch.x.detach().double().requires_grad_() for batch in batches]
    ws = [batch.topk_weights.detach().double().requires_grad_() for batch in batches]
    ys, loss = [], batches[0].x.new_zeros((), dtype=torch.float64)
    for batch, x, w in zip(batches, xs, ws, strict=True):
        y = _dense_layer(x, batch.topk_ids, w, params, weights)
        ys.append(y)
        loss = loss + (y * batch.dy.double()).sum()
    wanted = {name: param for name, param in params.items() if param.requires_grad}
    grads = torch.autograd.grad(loss, [*xs, *ws, *wanted.values()], materialize_grads=True)
    count = len(batches)
    return OracleResult(
        y=[y.detach() for y in ys],
        dx=list(grads[:count]),
        dw=list(grads[count : 2 * count]),
        weight_grads=dict(zip(wanted, grads[2 * count :], strict=True)),
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return max|a - b| / max|b| in float64; inf if a is not finite; the absolute error if b is 0.

    For an ExpertTensor, only the experts of this rank are compared.
    """
    actual, expected = (
        (t.to_local() if is_expert_tensor(t) else t).detach().double() for t in (actual, expected)
    )
    if actual.shape != expected.shape or not torch.isfinite(actual).all():
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
    return error / scale if scale > 0 else error


def _dense_layer(
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    params: dict[str, Tensor],
    weights: ExpertWeights,
) -> Tensor:
    num_experts = params["gate_up_proj"].shape[0]
    # An additional column, for entries of -1, is dropped.
    columns_TK = topk_ids_TK % (num_experts + 1)
    one_hot_TKE = torch.nn.functional.one_hot(columns_TK, num_experts + 1)[..., :num_experts]
    table_TE = (topk_weights_TK.unsqueeze(-1) * one_hot_TKE).sum(dim=1)
    first_eq, second_eq = "th,eih->eti", "eti,ehi->eth"
    if weights.format.is_transposed:
        first_eq, second_eq = "th,ehi->eti", "eti,eih->eth"
    hidden = torch.einsum(first_eq, x_TH, params["gate_up_proj"])
    if "gate_up_bias" in params:
        hidden = hidden + params["gate_up_bias"][:, None, :]
    results_ETH = torch.einsum(second_eq, _activated(hidden, weights), params["down_proj"])
    if "down_bias" in params:
        results_ETH = results_ETH + params["down_bias"][:, None, :]
    return torch.einsum("te,eth->th", table_TE, results_ETH)


def _activated(hidden: Tensor, weights: ExpertWeights) -> Tensor:
    stored = weights.format
    if stored.activation.value == "relu2":
        return torch.where(hidden > 0, hidden * hidden, torch.zeros_like(hidden))
    if stored.is_interleaved:
        gate, up = hidden[..., 0::2], hidden[..., 1::2]
    else:
        gate, up = hidden.chunk(2, dim=-1)
    if stored.activation.value != "swiglu":
        assert stored.limit is not None, "checked at creation"
        limit = hidden.new_tensor(stored.limit)
        gate = torch.minimum(gate, limit)
        up = torch.maximum(torch.minimum(up, limit), -limit)
    if stored.activation.value != "clamped_swiglu":
        return gate / (1 + torch.exp(-gate)) * up
    assert stored.alpha is not None, "checked at creation"
    return gate / (1 + torch.exp(-stored.alpha * gate)) * (1 + up)
