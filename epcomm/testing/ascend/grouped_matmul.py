"""npu_grouped_matmul: one GEMM for each expert's rows.

INT8 sums are exact integers, floating sums are in float32, and every result is rounded once.
Rows that no group holds are undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.testing.ascend.dtypes import dtype_of
from epcomm.testing.ascend.formats import as_nd, require_aligned
from epcomm.testing.ascend.groups import Group, GroupListType, groups_of
from epcomm.testing.ascend.limits import require
from epcomm.testing.ascend.registry import implements
from epcomm.testing.ascend.undefined import undefined

_NAME = "npu_grouped_matmul"
# An int64 scale holds the bits of a float32, of which the device reads the upper 19.
_SCALE_MASK = -(1 << 13)

# group_type: what group_list cuts.
NO_SPLIT = -1
SPLIT_ROWS = 0
SPLIT_INNER = 2


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """weights E x [K, N]; the others E x [N], or None; per_token_scales float32 [M], or None."""

    weights: list[Tensor]
    bias: list[Tensor] | None = None
    scales: list[Tensor] | None = None
    antiquant_scales: list[Tensor] | None = None
    antiquant_offsets: list[Tensor] | None = None
    per_token_scales: Tensor | None = None

    def rows(self, x: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
        """The rows of the group, of x [M, K], times the weight of its expert: [m, N]."""
        expert = group.expert
        rows, weight = x[group.rows], self.weights[expert]
        if rows.dtype == torch.int8:
            total = integer_product(rows, weight)
        else:
            total = rows.float() @ self._float_weight(expert, rows.dtype)
        if self.bias is not None:
            total = total + self.bias[expert]
        if self.scales is None:
            return total.to(dtype)
        total = total.float() * scale_values(self.scales[expert])
        if self.per_token_scales is not None:
            total = total * self.per_token_scales[group.rows, None]
        return total.to(dtype)

    def _float_weight(self, expert: int, dtype: torch.dtype) -> Tensor:
        weight = self.weights[expert].float()
        if self.antiquant_scales is None:
            return weight
        if self.antiquant_offsets is not None:
            weight = weight + self.antiquant_offsets[expert].float()
        # Rounded to what the products are made of; not verified on hardware.
        return (weight * self.antiquant_scales[expert].float()).to(dtype).float()


def integer_product(rows: Tensor, weight: Tensor) -> Tensor:
    """int8 [m, K] times int8 [K, N] in int32, exact: float64 holds every sum below 2**53."""
    return (rows.double() @ weight.double()).to(torch.int32)


def scale_values(scale: Tensor) -> Tensor:
    """A weight scale as the device multiplies by it, float32; int64 holds bits (see above)."""
    if scale.dtype != torch.int64:
        return scale.float()
    # The lower halves: the upper ones of a negative scale may repeat its sign.
    bits = scale.contiguous().view(torch.int32)[..., ::2]
    return (bits & _SCALE_MASK).view(torch.float32)


def fill_rows(parts: dict[Group, Tensor], shape: list[int], dtype: torch.dtype) -> Tensor:
    """One tensor with the rows of the groups; the rest is undefined."""
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
    """Rows of each group times the weight of its expert.

    Args:
        x: one [M, K], int8, bfloat16, float16 or float32; with group_type -1 one a weight.
        weight: one [E, K, N], or E of [K, N]; ND or NZ; int8 beside floating x with
            antiquant_scale. With group_type 2 one [K, N].
        bias: [E, N], int32 for int8 x, else floating.
        scale: [E, N], float32, bfloat16, or the bits of float32 in int64.
        antiquant_scale, antiquant_offset: [E, N].
        per_token_scale: [M], float32.
        group_list: int64, see GroupListType; rows behind the last group are undefined.
        split_item: 0 or 1 give a tensor for each group, 2 or 3 one tensor.
        group_type: 0 cuts M, 2 cuts K, -1 cuts nothing. There is no default.
        tuning_config: ignored; it changes no number.
        output_dtype: what float results are rounded to, by default the dtype of x. INT8 without
            scales gives int32.

    Returns:
        [M, N]; one a group; or [E, M, N] with group_type 2.

    Refused as not simulated: offset, activations, INT8 results, the dtypes of Ascend 950.
    Source: documented arithmetic of the operator; not checked on an NPU.
    """
    foreign = (offset, activation_input, activation_quant_scale, activation_quant_offset)
    numbers = (x_dtype, weight_dtype, scale_dtype, per_token_scale_dtype)
    if any(foreign) or act_type or any(number is not None for number in numbers):
        raise NotImplementedError(f"{_NAME}: the stand-in has no offset, activation, other dtypes")
    require(_NAME, split_item in (0, 1, 2, 3), f"split_item in [0, 1, 2, 3], got {split_item}")
    types = (NO_SPLIT, SPLIT_ROWS, SPLIT_INNER)
    require(_NAME, group_type in types, f"group_type in {types}, got {group_type}")
    for matrix in weight:
        require_aligned(_NAME, matrix)
    wanted = None if output_dtype is None else dtype_of(_NAME, output_dtype)
    dtype = _output_dtype(x[0].dtype, bool(scale), wanted)
    matmul = Matmul(
        weights=_by_expert([as_nd(_NAME, matrix) for matrix in weight], 2),
        bias=_by_expert(bias, 1) if bias else None,
        scales=_by_expert(scale, 1) if scale else None,
        antiquant_scales=_by_expert(antiquant_scale, 1) if antiquant_scale else None,
        antiquant_offsets=_by_expert(antiquant_offset, 1) if antiquant_offset else None,
        per_token_scales=torch.cat(list(per_token_scale)) if per_token_scale else None,
    )
    if group_type == NO_SPLIT:
        return _pairwise(x, matmul, dtype)
    require(_NAME, len(x) == 1, "one x where group_list cuts it (the stand-in takes no list)")
    require(_NAME, group_list is not None, "group_list is given")
    assert group_list is not None, "required above"
    list_type = group_list_type or GroupListType.CUMSUM
    if group_type == SPLIT_INNER:
        return [_split_inner(x[0], matmul.weights, group_list, list_type, dtype)]
    _check_rows(x[0], matmul, list_type)
    num_rows, num_columns = x[0].shape[0], matmul.weights[0].shape[1]
    groups = groups_of(_NAME, group_list, list_type, len(matmul.weights), num_rows)
    parts = {group: matmul.rows(x[0], group, dtype) for group in groups}
    if split_item in (0, 1):
        return list(parts.values())
    return [fill_rows(parts, [num_rows, num_columns], dtype)]


def _by_expert(tensors: Sequence[Tensor], num_dims: int) -> list[Tensor]:
    """One of [E, ...], or E of them, as E of them."""
    if len(tensors) == 1 and tensors[0].dim() == num_dims + 1:
        return list(tensors[0].unbind())
    is_list = all(tensor.dim() == num_dims for tensor in tensors)
    require(_NAME, is_list, f"one {num_dims + 1}-D tensor, or {num_dims}-D ones, by expert")
    return list(tensors)


def _output_dtype(x: torch.dtype, has_scale: bool, wanted: torch.dtype | None) -> torch.dtype:
    if x != torch.int8:
        return x if wanted is None else wanted
    if not has_scale:
        require(_NAME, wanted in (None, torch.int32), "INT8 without scale gives int32")
        return torch.int32
    if wanted is None or wanted == torch.int8:
        raise NotImplementedError(f"{_NAME}: the stand-in gives no INT8; pass output_dtype")
    is_half = wanted in (torch.bfloat16, torch.float16)
    require(_NAME, is_half, f"output_dtype is bfloat16 or float16, got {wanted}")
    return wanted


def _check_rows(x: Tensor, matmul: Matmul, list_type: int) -> None:
    weight, scales, tokens = matmul.weights[0], matmul.scales, matmul.per_token_scales
    fits = x.dim() == 2 and x.shape[1] == weight.shape[0]
    require(_NAME, fits, f"x [M, K], weight [E, K, N]; got {list(x.shape)}, {list(weight.shape)}")
    is_int8 = x.dtype == torch.int8
    is_mixed = not is_int8 and weight.dtype == torch.int8
    require(_NAME, is_mixed or weight.dtype == x.dtype, "weight has the dtype of x, or is int8")
    has_antiquant = matmul.antiquant_scales is not None
    require(_NAME, is_mixed == has_antiquant, "antiquant_scale with floating x, int8 weights")
    is_pairs = list_type == GroupListType.PAIRS
    require(_NAME, is_int8 or not is_pairs, "group_list_type 2 is for INT8")
    require(_NAME, is_int8 or scales is None, "scale is for INT8")
    require(_NAME, tokens is None or scales is not None, "per_token_scale comes with scale")
    if tokens is not None:
        fits = tokens.shape == x.shape[:1] and tokens.dtype == torch.float32
        require(_NAME, fits, f"per_token_scale is float32 [M], got {list(tokens.shape)}")
    if scales is not None:
        fits = len(scales) == len(matmul.weights)
        fits = fits and all(scale.shape == weight.shape[1:] for scale in scales)
        require(_NAME, fits, "scale [E, N]")


def _pairwise(x: Sequence[Tensor], matmul: Matmul, dtype: torch.dtype) -> list[Tensor]:
    require(_NAME, len(x) == len(matmul.weights), "as many x as weights with group_type -1")
    is_plain = matmul.per_token_scales is None
    require(_NAME, is_plain, "per_token_scale with group_type 0 (the stand-in)")
    groups = [Group(expert=i, first=0, last=rows.shape[0]) for i, rows in enumerate(x)]
    return [matmul.rows(rows, group, dtype) for rows, group in zip(x, groups, strict=True)]


def _split_inner(
    x: Tensor, weights: list[Tensor], group_list: Tensor, list_type: int, dtype: torch.dtype
) -> Tensor:
    """x [M, K] times weight [K, N], K cut into groups: [E, M, N]; an empty group gives zeros."""
    require(_NAME, x.dtype != torch.int8, "group_type 2 is for floating x")
    require(_NAME, len(weights) == 1, "one weight [K, N] where K is cut")
    groups = groups_of(_NAME, group_list, list_type, group_list.shape[0], x.shape[1])
    parts = [x[:, group.rows].float() @ weights[0][group.rows].float() for group in groups]
    return torch.stack(parts).to(dtype)
