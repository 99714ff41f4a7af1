"""Scales in int64 keep every bit of float32; the device reads the upper 19."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epcomm import ShapeError
from epcomm.fuseep.scale_bits import bits_of_scales
from tests.cases.fuseep_checkpoint import GOLDEN

quick = settings(max_examples=50, deadline=None, derandomize=True)
words = st.integers(-(2**31), 2**31 - 1)
SPECIAL = [0, -(2**31), 1, -(2**31) + 1, 0x7FFFFF, 0x800000, 0x7F800000, 0x7FC00001, -1]


@pytest.mark.parametrize("case", GOLDEN["int64_scale"], ids=lambda case: case["float32_bits"])
def test_bits_are_the_golden_ones(case: dict[str, Any]) -> None:
    scale = struct.unpack(">f", bytes.fromhex(case["float32_bits"]))[0]
    bits = bits_of_scales(torch.tensor([scale]))
    assert bits.dtype == torch.int64
    assert bits.tolist() == [case["int64"]]
    # The bits that the device reads.
    upper = (bits & 0xFFFFE000).to(torch.int32).view(torch.float32)
    assert struct.pack(">f", upper.item()).hex() == case["top_19_bits"]
    assert upper.item() == pytest.approx(case["top_19_bits_value"], rel=1e-8, abs=0)


@quick
@given(st.lists(words, max_size=6).map(lambda drawn: SPECIAL + drawn))
def test_every_bit_of_float32_is_kept(drawn: list[int]) -> None:
    scales = torch.tensor(drawn, dtype=torch.int32).view(torch.float32).view(-1, 1)
    assert bits_of_scales(scales).tolist() == drawn


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"scales are torch.bfloat16, expected torch.float32"):
        bits_of_scales(torch.ones(2, dtype=torch.bfloat16))
