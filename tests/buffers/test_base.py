import inspect
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from epcomm import WireDtype, WireFormat
from epcomm.buffers.base import Backend, Buffer
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
    "scale dtype": replace(FP8, scale_dtype=torch.float8_e8m0fnu),
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


def test_the_page_for_authors_names_every_member_of_the_contract() -> None:
    page = (Path(__file__).parents[2] / "docs/backends/adding.md").read_text()
    named = set(re.findall(r"`(\w+)", page))
    own = {name for kind in (Backend, Buffer) for name in vars(kind)}
    annotated = {name for kind in (Backend, Buffer) for name in inspect.get_annotations(kind)}
    members = {name for name in own | annotated if not name.startswith("_")}
    assert members <= named, sorted(members - named)
    classes = {"AddsBias", "ExcludesRanks"}
    rows = re.findall(r"^\| ((?:`\w+[^|]*`,? ?)+) \|", page, re.MULTILINE)
    in_tables = set(re.findall(r"`(\w+)", " ".join(rows))) - classes
    assert in_tables <= members, sorted(in_tables - members)
