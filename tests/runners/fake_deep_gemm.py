"""An imitation of deep_gemm with its documented checks, which computes in float32.

Rows of tiles that no program computes are NaN. Whole tiles are stored, as by the package, so
the last tile of an expert overwrites rows of the next expert if that one begins inside the tile.
Source: README, argument checks and scheduler of DeepGEMM.
"""

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from epcomm.platforms import deep_gemm as platform
from epcomm.runners import deep_gemm

BLOCK = 128
TILE_ROWS = 128
# 16 bytes of a 4-byte scale.
COLUMN_ALIGNMENT = 4
Operand = tuple[Tensor, Tensor]


def install(
    monkeypatch: pytest.MonkeyPatch,
    *,
    architecture: int = 9,
    alignment: int = TILE_ROWS,
    takes_ends: bool = True,
    has_nvcc: bool = True,
) -> ModuleType:
    """Make `import deep_gemm` import the imitation, and present a CPU as sm_<n>0.

    takes_ends: the layout may be the end of each expert, as since version 2.2; version 2.1 takes
        only the expert of each row.
    """
    module = ModuleType("deep_gemm")
    module.__spec__ = ModuleSpec("deep_gemm", loader=None)
    # The SMs of products, now and of each product.
    vars(module).update(num_sms=132, of_products=[])

    def of_rows(lhs: Operand, rhs: Operand, out: Tensor, m_indices: Tensor) -> None:
        multiply_contiguous(lhs, rhs, out, m_indices, architecture, alignment)

    def of_rows_or_ends(
        lhs: Operand,
        rhs: Operand,
        out: Tensor,
        grouped_layout: Tensor,
        *,
        use_psum_layout: bool = False,
    ) -> None:
        layout = grouped_layout
        if use_psum_layout:
            layout = expert_of_tile_rows(grouped_layout, rhs, lhs[0].shape[0], alignment)
        module.of_products.append(module.num_sms)
        multiply_contiguous(lhs, rhs, out, layout, architecture, alignment)

    def masked(lhs: Operand, rhs: Operand, out: Tensor, masked_m: Tensor, expected_m: int) -> None:
        module.of_products.append(module.num_sms)
        multiply_masked(lhs, rhs, out, masked_m, expected_m, architecture)

    functions = {
        "m_grouped_fp8_gemm_nt_contiguous": of_rows_or_ends if takes_ends else of_rows,
        "m_grouped_fp8_gemm_nt_masked": masked,
        "get_mk_alignment_for_contiguous_layout": lambda: alignment,
        "get_num_sms": lambda: module.num_sms,
        "set_num_sms": partial(setattr, module, "num_sms"),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setattr(deep_gemm, "_architecture", lambda weights, machine: architecture)
    monkeypatch.setattr(platform, "nvcc_is_installed", lambda variables: has_nvcc)
    return module


def expert_of_tile_rows(ends: Tensor, rhs: Operand, num_rows: int, alignment: int) -> Tensor:
    """Check the ends of experts, [G], and return the expert of each row of their tiles, [M].

    An expert begins at the next multiple of the alignment after the end of the one before.
    """
    assert ends.dtype == torch.int32
    assert ends.is_contiguous()
    assert list(ends.shape) == [rhs[0].shape[0]]
    experts, start = torch.full((num_rows,), -1, dtype=torch.int32, device=ends.device), 0
    for expert, end in enumerate(ends.tolist()):
        assert start <= end <= num_rows
        last = -(-end // alignment) * alignment
        experts[start:last], start = expert, last
    return experts


def multiply_contiguous(
    lhs: Operand, rhs: Operand, out: Tensor, m_indices: Tensor, architecture: int, alignment: int
) -> None:
    num_rows, width = lhs[0].shape
    experts, num_columns = check_matrices(rhs, width)
    assert lhs[0].dtype == torch.float8_e4m3fn
    assert lhs[0].is_contiguous()
    assert list(out.shape) == [num_rows, num_columns]
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous()
    assert m_indices.dtype == torch.int32
    assert m_indices.is_contiguous()
    assert list(m_indices.shape) == [num_rows]
    check_segments(m_indices.tolist(), experts, alignment)
    a, b = left(lhs, architecture), right(rhs)
    out.fill_(float("nan"))
    for first in range(0, num_rows, TILE_ROWS):
        expert, tile = int(m_indices[first]), slice(first, first + TILE_ROWS)
        if expert >= 0:
            # The kernel reads only the expert of the first row of a tile.
            out[tile] = (a[tile] @ b[expert].T).bfloat16()
    out[m_indices < 0] = float("nan")


def multiply_masked(
    lhs: Operand, rhs: Operand, out: Tensor, masked_m: Tensor, expected_m: int, architecture: int
) -> None:
    num_experts, capacity, width = lhs[0].shape
    experts, num_columns = check_matrices(rhs, width)
    assert lhs[0].dtype == torch.float8_e4m3fn
    assert lhs[0].is_contiguous()
    assert experts == num_experts
    assert expected_m > 0
    assert capacity > 0
    assert list(out.shape) == [num_experts, capacity, num_columns]
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous()
    assert masked_m.dtype == torch.int32
    assert list(masked_m.shape) == [num_experts]
    a, b = left(lhs, architecture), right(rhs)
    out.fill_(float("nan"))
    # The experts are adjacent in one map of rows, and tiles do not know where an expert ends.
    # Which of two experts stores a row last is undefined: here the first one, against the second.
    rows, results = a.flatten(0, 1), out.flatten(0, 1)
    for expert, count in reversed(list(enumerate(masked_m.tolist()))):
        stored = slice(expert * capacity, expert * capacity + -(-count // TILE_ROWS) * TILE_ROWS)
        results[stored] = (rows[stored] @ b[expert].T).bfloat16()


def check_segments(m_indices: list[int], num_experts: int, alignment: int) -> None:
    """Check that each expert's rows are contiguous, and begin at a multiple of the alignment."""
    seen: list[int] = []
    for row, expert in enumerate(m_indices):
        assert -1 <= expert < num_experts
        if expert < 0 or (row and m_indices[row - 1] == expert):
            continue
        assert row % alignment == 0, f"expert {expert} begins at row {row}"
        assert all(before < expert for before in seen), "experts come in order"
        seen.append(expert)


def check_matrices(rhs: Operand, width: int) -> tuple[int, int]:
    """Check the matrices, and return their number G and their rows N."""
    codes, scales = rhs
    num_experts, num_columns, depth = codes.shape
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.is_contiguous()
    assert depth == width
    assert num_columns % BLOCK == 0
    assert width % BLOCK == 0
    assert scales.dtype == torch.float32
    assert scales.is_contiguous()
    assert list(scales.shape) == [num_experts, num_columns // BLOCK, width // BLOCK]
    return num_experts, num_columns


def left(lhs: Operand, architecture: int) -> Tensor:
    """Check the scales of an operand, and return its values [..., M, K]."""
    codes, scales = lhs
    num_rows, num_blocks = codes.shape[-2], codes.shape[-1] // BLOCK
    is_packed = architecture == 10
    num_scales = -(-num_blocks // 4) if is_packed else num_blocks
    assert scales.dtype == (torch.int32 if is_packed else torch.float32)
    assert list(scales.shape) == [*codes.shape[:-1], num_scales]
    column_stride = scales.stride(-1)
    assert scales.stride(-2) == 1, "rows of scales are neighbours"
    assert column_stride >= num_rows
    assert column_stride % COLUMN_ALIGNMENT == 0
    assert scales.storage_offset() % COLUMN_ALIGNMENT == 0
    if codes.dim() == 3:
        assert scales.stride(0) == column_stride * num_scales
    if is_packed:
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)
        exponents = (scales.unsqueeze(-1) >> shifts) & 0xFF
        scales = torch.exp2(exponents.flatten(-2)[..., :num_blocks].float() - 127)
    return codes.float() * scales.repeat_interleave(BLOCK, dim=-1)


def right(rhs: Operand) -> Tensor:
    codes, scales = rhs
    spread = scales.repeat_interleave(BLOCK, dim=1).repeat_interleave(BLOCK, dim=2)
    return codes.float() * spread
