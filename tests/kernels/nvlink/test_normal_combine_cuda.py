"""Combine of normal mode in CUDA C++: compiled everywhere; tests of ranks run it between GPUs."""

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
from epcomm.kernels.nvlink import normal_combine_cuda  # noqa: E402
from tests.kernels.compile_kernels import PLAIN, normal_exchange  # noqa: E402

pytestmark = pytest.mark.slow

CUOBJDUMP = Path(triton.__file__).with_name("backends") / "nvidia" / "bin" / "cuobjdump"
# Hidden size and ranks: the usual ones, and rows whose last vectors are not those of all lanes.
SHAPES = {"usual": (7168, 8), "odd": (2056, 3)}


def shown(option: str, cubin: Path) -> str:
    done = subprocess.run(
        [str(CUOBJDUMP), option, str(cubin)], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, str]]:
    assert nvrtc_is_installed(), "the dev extra brings it"
    found = {}
    for name, (hidden_size, world_size) in SHAPES.items():
        layout = normal_exchange(PLAIN, hidden_size, world_size).peers.layout
        constants = normal_combine_cuda.definitions(layout, hidden_size)
        path = tmp_path_factory.mktemp("cubin") / f"{name}.cubin"
        source = normal_combine_cuda.source_for(constants)
        path.write_bytes(compile_to_cubin(source, arch="sm_90", name="normal_combine.cu"))
        found[name] = {"sass": shown("-sass", path), "usage": shown("-res-usage", path)}
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_registers_suffice_for_all_warps_of_a_block(
    shape: str, compiled: Mapping[str, Mapping[str, str]]
) -> None:
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", compiled[shape]["usage"])
    assert usage
    assert int(usage[1]) * 32 * normal_combine_cuda.NUM_WARPS <= 65536
    # What a block of an H100 may have.
    assert int(usage[3]) + normal_combine_cuda.SHARED_BYTES <= 227 * 1024
    if shape == "usual":
        assert int(usage[2]) == 0, "nothing is spilled"


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_move_by_vectors_and_words_are_released_and_acquired(
    shape: str, compiled: Mapping[str, Mapping[str, str]]
) -> None:
    found = re.findall(
        r"\b((?:STG|LDG|LDS|REDG|RED|MEMBAR|CCTL|BAR|FENCE|UBLKCP)\.[A-Z0-9_.]+)",
        compiled[shape]["sass"],
    )
    assert {"LDS.128", "STG.E.128", "UBLKCP.S.G"} <= set(found)
    # The engine reads what reducers have acquired.
    assert "FENCE.VIEW.ASYNC.G" in found
    # The word of an item, those of ranks that are ready, and those by which a rank gives up.
    assert "REDG.E.ADD.STRONG.SYS" in found
    for place, name in enumerate(found):
        if name in ("STG.E.STRONG.SYS", "REDG.E.ADD.STRONG.SYS"):
            assert "MEMBAR.ALL.SYS" in found[max(0, place - 3) : place]
    # Loads behind an acquire do not hit what the L1 cache held before.
    assert "CCTL.IVALL" in found


def test_rows_on_a_cpu_are_left_to_triton() -> None:
    rows = torch.zeros(2, 64, dtype=torch.bfloat16)
    assert not normal_combine_cuda.serves(normal_exchange(PLAIN, 64, 2), rows, rows)


def test_more_entries_or_ranks_than_lanes_are_left_to_triton() -> None:
    layout = normal_exchange(PLAIN, 64, 2).peers.layout
    for change, expected in (({"top_k": 32}, True), ({"top_k": 33}, False)):
        assert normal_combine_cuda.fits(replace(layout, **change)) == expected
    assert not normal_combine_cuda.fits(replace(layout, world_size=64))


def test_blocks_are_all_there_at_once() -> None:
    assert normal_combine_cuda.num_blocks(32, 132) == 32
    assert normal_combine_cuda.num_blocks(200, 132) == 132
