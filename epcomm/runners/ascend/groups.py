"""Ascend's grouped operators, and the rows of each expert as each of them wants to be told.

Operators disagree on what a group_list is: sums so far, or counts; the device does not notice the
wrong one. Here they take an ExpertGroups and ask it for their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

# Of npu_grouped_matmul: rows are cut by M, and one tensor comes out.
_CUT_ROWS, _ONE_TENSOR = 0, 2
# Of npu_dequant_swiglu_quant: codes and a scale for each row.
_DYNAMIC = 1
# 2I of npu_dequant_swiglu_quant with groups: a multiple of the first, at most the second.
# The third: 2I of npu_grouped_matmul_swiglu_quant, at most.
_SUMS_UNIT, _MAX_SUMS, _MAX_FUSED = 64, 10496, 10240


class GroupListKind(IntEnum):
    """As npu_grouped_matmul numbers them. Counts 3 0 4 are CUMULATIVE 3 3 7, COUNTS 3 0 4."""

    CUMULATIVE = 0
    COUNTS = 1


@dataclass(frozen=True, kw_only=True)
class Int8Rows:
    """codes: [C, N], int8.   scales: [C], float32. Rows of no group are undefined."""

    codes: Tensor
    scales: Tensor


class ExpertGroups:
    """The rows of each expert, one expert's right behind another's. No host sync."""

    def __init__(self, counts: Tensor) -> None:
        """counts: [E], integers, on the device; at least one expert."""
        self._counts = counts.to(torch.int64)

    def as_kind(self, kind: GroupListKind) -> Tensor:
        """[E], int64, on the device of the counts."""
        return self._cumulative if kind is GroupListKind.CUMULATIVE else self._counts

    @cached_property
    def _cumulative(self) -> Tensor:
        return self._counts.cumsum(0)


def multiply(
    rows: Tensor,
    matrices: Tensor,
    groups: ExpertGroups,
    *,
    scale: Tensor | None = None,
    per_token_scale: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Each expert's rows times its matrix: [C, K] by [E, K, N] to [C, N].

    Args:
        scale: [E, N], of the columns of INT8 products; multiplies in bfloat16, because A2 and A3
            take no other for a bfloat16 result.   per_token_scale: [C], float32, of their rows.
        output_dtype: None: that of the rows. INT8 needs one: int32, or with scales bfloat16.
    """
    # Documentation allows no counts of one group alone; they are its sum as well.
    is_one = len(matrices) == 1
    return torch.ops.npu.npu_grouped_matmul(
        [rows],
        [matrices],
        scale=None if scale is None else [scale.to(torch.bfloat16)],
        per_token_scale=None if per_token_scale is None else [per_token_scale],
        group_list=groups.as_kind(GroupListKind.COUNTS),
        split_item=_ONE_TENSOR,
        group_type=_CUT_ROWS,
        group_list_type=int(GroupListKind.CUMULATIVE if is_one else GroupListKind.COUNTS),
        output_dtype=output_dtype,
    )[0]


def activate_sums(
    sums: Tensor, groups: ExpertGroups, *, weight_scale: Tensor, row_scales: Tensor
) -> Int8Rows:
    """int32 sums [C, 2I] to the INT8 rows of silu(left half) * right half.

    weight_scale: [E, 2I], float32.   row_scales: [C], float32.   2I: see sums_reasons().
    """
    codes, scales = torch.ops.npu.npu_dequant_swiglu_quant(
        sums,
        weight_scale=weight_scale,
        activation_scale=row_scales,
        group_index=groups.as_kind(GroupListKind.COUNTS),
        activate_left=True,
        quant_mode=_DYNAMIC,
    )
    return Int8Rows(codes=codes, scales=scales)


def sums_reasons(intermediate_size: int) -> list[str]:
    """Why activate_sums() refuses experts of this I."""
    width = 2 * intermediate_size
    if width % _SUMS_UNIT == 0 and width <= _MAX_SUMS:
        return []
    return [
        f"2 * intermediate_size is {width}, expected a multiple of {_SUMS_UNIT} of at most "
        f"{_MAX_SUMS} for npu_dequant_swiglu_quant"
    ]


def multiply_and_activate(
    rows: Int8Rows, matrices: Tensor, groups: ExpertGroups, *, weight_scale: Tensor
) -> Int8Rows:
    """multiply() and activate_sums() in one operator, which rounds as Int8Profile.DIV.

    2I: see fused_reasons().
    """
    codes, scales, _ = torch.ops.npu.npu_grouped_matmul_swiglu_quant(
        rows.codes,
        matrices,
        groups.as_kind(GroupListKind.CUMULATIVE),
        weight_scale,
        rows.scales,
    )
    return Int8Rows(codes=codes, scales=scales)


def fused_reasons(intermediate_size: int) -> list[str]:
    """Why multiply_and_activate() refuses experts of this I."""
    width = 2 * intermediate_size
    if width <= _MAX_FUSED:
        return []
    return [
        f"2 * intermediate_size is {width}, expected at most {_MAX_FUSED} for "
        "npu_grouped_matmul_swiglu_quant"
    ]
