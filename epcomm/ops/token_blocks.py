"""Compute tokens in blocks of one size, so that their bits are those of any number of tokens."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def in_blocks(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    block_tokens: int | None,
) -> Tensor | tuple[Tensor, ...]:
    """Call a function on blocks of tokens, and join the results.

    Matrix products choose their kernels by the number of rows, so a row of a product has other bits
    beside other numbers of rows. Blocks have one size: the last is padded with zeros, and without
    tokens one block of padding determines the shape of the result.

    Args:
        function: takes a block of each tensor, [block_tokens, ...], and returns tensors whose first
            dimension has the tokens.
        tensors: [T, ...] each.
        block_tokens: tokens of a block; None: one call with all tokens.

    Returns: as the function, with the results of the T tokens.

    Differentiable.   Host sync: none.
    """
    if block_tokens is None:
        return function(*tensors)
    num_tokens = tensors[0].shape[0]
    padding = max(-(-num_tokens // block_tokens), 1) * block_tokens - num_tokens
    padded = [F.pad(each, (0, 0) * (each.dim() - 1) + (0, padding)) for each in tensors]
    blocks = zip(*(each.split(block_tokens) for each in padded), strict=True)
    results = [function(*block) for block in blocks]
    tuples = [(each,) if isinstance(each, Tensor) else each for each in results]
    joined = tuple(torch.cat(each)[:num_tokens] for each in zip(*tuples, strict=True))
    return joined[0] if isinstance(results[0], Tensor) else joined
