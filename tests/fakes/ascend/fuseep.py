"""Inputs of the recording of whole W8A8 expert layers: two ranks, weights by formula."""

import torch
from torch import Tensor

from tests.fakes.ascend.recorded import golden

RECORDED = golden("ascend_fuseep_end_to_end")
W, E, H, I, K = 2, 4, 128, 192, 2  # noqa: E741 (the letter of the intermediate size)
# Most tokens of a rank are M.
L, M = E // W, 5
NUM_TOKENS = (5, 3)


def grid(*sizes: int) -> tuple[Tensor, ...]:
    """Return the index of each dimension, int64."""
    return torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")


def hidden_states(rank: int) -> Tensor:
    """Make the hidden states of a rank, bfloat16 [T, H]."""
    t, h = grid(NUM_TOKENS[rank], H)
    m = 40 + 4 * ((2 * t + 3 * rank) % 8)
    numerator = 2 * ((53 * t + 7 * h * h + 14 * h + 101 * rank + 3 * t * h) % m) - (m - 1)
    return (numerator.double() / 16).bfloat16()


def topk(rank: int) -> tuple[Tensor, Tensor]:
    """Make ids int64 [T, K], weights float32 [T, K]."""
    inputs = RECORDED["inputs"]
    return torch.tensor(inputs["topk_idx"][rank]), torch.tensor(inputs["topk_weights"][rank])


def weights() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make w13 int8 [E, 2I, H], w2 int8 [E, H, I], s13 [E, 2I], s2 [E, H], as in a checkpoint."""
    e, i, h = grid(E, 2 * I, H)
    w13 = ((7 * i + 14 * h + 29 * e + (i * h) % 23) % 31) - 15
    e, h, i = grid(E, H, I)
    w2 = ((11 * h + 24 * i + 17 * e + (i * h) % 19) % 31) - 15
    e, i = grid(E, 2 * I)
    s13 = (1000003 + 7919 * ((5 * i + 11 * e) % 97)).double() * 2**-27
    e, h = grid(E, H)
    s2 = (900007 + 6007 * ((3 * h + 17 * e) % 89)).double() * 2**-27
    return w13.to(torch.int8), w2.to(torch.int8), s13.float(), s2.float()
