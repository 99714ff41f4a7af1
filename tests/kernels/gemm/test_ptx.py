"""Products of eight-bit experts, compiled for sm_90 without a GPU: tensor cores, TMA, no spills."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import pytest

from tests.kernels.compiling import compiled_by

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

# Stages of the loop of each product: so many are under way, and written once in its code.
STAGES = {
    "fp8 gate_up": 3,
    "fp8 down": 3,
    "int8 gate_up 32": 3,
    "int8 down 32": 3,
    "int8 gate_up 64": 3,
    "int8 down 64": 3,
    "int8 gate_up 128": 4,
    "int8 down 128": 4,
    "int8 gate_up odd": 4,
    "int8 down odd": 4,
}
# What a block of an SM of sm_90 may have.
MAX_SHARED_BYTES = 227 * 1024
VARIANTS = [*STAGES, "int8 hidden"]
# What a block may have of the 100 KB of an SM of sm_120, and the products there.
MAX_SHARED_BYTES_OF_SM_120 = 99 * 1024
ON_SM_120 = [f"sm_120 {name}" for name in STAGES if not name.endswith("odd")]


class Compiled(TypedDict):
    """One variant, as gemm_ptx_of.py prints it."""

    ptx: str
    ptxas: str
    shared_bytes: int


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Compiled]:
    """Compile each variant, and return the results."""
    program = Path(__file__).with_name("gemm_ptx_of.py")
    return compiled_by(program, tmp_path_factory.mktemp("triton"))


def test_all_variants_are_looked_at(compiled: Mapping[str, Compiled]) -> None:
    assert sorted(compiled) == sorted(VARIANTS + ON_SM_120)


@pytest.mark.parametrize("variant", STAGES)
def test_tensor_cores_multiply_eight_bit_operands(
    variant: str, compiled: Mapping[str, Compiled]
) -> None:
    kinds = set(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)\S*", compiled[variant]["ptx"]))
    assert len(kinds) == 1
    instruction = kinds.pop()
    if variant.startswith("fp8"):
        assert re.fullmatch(r"wgmma\.mma_async\..*k32\.f32\.e4m3\.e4m3", instruction)
    elif variant.endswith("32"):
        # 32 rows are too few for wgmma.
        assert re.fullmatch(r"mma\.sync\..*m16n8k32\..*\.s32\.s8\.s8\.s32", instruction)
    else:
        assert re.fullmatch(r"wgmma\.mma_async\..*m64n128k32\.s32\.s8\.s8", instruction)


@pytest.mark.parametrize("variant", STAGES)
def test_matrices_come_by_tma_and_rows_16_bytes_at_a_time(
    variant: str, compiled: Mapping[str, Compiled]
) -> None:
    ptx = compiled[variant]["ptx"]
    matrices = 2 if "gate_up" in variant else 1
    assert ptx.count("cp.async.bulk.tensor.2d.shared") == matrices * STAGES[variant]
    copies = re.findall(r"\bcp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", ptx)
    assert copies
    assert len(copies) % STAGES[variant] == 0
    assert set(copies) == {"0x10"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_are_written_16_bytes_at_a_time(
    variant: str, compiled: Mapping[str, Compiled]
) -> None:
    stores = re.findall(r"\bst\.global\S*", compiled[variant]["ptx"])
    # Beside codes, the scale of each row.
    narrow = ["st.global.b32"] if variant in ("fp8 gate_up", "int8 hidden") else []
    wide = [store for store in stores if store == "st.global.v4.b32"]
    assert wide
    assert sorted(stores) == sorted(wide + narrow)


@pytest.mark.parametrize("variant", VARIANTS)
def test_registers_and_shared_memory_suffice(
    variant: str, compiled: Mapping[str, Compiled]
) -> None:
    assert compiled[variant]["shared_bytes"] <= MAX_SHARED_BYTES
    assert ".local" not in compiled[variant]["ptx"]
    assert (
        "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
        in (compiled[variant]["ptxas"])
    )


@pytest.mark.parametrize("variant", ON_SM_120)
def test_tiles_fit_where_there_is_less_shared_memory(
    variant: str, compiled: Mapping[str, Compiled]
) -> None:
    # Operands of two stages at least: one would wait for each load.
    tile_rows = int(variant.rpartition(" ")[2]) if "int8" in variant else 64
    columns = 256 if "gate_up" in variant or tile_rows == 128 else 128
    stage_bytes = (tile_rows + columns) * 128
    assert 2 * stage_bytes <= compiled[variant]["shared_bytes"] <= MAX_SHARED_BYTES_OF_SM_120
    assert ".local" not in compiled[variant]["ptx"]


def test_hidden_rows_are_rounded_as_plain_torch_does(
    compiled: Mapping[str, Compiled],
) -> None:
    ptx = compiled["int8 hidden"]["ptx"]
    assert set(re.findall(r"\b(?:div|rcp)\.\S*", ptx)) == {"div.rn.f32"}
    assert not re.search(r"\bfma\.|\.ftz\b", ptx)


@pytest.mark.parametrize("variant", [name for name in STAGES if name.startswith("int8 down")])
def test_integer_sums_are_scaled_as_plain_torch_does(
    variant: str, compiled: Mapping[str, Compiled]
) -> None:
    ptx = compiled[variant]["ptx"]
    assert set(re.findall(r"\bcvt\.\S*\.f32\.s32", ptx)) == {"cvt.rn.f32.s32"}
    assert set(re.findall(r"\bmul\.\S*f32\S*", ptx)) == {"mul.f32"}
    assert not re.search(r"\bfma\.|\.ftz\b", ptx)
