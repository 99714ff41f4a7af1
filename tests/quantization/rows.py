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


def all_values(dtype: torch.dtype) -> Tensor:
    """Make rows [256, 256] of every pattern of 16 bits, ascending; float32 ends in random bits."""
    return _of_bits(torch.arange(2**16), dtype).view(256, 256)


def largest_of_blocks(dtype: torch.dtype, block: int) -> Tensor:
    """Make rows [256, 128 * block] in which every pattern is the largest magnitude of one block.

    It has any sign and any position in its block. Other elements are up to 20 binades smaller, and
    blocks of a row 16 binades, which E4M3 scales distinguish.
    """
    generator = torch.Generator().manual_seed(0)
    binade = 1024 if dtype is torch.float16 else 128

    def below(most: int, columns: int) -> Tensor:
        return torch.randint(0, most, (2**15, columns), generator=generator)

    largest = torch.arange(2**15).view(-1, 16 * binade)
    order = torch.randperm(16 * binade, generator=generator)
    largest = largest[:, order].view(-1, 1)
    bits = (largest - below(20 * binade, block)).clamp(min=0)
    bits.scatter_(1, below(block, 1), largest)
    return _of_bits(bits + 2**15 * below(2, block), dtype).view(256, -1)


def _of_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of patterns of 16 bits, to which float32 appends random bits."""
    if dtype is torch.float32:
        generator = torch.Generator().manual_seed(1)
        bits = (bits << 16) + torch.randint(0, 2**16, bits.shape, generator=generator)
        return bits.to(torch.int32).view(dtype)
    return bits.to(torch.int16).view(dtype)


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
    assert came.data.dtype == expected.data.dtype
    assert came.scales.dtype == expected.scales.dtype
    assert torch.equal(as_bytes(came.data).cpu(), as_bytes(expected.data).cpu())
    assert torch.equal(as_bytes(came.scales).cpu(), as_bytes(expected.scales).cpu())
