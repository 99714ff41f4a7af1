"""BufferSpec: what ranks compare tells any two specifications apart."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from epcomm import WireDtype, WireFormat
from epcomm.spec import BufferSpec

FP8 = WireFormat(dtype=WireDtype.FP8_E4M3, scale_block=128, scale_dtype=torch.float32)
SPEC = BufferSpec(
    hidden_size=64,
    top_k=2,
    num_local_experts=4,
    dispatch_format=FP8,
    hidden_format=WireFormat.of(torch.bfloat16),
)
FORMAT_CHANGES = {
    "dtype": WireFormat.of(torch.float16),
    "scale block": replace(FP8, scale_block=64),
    "scale dtype": replace(FP8, scale_dtype=torch.uint8),
}


@pytest.mark.parametrize("change", FORMAT_CHANGES)
@pytest.mark.parametrize("name", [f.name for f in fields(BufferSpec) if f.name.endswith("_format")])
def test_record_shows_a_changed_format(name: str, change: str) -> None:
    whole = replace(SPEC, dispatch_format=FP8, hidden_format=FP8)
    other = replace(whole, **{name: FORMAT_CHANGES[change]})
    assert other.as_record() != whole.as_record()


@pytest.mark.parametrize(
    "name", [f.name for f in fields(BufferSpec) if not f.name.endswith("_format")]
)
def test_record_shows_a_changed_size(name: str) -> None:
    assert replace(SPEC, **{name: 97}).as_record() != SPEC.as_record()
