"""Rows that cover the edge cases of both formats, and comparison of tensors as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm import WireTensor

NAN, INF = float("nan"), float("inf")
# Index of the row of varied_rows() that is subnormal in bfloat16 too.
SUBNORMAL_ROW = 6


def varied_rows(hidden_size: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """Make rows [12, H]: ordinary, tiny, huge, zero, subnormal and non-finite ones, and ties."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(12, hidden_size, generator=generator)
    sizes = torch.tensor([1.0, 1e-6, 1e4, 1e-3, 100.0, 0.0, 1e-39, 7e-45, 1.0, 1.0, 1.0, 1.0])
    rows *= sizes.unsqueeze(1)
    # Halves of every size: ties of each rounding.
    rows[8] = torch.randint(-254, 255, (hidden_size,), generator=generator) / 2
    rows[9, hidden_size // 2] = NAN
    rows[10, -1] = -INF
    rows[11, 0] = INF
    return rows.to(dtype)


def all_bfloat16(*, is_shuffled: bool) -> Tensor:
    """Make rows [256, 256] of all bfloat16 values: by their bits, or in any order."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    if is_shuffled:
        values = values[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    return values.view(256, 256)


def half_neighbours() -> Tensor:
    """Make a row [1, N]: 127 for a scale of 1, then halves of both signs and the next numbers."""
    halves = torch.arange(0.5, 127, 1.0)
    below = torch.nextafter(halves, torch.zeros(()))
    above = torch.nextafter(halves, torch.full((), INF))
    positive = torch.stack([below, halves, above], dim=1).flatten()
    return torch.cat([torch.tensor([127.0]), positive, -positive]).unsqueeze(0)


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, in which -0 differs from 0 and one NaN from another."""
    return tensor.contiguous().view(torch.uint8)


def assert_same_bits(came: WireTensor, expected: WireTensor) -> None:
    """Compare codes and scales, byte by byte."""
    assert came.format == expected.format
    assert came.scales is not None
    assert expected.scales is not None
    assert came.data.dtype == expected.data.dtype
    assert came.scales.dtype == expected.scales.dtype
    assert torch.equal(as_bytes(came.data).cpu(), as_bytes(expected.data).cpu())
    assert torch.equal(as_bytes(came.scales).cpu(), as_bytes(expected.scales).cpu())
