"""Compiled for sm_90 without a GPU: 16-byte loads and stores, exact division, no fused rounding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kernels.compiling import compiled_by

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

VARIANTS = [
    "fp8 bf16",
    "fp8 fp16",
    "fp8 fp32",
    "fp8 bf16 powers of two",
    "fp8 bf16 without hardware",
    "int8 bf16 rint127",
    "int8 fp32 div",
    "int8 bf16 divtrunc16",
    "int8 bf16 triton",
]


@pytest.fixture(scope="module")
def ptx_by_variant(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    program = Path(__file__).with_name("ptx_of.py")
    return compiled_by(program, tmp_path_factory.mktemp("triton"))


def test_all_variants_are_looked_at(ptx_by_variant: Mapping[str, str]) -> None:
    assert sorted(ptx_by_variant) == sorted(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_move_16_bytes_at_a_time(variant: str, ptx_by_variant: Mapping[str, str]) -> None:
    ptx = ptx_by_variant[variant]
    loads = re.findall(r"\bld\.global\S*", ptx)
    stores = re.findall(r"\bst\.global\S*", ptx)
    # 32 elements a thread: each is read once.
    bytes_per_thread = 32 * (4 if "fp32" in variant else 2)
    assert loads == ["ld.global.v4.b32"] * (bytes_per_thread // 16)
    # Codes in two stores, and the scale in one.
    scale_store = "st.global.b8" if "powers of two" in variant else "st.global.b32"
    assert sorted(stores) == sorted(["st.global.v4.b32"] * 2 + [scale_store])


@pytest.mark.parametrize("variant", VARIANTS)
def test_arithmetic_is_exact(variant: str, ptx_by_variant: Mapping[str, str]) -> None:
    ptx = ptx_by_variant[variant]
    divisions = set(re.findall(r"\b(?:div|rcp)\.\S*", ptx))
    assert divisions <= {"div.rn.f32"}
    # Products and sums are rounded one by one, but for the two that correct each of the 32
    # quotients of a thread.
    has_quotients = variant.endswith((" div", "divtrunc16", "triton"))
    fused = re.findall(r"\bfma\.\S*", ptx)
    assert fused == ["fma.rn.f32"] * (2 * 32 if has_quotients else 0)
    # Small numbers are kept: only floor(), of what is no subnormal number, may flush them.
    assert set(re.findall(r"\S*\.ftz\S*", ptx)) <= {"cvt.rmi.ftz.f32.f32"}


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("fp8")])
def test_hardware_converts_two_elements_at_a_time(
    variant: str, ptx_by_variant: Mapping[str, str]
) -> None:
    count = ptx_by_variant[variant].count("cvt.rn.satfinite.e4m3x2.f32")
    assert count == (0 if "without hardware" in variant else 16)
