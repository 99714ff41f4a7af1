"""LogFMT, in which the real combine may send rows: 10 bits an element, a sign and 511 magnitudes.

Of 128 elements with magnitudes from a to A, code 0 is 0 and code n is a * (A / a)**((n - 1) / 510),
where a is at least A / 2**32. An element becomes the nearer of two such numbers. If in a part of a
row not every A is below 1, or some A equals its a, the part is sent in bfloat16. Here the numbers
are rounded to bfloat16, which the real kernel adds up in float32.

Source: deep_ep, csrc/kernels/internode_ll.cu, logfmt_encode and decode_and_accumulate, read and not
run; it takes logarithms and powers approximately.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 128
# The elements of a row that a warp sends, which all have one form.
_PART, _SMALL_PART = 1024, 512
_NUM_STEPS = 510
_MOST_BINADES = 32.0


def rounded(rows: Tensor) -> Tensor:
    """Return rows [..., H], bfloat16, as combine reads them after they were sent in LogFMT."""
    hidden_size = rows.shape[-1]
    part = _PART if hidden_size % _PART == 0 else _SMALL_PART
    blocks = rows.float().unflatten(-1, (-1, part // _BLOCK, _BLOCK))
    logs = blocks.abs().log2()
    most = logs.amax(-1, keepdim=True)
    least = torch.maximum(logs.amin(-1, keepdim=True), most - _MOST_BINADES)
    is_cast = ((most < 0) & (least < most)).all(-2, keepdim=True)
    step = (most - least) / _NUM_STEPS
    # The middle of two neighbours is above the middle of their logarithms.
    middle = ((1 + step.exp2()) / 2).log2()
    codes = ((logs - least - middle) / step + 2).floor().clamp(min=0)
    numbers = torch.where(codes > 0, ((codes - 1) * step + least).exp2(), 0.0)
    sent = torch.where(is_cast, numbers.copysign(blocks), blocks)
    return sent.flatten(-3).to(rows.dtype)
