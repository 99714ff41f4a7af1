"""Compiled for sm_90 without a GPU: 16-byte accesses, nothing spilled, no fused rounding."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kernels.compiling import compiled_by

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

WIDE_LOAD, WIDE_STORE = "ld.global.v4.b32", "st.global.v4.b32"
# Wide loads and stores of a thread. A tile of 8 KiB is four of 16 bytes for each of 128 threads; a
# sum reads half as much of each of eight rows.
WIDE = {
    "gather bf16": (4, 4),
    "gather bf16 from messages": (4, 4),
    "gather fp8": (4, 4),
    "sums bf16": (16, 2),
    "sums bf16 weighted": (16, 2),
    "sums fp32 weighted": (16, 2),
    "sums bf16 of parts": (16, 2),
}
# Each token is read once and written to two ranks, in a loop or not.
SCATTERS = ("scatter bf16", "scatter fp8")


@pytest.fixture(scope="module")
def ptx_by_variant(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    program = Path(__file__).with_name("rows_ptx_of.py")
    return compiled_by(program, tmp_path_factory.mktemp("triton"))


def accesses(ptx: str) -> Counter[str]:
    return Counter(re.findall(r"\b(?:ld|st)\.global\S*", ptx))


@pytest.mark.parametrize("variant", WIDE)
def test_rows_move_16_bytes_at_a_time(variant: str, ptx_by_variant: Mapping[str, str]) -> None:
    found = accesses(ptx_by_variant[variant])
    assert (found[WIDE_LOAD], found[WIDE_STORE]) == WIDE[variant]
    # What else is loaded are indices and weights; nothing else is stored.
    assert set(found) <= {WIDE_LOAD, WIDE_STORE, "ld.global.b32"}


@pytest.mark.parametrize("variant", SCATTERS)
def test_tokens_are_read_once(variant: str, ptx_by_variant: Mapping[str, str]) -> None:
    found = accesses(ptx_by_variant[variant])
    assert found[WIDE_LOAD] == 4
    assert found[WIDE_STORE] in (4, 8)


def test_nothing_is_spilled_and_no_rounding_is_fused(ptx_by_variant: Mapping[str, str]) -> None:
    for ptx in ptx_by_variant.values():
        assert not re.search(r"\b(?:ld|st)\.local|\bfma\.rn\.f(?:32|64)", ptx)


def test_only_counts_are_atomic(ptx_by_variant: Mapping[str, str]) -> None:
    atomic = {name for name, ptx in ptx_by_variant.items() if re.search(r"\b(?:atom|red)\.", ptx)}
    assert atomic == {"counts"}
    # No other GPU is meant by anything here.
    assert not any(".sys" in ptx for ptx in ptx_by_variant.values())
