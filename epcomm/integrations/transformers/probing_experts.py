"""Check on small matrices that experts compute what their names suggest; see probing.py."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor, nn

from epcomm.integrations.transformers.random_copy import configs_in, on_cpu, row_error
from epcomm.runners.reference import run_expert
from epcomm.weights.unquantized import ExpertWeights

# Number of tokens, H and I of the trial; all experts are tried, so the matrices are small.
_NUM_TOKENS, _HIDDEN, _INTERMEDIATE = 16, 8, 6
# The tolerance is 128 roundings of float32, each 2**-24 of a value, for two sums of products and an
# activation. A limit of 10 on the wrong side of silu is off by 4e-5.
_TOLERANCE = 128 * 2.0**-24


def experts_disagreement(experts: nn.Module, weights: ExpertWeights) -> str | None:
    """Return how the experts and `weights`, which were read from them, disagree, or None.

    The trial runs on small matrices with the experts' names, orientation and settings.
    """
    generator = torch.Generator().manual_seed(0)
    names = {id(tensor): field for field, tensor in weights.tensors().items()}
    limit = weights.format.limit or 1.0
    with on_cpu():
        small = _small_weights(weights, generator)
        memo: dict[int, object] = {id(config): config for config in configs_in(experts)}
        for tensor in experts.parameters():
            memo[id(tensor)] = nn.Parameter(small.tensors()[names[id(tensor)]])
        clone = copy.deepcopy(experts, memo)
        ids = torch.randperm(small.num_experts, generator=generator)[:2].repeat(_NUM_TOKENS, 1)
        ids[1::2] = ids[1::2].flip(1)
        factors = torch.rand(ids.shape, generator=generator, dtype=torch.float32)
        # Inputs this large put gates and ups on both sides of the limit.
        x = limit * torch.randn(_NUM_TOKENS, _HIDDEN, generator=generator, dtype=torch.float32)
        # The trial calls the plain function, whatever kernels the configuration asks for.
        forward = inspect.unwrap(type(clone).forward)
        with torch.no_grad():
            try:
                found = forward(clone, x, ids, factors)
            except Exception as error:  # noqa: BLE001  whatever it is, the block is refused
                return f"they cannot be run on a few tokens: {type(error).__name__}: {error}"
            error = row_error(_compute(small, x, ids, factors), found)
    return None if error <= _TOLERANCE else f"y differs by {error:.1g} of its largest value"


def _small_weights(weights: ExpertWeights, generator: torch.Generator) -> ExpertWeights:
    num_experts, is_transposed = weights.num_experts, weights.format.is_transposed
    first = _INTERMEDIATE * (2 if weights.format.activation.is_gated else 1)
    shapes = {
        "gate_up_proj": (_HIDDEN, first) if is_transposed else (first, _HIDDEN),
        "down_proj": (_INTERMEDIATE, _HIDDEN) if is_transposed else (_HIDDEN, _INTERMEDIATE),
        "gate_up_bias": (first,),
        "down_bias": (_HIDDEN,),
    }
    return weights.with_tensors(
        {
            field: torch.randn(
                num_experts, *shapes[field], generator=generator, dtype=torch.float32
            )
            for field in weights.tensors()
        }
    )


def _compute(weights: ExpertWeights, x: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
    """Compute the experts of each token one after the other, [T, H]."""
    y = torch.zeros_like(x)
    for token, place in torch.cartesian_prod(*(torch.arange(size) for size in ids.shape)).tolist():
        result = run_expert(x[token], None, weights, int(ids[token, place]))
        y[token] += factors[token, place] * result
    return y
