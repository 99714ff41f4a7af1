"""Call Ascend's grouped operators with the group_list that each of them expects.

Operators disagree on group_list: cumulative sums, or counts; the device does not notice the wrong
kind. Each function here takes the number of rows of each expert, [E], int64, of at least one
expert, and derives what its operator expects. Experts follow without gaps.   Host sync: none.
"""

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

# Arguments of npu_grouped_matmul: groups are ranges of rows, and the result is one tensor.
_CUT_ROWS, _ONE_TENSOR = 0, 2
# group_list_type of npu_grouped_matmul: counts 3 0 4 are the cumulative sums 3 3 7.
_CUMULATIVE, _COUNTS = 0, 1
# quant_mode of npu_dequant_swiglu_quant: it returns codes and a scale for each row.
_DYNAMIC = 1
# By operator, with groups: 2I is a multiple of the first number, and at most the second.
_WIDTHS = MappingProxyType(
    {"npu_dequant_swiglu_quant": (64, 10496), "npu_grouped_matmul_swiglu_quant": (1, 10240)}
)


@dataclass(frozen=True, kw_only=True)
class Int8Rows:
    """Quantised rows of slots, undefined outside the groups.

    codes: [C, N], int8.   scales: [C], float32.
    """

    codes: Tensor
    scales: Tensor


def multiply(
    rows: Tensor,
    matrices: Tensor,
    counts: Tensor,
    *,
    scale: Tensor | None = None,
    per_token_scale: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply each expert's rows by its matrix: [C, K] by [E, K, N] gives [C, N].

    Args:
        rows: [C, K], bfloat16 or int8.
        matrices: [E, K, N].
        counts: the rows of each expert.
        scale: [E, N], scales of the columns of INT8 products; cast to bfloat16, because A2 and A3
            take no other dtype for a bfloat16 result.
        per_token_scale: [C], float32, scales of the rows of INT8 products.
        output_dtype: dtype of the result; None: the dtype of the rows. INT8 rows need int32, or
            bfloat16 with scales.
    """
    # The documentation allows counts from two groups on; for one group the count is also the sum.
    return torch.ops.npu.npu_grouped_matmul(
        [rows],
        [matrices],
        scale=None if scale is None else [scale.to(torch.bfloat16)],
        per_token_scale=None if per_token_scale is None else [per_token_scale],
        group_list=counts,
        split_item=_ONE_TENSOR,
        group_type=_CUT_ROWS,
        group_list_type=_CUMULATIVE if len(matrices) == 1 else _COUNTS,
        output_dtype=output_dtype,
    )[0]


def activate_sums(
    sums: Tensor, counts: Tensor, *, weight_scale: Tensor, row_scales: Tensor
) -> Int8Rows:
    """Turn int32 sums [C, 2I] into INT8 rows of silu(left half) * right half, [C, I].

    weight_scale: [E, 2I], float32.   row_scales: [C], float32.   2I: see width_reasons().
    """
    codes, scales = torch.ops.npu.npu_dequant_swiglu_quant(
        sums,
        weight_scale=weight_scale,
        activation_scale=row_scales,
        group_index=counts,
        activate_left=True,
        quant_mode=_DYNAMIC,
    )
    return Int8Rows(codes=codes, scales=scales)


def multiply_and_activate(
    rows: Int8Rows, matrices: Tensor, counts: Tensor, *, weight_scale: Tensor
) -> Int8Rows:
    """Multiply, activate and quantise in one operator, which rounds as Int8Profile.DIV does.

    rows: [C, K].   matrices: [E, K, 2I].   weight_scale: [E, 2I].   2I: see width_reasons().
    """
    codes, scales, _ = torch.ops.npu.npu_grouped_matmul_swiglu_quant(
        rows.codes, matrices, counts.cumsum(0), weight_scale, rows.scales
    )
    return Int8Rows(codes=codes, scales=scales)


def width_reasons(operator: str, width: int) -> list[str]:
    """Return why an operator refuses this width of the first product, 2I; empty if it accepts."""
    unit, most = _WIDTHS.get(operator, (1, width))
    if width % unit == 0 and width <= most:
        return []
    expected = f"a multiple of {unit} of at most {most}" if unit > 1 else f"at most {most}"
    return [f"2 * intermediate_size is {width}, expected {expected} for {operator}"]
