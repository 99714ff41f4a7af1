"""Imitate npu_grouped_matmul: one GEMM for each expert's rows.

INT8 sums are exact integers, floating sums are in float32, and every result is rounded once. Rows
outside of all groups are undefined.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fakes.ascend.dtypes import dtype_of
from fakes.ascend.formats import as_nd, require_aligned
from fakes.ascend.limits import Soc, current_machine, require, require_modelled
from fakes.ascend.operators.groups import Group, GroupListType, groups_of
from fakes.ascend.registry import implements
from fakes.ascend.undefined import undefined

_NAME = "npu_grouped_matmul"
# An int64 scale holds the bits of a float32, of which the device reads the upper 19.
_SCALE_MASK = -(1 << 13)

# split_item: one output tensor. group_type: rows are split along M.
_ONE_TENSOR, _CUT_ROWS = (2, 3), 0
# Dtypes of scale and result of INT8 products. A5 takes the second set as well.
_SCALED = {(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)}
_SCALED_BY_A5 = {(torch.float32, torch.bfloat16), (torch.int64, torch.bfloat16)}


def integer_product(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the exact product of int8 [m, K] and [K, N], int32; float64 is exact below 2**53."""
    return (rows.double() @ weight.double()).to(torch.int32)


def scale_values(scale: Tensor) -> Tensor:
    """Return the float32 weight scale that the device multiplies by; int64 holds bits."""
    if scale.dtype != torch.int64:
        return scale.float()
    # The lower 32 bits; the upper ones of a negative scale may repeat its sign.
    bits = scale.contiguous().view(torch.int32)[..., ::2]
    return (bits & _SCALE_MASK).view(torch.float32)


def fill_rows(parts: dict[Group, Tensor], shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return one tensor with the rows of the groups; the other rows are undefined."""
    result = undefined(shape, dtype)
    for group, rows in parts.items():
        result[group.rows] = rows
    return result


@implements("npu_grouped_matmul")
def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    offset: Sequence[Tensor] | None = None,
    antiquant_scale: Sequence[Tensor] | None = None,
    antiquant_offset: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: Sequence[Tensor] | None = None,
    activation_quant_scale: Sequence[Tensor] | None = None,
    activation_quant_offset: Sequence[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """Multiply the rows of each group by the weight of its expert.

    Args:
        x: one [M, K], int8, bfloat16, float16 or float32.
        weight: one [E, K, N], the dtype of x; ND or NZ.
        scale: one [E, N], for int8 x. On A2 and A3: bfloat16 for a bfloat16 result, float32 for a
            float16 result; on A5 a bfloat16 result also allows float32, or its bits in int64.
        per_token_scale: one [M], float32, in addition to scale.
        group_list: int64, see GroupListType; rows after the last group are undefined. A single
            group has type 0.
        split_item: 2 or 3, one tensor.
        group_type: 0, which cuts M.
        tuning_config: ignored; it changes no number.
        output_dtype: of int8 x int32 without a scale, bfloat16 or float16 with one; else that of x.

    Returns:
        One [M, N].

    Refused as not simulated: everything else.
    Source: documented arithmetic of the operator, and what its host code checks; not run on an NPU.
    """
    unsupported = (bias, offset, antiquant_scale, antiquant_offset)
    activation = (activation_input, activation_quant_scale, activation_quant_offset)
    numbers = (x_dtype, weight_dtype, scale_dtype, per_token_scale_dtype)
    is_plain = not any((*unsupported, *activation, act_type)) and numbers == (None,) * 4
    require_modelled(_NAME, is_plain, "a bias, offset, activation or another dtype")
    lists = (x, weight, scale or [None], per_token_scale or [None])
    is_one = split_item in _ONE_TENSOR and group_type == _CUT_ROWS and {*map(len, lists)} == {1}
    require_modelled(_NAME, is_one, f"{split_item=}, {group_type=}, or a list of tensors,")
    require_aligned(_NAME, weight[0])
    rows, matrices = x[0], as_nd(_NAME, weight[0])
    factors, tokens = (each[0] if each else None for each in (scale, per_token_scale))
    dtype = rows.dtype if output_dtype is None else dtype_of(_NAME, output_dtype)
    _check_dtypes(rows.dtype, dtype, factors, tokens)
    _check_sizes(rows, matrices, factors, tokens)
    list_type = group_list_type or GroupListType.CUMSUM
    is_int8, is_pairs = rows.dtype == torch.int8, list_type == GroupListType.PAIRS
    require(_NAME, is_int8 or not is_pairs, "group_list_type 2 is for INT8")
    require(_NAME, group_list is not None, "group_list is given")
    assert group_list is not None, "required above"
    is_counts = list_type == GroupListType.COUNTS
    rule = "group_list_type 1 (counts) is of several groups; pass the end of one group, type 0"
    require(_NAME, not (is_counts and len(group_list) == 1), rule)
    parts: dict[Group, Tensor] = {}
    for group in groups_of(_NAME, group_list, list_type, len(matrices), len(rows)):
        own, matrix = rows[group.rows], matrices[group.expert]
        total = integer_product(own, matrix) if is_int8 else own.float() @ matrix.float()
        if factors is not None:
            total = total.float() * scale_values(factors[group.expert])
        if tokens is not None:
            total = total * tokens[group.rows, None]
        parts[group] = total.to(dtype)
    return [fill_rows(parts, [len(rows), matrices.shape[2]], dtype)]


def _check_dtypes(
    rows: torch.dtype, result: torch.dtype, scale: Tensor | None, tokens: Tensor | None
) -> None:
    require(_NAME, tokens is None or scale is not None, "per_token_scale comes with scale")
    if rows != torch.int8:
        require(_NAME, scale is None, "scale is for INT8")
        require_modelled(_NAME, result == rows, f"{result} from {rows}")
        return
    require_modelled(_NAME, result != torch.int8, "an INT8 result, which is the default,")
    if scale is None:
        require(_NAME, result == torch.int32, f"INT8 without scale gives int32, not {result}")
        return
    is_a5 = current_machine().soc is Soc.A5
    taken = "A2 and A3 take a bfloat16 scale for a bfloat16 result and a float32 one for float16"
    if is_a5:
        taken = (
            "A5 takes a bfloat16, float32 or int64 scale for bfloat16 and a float32 one for float16"
        )
    is_taken = (scale.dtype, result) in (_SCALED | _SCALED_BY_A5 if is_a5 else _SCALED)
    require(_NAME, is_taken, f"{taken}, got {scale.dtype} for {result}")


def _check_sizes(
    rows: Tensor, matrices: Tensor, scale: Tensor | None, tokens: Tensor | None
) -> None:
    fits = rows.dim() == 2 and matrices.dim() == 3 and rows.shape[1] == matrices.shape[1]
    shapes = f"{list(rows.shape)}, {list(matrices.shape)}"
    require(_NAME, fits, f"x [M, K], weight [E, K, N]; got {shapes}")
    require(_NAME, matrices.dtype == rows.dtype, "weight has the dtype of x")
    if scale is not None:
        require(_NAME, scale.shape == matrices[:, 0].shape, "scale [E, N]")
    if tokens is not None:
        fits = tokens.shape == rows.shape[:1] and tokens.dtype == torch.float32
        require(_NAME, fits, f"per_token_scale is float32 [M], got {list(tokens.shape)}")
