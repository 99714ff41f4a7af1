"""The kernels of normal mode compiled for sm_90: fences, wide accesses, registers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from epcomm.kernels.cuda_jit import compile_to_cubin, nvrtc_is_installed  # noqa: E402
from epcomm.kernels.nvlink.normal import collect, combine, dispatch, program  # noqa: E402
from epcomm.kernels.nvlink.normal.program import Program  # noqa: E402
from epcomm.quantization import FP8_FLOAT32_SCALES as FP8  # noqa: E402
from tests.kernels.compile_kernels import normal_layout  # noqa: E402

CUOBJDUMP = Path(triton.__file__).with_name("backends") / "nvidia" / "bin" / "cuobjdump"
BF16_ROWS = dispatch.RowForm(
    row_bytes=14336, scale_bytes=0, scale_unit=16, alignment=1, is_planned=True
)
# The most that limits_of() accepts.
MOST = {"world_size": 32, "num_local_experts": 32, "top_k": 32}
DISPATCHES: Mapping[str, Program] = {
    "bf16": dispatch.program_of(normal_layout(), BF16_ROWS),
    "fp8": dispatch.program_of(
        normal_layout(world=2), BF16_ROWS._replace(row_bytes=7168, scale_bytes=224)
    ),
    # Three ranks, rows of 16 bytes more than a power of two, slots in tiles.
    "odd": dispatch.program_of(
        normal_layout(world=3),
        BF16_ROWS._replace(row_bytes=4112, scale_bytes=12, scale_unit=4, alignment=8),
    ),
    "cached": dispatch.program_of(normal_layout(), BF16_ROWS._replace(is_planned=False)),
    "gradients": dispatch.program_of(
        normal_layout(FP8), dispatch.RowForm(row_bytes=7168, scale_bytes=224)
    ),
    "most": dispatch.program_of(replace(normal_layout(), **MOST), BF16_ROWS),
}
PLANNED = [name for name, each in DISPATCHES.items() if each.constants["IS_PLANNED"]]
COMBINES: Mapping[str, Program] = {
    **{
        str(dtype): combine.program_of(normal_layout(), combine.SumForm(dtype, 7168))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    },
    **{
        f"{groups} groups of {dtype}": combine.program_of(
            replace(normal_layout(), groups=groups), combine.SumForm(dtype, 7168)
        )
        for dtype, groups in ((torch.bfloat16, 2), (torch.float32, 4))
    },
    **{
        f"{sums} of {dtype}": combine.program_of(
            normal_layout(), combine.SumForm(dtype, 7168, sums)
        )
        for dtype in (torch.bfloat16, torch.float32)
        for sums in combine.SUM_FORMATS
    },
    # Rows whose last vectors do not occupy all lanes.
    "odd sums": combine.program_of(
        normal_layout(hidden=2056, world=3), combine.SumForm(torch.bfloat16, 2056)
    ),
}
COLLECT = collect.program_of(normal_layout(), collect.CopyForm(14336, 224))
PROGRAMS = {**DISPATCHES, **COMBINES, "collect": COLLECT}
Code = Mapping[str, Mapping[str, str]]


def shown(option: str, cubin: Path) -> str:
    done = subprocess.run(
        [str(CUOBJDUMP), option, str(cubin)], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Code:
    assert nvrtc_is_installed(), "the dev extra brings it"
    found = {}
    for name, each in PROGRAMS.items():
        path = tmp_path_factory.mktemp("cubin") / f"{each.entry}.cubin"
        path.write_bytes(compile_to_cubin(each.source(), arch="sm_90", name=each.files[-1]))
        found[name] = {"sass": shown("-sass", path), "usage": shown("-res-usage", path)}
    return found


def operations(code: Code, name: str) -> list[str]:
    return re.findall(
        r"\b((?:ST|STG|LDG|LDGSTS|LDS|REDG|RED|ATOMG|ATOMS|MEMBAR|CCTL|BAR|FENCE|UBLKCP)\.[A-Z0-9_.]+)",
        code[name]["sass"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_registers_and_shared_memory_suffice(name: str, compiled: Code) -> None:
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", compiled[name]["usage"])
    assert usage
    assert int(usage[1]) * PROGRAMS[name].threads <= 65536
    assert int(usage[3]) + PROGRAMS[name].shared_bytes <= program.MAX_SHARED_BYTES
    # The others spill a few words once for a row or a sum, outside the loops over pieces.
    if name not in ("odd sums", "2 groups of torch.bfloat16"):
        assert int(usage[2]) == 0, "nothing is spilled"


@pytest.mark.slow
@pytest.mark.parametrize("name", DISPATCHES)
def test_rows_move_by_the_copy_engine_both_ways(name: str, compiled: Code) -> None:
    assert {"UBLKCP.S.G", "UBLKCP.G.S"} <= set(operations(compiled, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINES)
def test_sums_move_by_vectors_and_the_engine_reads_what_was_acquired(
    name: str, compiled: Code
) -> None:
    found = set(operations(compiled, name))
    # Lanes of quantised sums copy themselves.
    is_quantized = PROGRAMS[name].constants["IS_QUANTIZED"]
    copies = {"LDGSTS.E.BYPASS.128"} if is_quantized else {"UBLKCP.S.G", "FENCE.VIEW.ASYNC.G"}
    assert {"LDS.128", "STG.E.128", *copies} <= found
    # A lane stores codes of 16 columns at once, half as many bytes of 4 bits.
    assert "ST.E.64" not in found or "bfloat16" not in name or "nvfp4" in name


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DISPATCHES, *COMBINES])
def test_signals_to_ranks_follow_a_fence_of_the_system(name: str, compiled: Code) -> None:
    found = operations(compiled, name)
    signals = {"REDG.E.ADD.STRONG.SYS"}
    assert signals <= set(found)
    if name in COMBINES:
        # The stores are signals of items. In dispatch such stores are volatile ones to the host.
        signals.add("STG.E.STRONG.SYS")
    for place, each in enumerate(found):
        if each in signals:
            assert "MEMBAR.ALL.SYS" in found[max(0, place - 3) : place]
    # Loads after an acquire do not read old data from the L1 cache.
    assert "CCTL.IVALL" in found


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
def test_signals_among_blocks_follow_a_fence_of_the_gpu(name: str, compiled: Code) -> None:
    found = operations(compiled, name)
    # A block releases its counts to later blocks; the last block to arrive, after metadata and at
    # the end, acquires the work of all blocks.
    for each in ("STG.E.STRONG.GPU", "ATOMG.E.ADD.S32.STRONG.GPU"):
        places = [place for place, other in enumerate(found) if other == each]
        assert places
        for place in places:
            assert "MEMBAR.ALL.GPU" in found[max(0, place - 3) : place]
            assert each.startswith("STG") or "CCTL.IVALL" in found[place : place + 2]


@pytest.mark.slow
def test_scales_and_copies_move_in_the_widest_unit(compiled: Code) -> None:
    assert "ST.E.128" in operations(compiled, "fp8")
    assert "ST.E.128" not in operations(compiled, "odd")
    assert {"LDG.E.128", "STG.E.128"} <= set(operations(compiled, "collect"))


@pytest.mark.parametrize("row_bytes", [16, 2048, 7168, 8192, 8208, 14336, 65536])
def test_rings_fit_into_a_block_and_stay_two_stages_deep(row_bytes: int) -> None:
    pieces = -(-row_bytes // dispatch.MAX_PIECE)
    piece = 16 * -(-row_bytes // 16 // pieces)
    stages = dispatch.num_stages(row_bytes)
    assert stages >= 2
    assert dispatch.COPIERS * stages * (piece + 8) <= dispatch.RING_BYTES


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"top_k": 32}, ""),
        ({"top_k": 33}, "top_k is 33, expected at most 32"),
        ({"world_size": 64, "num_local_experts": 1}, "the number of ranks is 64"),
        ({"num_local_experts": 512}, ""),
        ({"num_local_experts": 513}, "num_experts is 1026, expected at most 1024"),
    ],
)
def test_layouts_that_do_not_fit_are_named(change: dict[str, int], reason: str) -> None:
    reasons = dispatch.limits_of(replace(normal_layout(world=2), **change))
    assert reason in "; ".join(reasons)
    assert bool(reasons) == bool(reason)


def test_rows_that_begin_anywhere_are_copied_first() -> None:
    rows = torch.arange(40, dtype=torch.int32)
    aligned = rows[:32].view(4, 8)
    assert program.in_vectors(aligned) is aligned
    for odd in (rows[1:33].view(4, 8), rows[:36].view(4, 9)[:, :8]):
        copy = program.in_vectors(odd)
        assert torch.equal(copy, odd)
        assert copy.data_ptr() % 16 == 0
        assert copy.stride() == (8, 1)
