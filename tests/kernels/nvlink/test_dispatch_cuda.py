"""Dispatch of normal mode in CUDA C++: compiled everywhere; tests of ranks run it between GPUs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from epcomm.kernels.cuda_jit import compile_to_cubin, nvrtc_is_installed  # noqa: E402
from epcomm.kernels.nvlink.dispatch_cuda import launch  # noqa: E402
from epcomm.spec import BufferSpec  # noqa: E402
from tests.kernels.compile_kernels import PLAIN, normal_exchange  # noqa: E402

pytestmark = pytest.mark.slow

CUOBJDUMP = Path(triton.__file__).with_name("backends") / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A kernel by its rows and its ranks; experts and top_k: None: 256 experts and top-8."""

    rows: launch.RowForm
    world_size: int
    local_experts: int | None = None
    top_k: int = 8


SPEC = BufferSpec(
    hidden_size=64,
    top_k=8,
    num_local_experts=128,
    dispatch_format=PLAIN,
    hidden_format=PLAIN,
)
BF16_ROWS = launch.RowForm(
    row_bytes=14336, scale_bytes=0, scale_unit=16, alignment=1, is_planned=True
)
SHAPES = {
    "bf16": Shape(rows=BF16_ROWS, world_size=8),
    "fp8": Shape(rows=BF16_ROWS._replace(row_bytes=7168, scale_bytes=224), world_size=2),
    # Three ranks, rows of 16 bytes more than a power of two, slots in tiles.
    "odd": Shape(
        rows=BF16_ROWS._replace(row_bytes=4112, scale_bytes=12, scale_unit=4, alignment=8),
        world_size=3,
    ),
    "again": Shape(rows=BF16_ROWS._replace(is_planned=False), world_size=2),
    # The most that fits() accepts.
    "most": Shape(rows=BF16_ROWS, world_size=32, local_experts=32, top_k=32),
}
PLANNED = [name for name, shape in SHAPES.items() if shape.rows.is_planned]


def shown(option: str, cubin: Path) -> str:
    done = subprocess.run(
        [str(CUOBJDUMP), option, str(cubin)], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, str]]:
    assert nvrtc_is_installed(), "the dev extra brings it"
    found = {}
    for name, shape in SHAPES.items():
        layout = normal_exchange(PLAIN, 7168, shape.world_size).peers.layout
        layout = replace(
            layout,
            top_k=shape.top_k,
            num_local_experts=shape.local_experts or layout.num_local_experts,
        )
        assert launch.fits(layout)
        path = tmp_path_factory.mktemp("cubin") / f"{name}.cubin"
        source = launch.source_for(launch.definitions(layout, shape.rows))
        path.write_bytes(compile_to_cubin(source, arch="sm_90", name="dispatch.cu"))
        found[name] = {"sass": shown("-sass", path), "usage": shown("-res-usage", path)}
    return found


def operations(sass: str) -> list[str]:
    return re.findall(
        r"\b((?:ST|STG|LDG|REDG|RED|ATOMG|ATOMS|MEMBAR|CCTL|BAR|UBLKCP)\.[A-Z0-9_.]+)", sass
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_registers_and_shared_memory_suffice(
    shape: str, compiled: Mapping[str, Mapping[str, str]]
) -> None:
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", compiled[shape]["usage"])
    assert usage
    assert int(usage[1]) * 32 * (launch.COPIERS + launch.HELPERS) <= 65536
    # What a block of an H100 may have.
    assert int(usage[3]) + launch.RING_BYTES <= 227 * 1024
    assert int(usage[2]) == 0, "nothing is spilled"


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_move_by_the_copy_engine_both_ways(
    shape: str, compiled: Mapping[str, Mapping[str, str]]
) -> None:
    found = operations(compiled[shape]["sass"])
    assert {"UBLKCP.S.G", "UBLKCP.G.S"} <= set(found)


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_are_told_behind_a_fence_of_the_system(
    shape: str, compiled: Mapping[str, Mapping[str, str]]
) -> None:
    found = operations(compiled[shape]["sass"])
    # That this rank begins, that counts are ready, and that rows are.
    adds = [place for place, each in enumerate(found) if each == "REDG.E.ADD.STRONG.SYS"]
    assert adds
    for place in adds:
        assert "MEMBAR.ALL.SYS" in found[max(0, place - 3) : place]
    # Loads behind an acquire do not hit what the L1 cache held before.
    assert "CCTL.IVALL" in found


@pytest.mark.parametrize("shape", PLANNED)
def test_blocks_of_a_rank_hear_of_one_another(
    shape: str, compiled: Mapping[str, Mapping[str, str]]
) -> None:
    found = operations(compiled[shape]["sass"])
    # What a block has counted, for later blocks; and who comes last, with metadata and at the end,
    # has acquired what all did.
    for name in ("STG.E.STRONG.GPU", "ATOMG.E.ADD.S32.STRONG.GPU"):
        places = [place for place, each in enumerate(found) if each == name]
        assert places
        for place in places:
            assert "MEMBAR.ALL.GPU" in found[max(0, place - 3) : place]
            assert name.startswith("STG") or "CCTL.IVALL" in found[place : place + 2]


def test_scales_move_in_the_widest_unit(compiled: Mapping[str, Mapping[str, str]]) -> None:
    assert "ST.E.128" in operations(compiled["fp8"]["sass"])
    assert "ST.E.128" not in operations(compiled["odd"]["sass"])


@pytest.mark.parametrize("row_bytes", [16, 2048, 7168, 8192, 8208, 14336, 65536])
def test_rings_fit_into_a_block_and_stay_two_stages_deep(row_bytes: int) -> None:
    pieces = -(-row_bytes // launch.MAX_PIECE)
    piece = 16 * -(-row_bytes // 16 // pieces)
    stages = launch.num_stages(row_bytes)
    assert stages >= 2
    assert launch.COPIERS * stages * (piece + 8) <= launch.RING_BYTES


def test_cpu_ranks_are_left_to_triton() -> None:
    layout = normal_exchange(PLAIN, 64, 2).peers.layout
    assert not launch.can_serve(layout, SPEC, torch.device("cpu"))


def test_more_ranks_entries_or_experts_than_fit_are_left_to_triton() -> None:
    layout = normal_exchange(PLAIN, 64, 2).peers.layout
    for change, expected in (
        ({"top_k": 32}, True),
        ({"top_k": 33}, False),
        ({"world_size": 64}, False),
        ({"num_local_experts": 512}, True),
        ({"num_local_experts": 513}, False),
    ):
        assert launch.fits(replace(layout, **change)) == expected


def test_rows_that_begin_anywhere_are_copied_first() -> None:
    rows = torch.arange(40, dtype=torch.int32)
    aligned = rows[:32].view(4, 8)
    assert launch.in_vectors(aligned) is aligned
    for odd in (rows[1:33].view(4, 8), rows[:36].view(4, 9)[:, :8]):
        copy = launch.in_vectors(odd)
        assert torch.equal(copy, odd)
        assert copy.data_ptr() % 16 == 0
        assert copy.stride() == (8, 1)


def test_blocks_are_all_there_at_once() -> None:
    assert launch.num_blocks(32, 132) == 32
    assert launch.num_blocks(200, 132) == 132
