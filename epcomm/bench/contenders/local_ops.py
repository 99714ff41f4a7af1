"""Number rows and sum weighted rows in plain torch, for the alternatives.

They share no code with epcomm, and each is the fastest method found, because a slow baseline proves
nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# A float32 has 24 significant bits; three parts of 8 (bfloat16) or 11 (float16) hold them all.
NUM_PARTS = 3


def inverse_of(order: Tensor) -> Tensor:
    """Return the permutation that undoes `order` [N]: [2, 0, 1] gives [1, 2, 0]."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return inverse


def sum_weighted(rows: Tensor, row_of_term: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Sum weighted rows into targets, in float32, cast once to rows.dtype.

    Args:
        rows: [N, H].
        row_of_term: [S], the row of each term, terms of one target after one another.
        weights: [S], float32.
        offsets: [targets + 1]; target i owns terms offsets[i] up to offsets[i + 1].
    """
    if rows.shape[0] == 0:
        return rows.new_zeros(offsets.shape[0] - 1, rows.shape[1])
    dtype = rows.dtype
    if rows.device.type == "cpu" and dtype is not torch.float32:
        # embedding_bag reads 16-bit rows, adds in float32 and casts once, but needs its weights as
        # 16-bit numbers. Passed as the sum of three such numbers each loses nothing, and the rows
        # are in the cache the second and third time: 25 times as fast as rows.float() first.
        weights = _parts(weights, dtype).flatten()
        row_of_term = row_of_term.repeat_interleave(NUM_PARTS)
        offsets = offsets * NUM_PARTS
    else:
        rows = rows.float()
    return F.embedding_bag(
        row_of_term,
        rows,
        offsets,
        mode="sum",
        per_sample_weights=weights,
        include_last_offset=True,
    ).to(dtype)


def _parts(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Split `weights` [S], float32, into [S, NUM_PARTS] in `dtype`, whose rows sum to them."""
    parts, rest = [], weights
    for _ in range(NUM_PARTS):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return torch.stack(parts, dim=1)
