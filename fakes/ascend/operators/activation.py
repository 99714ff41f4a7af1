"""Imitate SwiGLU between the two GEMMs of an expert, alone and with quantisation around it.

All is computed in float32; a row outside of all groups is undefined.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.quantization.int8 import INT8_MAX
from fakes.ascend.dtypes import dtype_of
from fakes.ascend.formats import as_nd, require_aligned
from fakes.ascend.limits import require, require_modelled, require_size
from fakes.ascend.operators.grouped_matmul import fill_rows, integer_product
from fakes.ascend.operators.groups import Group, GroupListType, groups_of
from fakes.ascend.registry import implements
from fakes.ascend.undefined import UNDEFINED_INT8, undefined

_DEQUANT = "npu_dequant_swiglu_quant"
_FUSED = "npu_grouped_matmul_swiglu_quant"
# quant_mode of npu_dequant_swiglu_quant.
DYNAMIC = 1
# npu_dequant_swiglu_quant takes 2I with group_index up to _WIDTH, a multiple of _WIDTH_UNIT; the
# fused operator takes 2I up to _FUSED_WIDTH.
_WIDTH, _WIDTH_UNIT, _FUSED_WIDTH = 10496, 64, 10240


@dataclass(frozen=True, kw_only=True)
class Int8Rows:
    """codes int8 [N, I]; scales float32 [N]."""

    codes: Tensor
    scales: Tensor


def gated_int8(gate: Tensor, up: Tensor) -> Int8Rows:
    """Quantise silu(gate) * up, [N, I] float32: scale a / 127, codes rint(row * 127 / a).

    A row of zeros has the scale 0 and undefined codes.

    """
    rows = F.silu(gate) * up
    amax = rows.abs().amax(dim=-1, keepdim=True)
    return Int8Rows(codes=int8_codes(rows * INT8_MAX / amax), scales=_scales(amax).squeeze(-1))


def divided_int8(gate: Tensor, up: Tensor) -> Int8Rows:
    """Compute gated_int8() with codes rint(row / scale), which differ for quotients near a half."""
    rows = F.silu(gate) * up
    scales = _scales(rows.abs().amax(dim=-1, keepdim=True))
    return Int8Rows(codes=int8_codes(rows / scales), scales=scales.squeeze(-1))


def _scales(amax: Tensor) -> Tensor:
    return amax / torch.full_like(amax, INT8_MAX)


def int8_codes(quotients: Tensor) -> Tensor:
    """Round to nearest even, at most 127; NaN gets an undefined code."""
    codes = torch.round(quotients).clamp(-128, INT8_MAX)
    # Replace NaN before the cast, because it has no integer value.
    return codes.nan_to_num(UNDEFINED_INT8).to(torch.int8)


@implements("npu_swiglu")
def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """Compute silu of the first half of `dim` times the second half, rounded once to the dtype."""
    require("npu_swiglu", input.shape[dim] % 2 == 0, "the size of dim is even")
    gate, up = input.float().chunk(2, dim=dim)
    return (F.silu(gate) * up).to(input.dtype)


@implements("npu_dequant_swiglu_quant")
def dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: int | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Convert int32 sums of the first GEMM to INT8 rows for the second.

    Args:
        x: [M, 2I], int32; or bfloat16 and float16 without weight_scale. With group_index 2I is a
            multiple of 64 and at most 10496.
        weight_scale: [E, 2I], float32.
        activation_scale: [M] or [M, 1], float32.
        group_index: [E], int64, counts and nothing else; None: all rows are of one expert.
        activate_left: silu of the left half times the right half; otherwise, and by default, silu
            of the right half times the left half.
        quant_mode: 1, a scale a token; 0, which is the default, is refused as not simulated.
        clamp_limit, glu_alpha, glu_bias: ignored; only swiglu_mode 1 reads them.

    Returns:
        codes [M, I], int8; scales [M], float32.

    Refused as not simulated: everything else but its default.
    Source: documented arithmetic of the operator; not checked on an NPU.
    """
    del clamp_limit, glu_alpha, glu_bias
    unsupported = (bias, quant_scale, quant_offset, round_mode, activate_dim)
    is_known = all(value is None for value in unsupported) and swiglu_mode == 0
    is_known = is_known and quant_mode == DYNAMIC
    require_modelled(_DEQUANT, is_known, "more than quant_mode=1 and swiglu_mode=0")
    is_int8 = dst_type is None or dtype_of(_DEQUANT, dst_type) == torch.int8
    require_modelled(_DEQUANT, is_int8, f"{dst_type=}")
    require_modelled(_DEQUANT, x.dim() == 2, f"x {list(x.shape)}, which is not 2-D,")
    num_rows, width = x.shape
    require(_DEQUANT, width % 2 == 0, f"x is [M, 2I], got {list(x.shape)}")
    has_scale = weight_scale is not None
    taken = (torch.int32,) if has_scale else (torch.bfloat16, torch.float16)
    rule = f"x is int32 with weight_scale, bfloat16 or float16 without, got {x.dtype}"
    require(_DEQUANT, x.dtype in taken, rule)
    _require_scale(_DEQUANT, "weight_scale", weight_scale)
    _require_scale(_DEQUANT, "activation_scale", activation_scale)
    weights = torch.ones(1, width) if weight_scale is None else weight_scale.view(-1, width)
    if group_index is None:
        require(_DEQUANT, weights.shape[0] == 1, "weight_scale has one row without group_index")
        groups: tuple[Group, ...] = (Group(expert=0, first=0, last=num_rows),)
    else:
        rule = f"2I is a multiple of {_WIDTH_UNIT}, at most {_WIDTH}, with group_index, got {width}"
        require_size(_DEQUANT, width % _WIDTH_UNIT == 0 and width <= _WIDTH, rule)
        weights = weights if has_scale else weights.expand(group_index.shape[0], -1)
        groups = groups_of(_DEQUANT, group_index, GroupListType.COUNTS, weights.shape[0], num_rows)
    tokens = torch.ones(num_rows, 1) if activation_scale is None else activation_scale.view(-1, 1)
    require(_DEQUANT, tokens.shape[0] == num_rows, "activation_scale is [M]")
    parts: dict[Group, Int8Rows] = {}
    for group in groups:
        rows = x[group.rows].float() * weights[group.expert] * tokens[group.rows]
        left, right = rows.chunk(2, dim=-1)
        gate, up = (left, right) if activate_left else (right, left)
        parts[group] = gated_int8(gate, up)
    return _filled(parts, num_rows, width // 2)


@implements("npu_grouped_matmul_swiglu_quant")
def grouped_matmul_swiglu_quant(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor,
    *,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """GEMM, dequantisation, SwiGLU and quantisation in one: codes are quotients by the scale.

    Args:
        x: [M, K], int8.
        weight: [E, K, 2I], int8, ND or NZ, the gate in the left half; 2I at most 10240.
        group_list: [E], int64, inclusive sums: counts are not detected, and give wrong results if
            they happen to increase.
        weight_scale: [E, 2I], float32 or bfloat16.
        x_scale: [M], float32.

    Returns:
        codes [M, I], int8; scales [M], float32; one unwritten element.

    Source: documented arithmetic of the operator; not checked on an NPU.
    """
    require_modelled(_FUSED, bias is None and offset is None, "a bias or an offset")
    is_int8 = x.dtype == torch.int8 and weight.dtype == torch.int8
    require(_FUSED, is_int8, f"x and weight are int8, got {x.dtype} and {weight.dtype}")
    fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[1]
    shapes = f"{list(x.shape)}, {list(weight.shape)}"
    require(_FUSED, fits, f"x [M, K], weight [E, K, 2I]; got {shapes}")
    require_aligned(_FUSED, weight)
    num_rows, (num_experts, _, width) = len(x), weight.shape
    require_size(_FUSED, width <= _FUSED_WIDTH, f"2I is at most {_FUSED_WIDTH}, got {width}")
    fits = weight_scale.shape == (num_experts, width) and x_scale.numel() == num_rows
    require(_FUSED, fits, "weight_scale [E, 2I] and x_scale [M]")
    _require_scale(_FUSED, "weight_scale", weight_scale, torch.float32, torch.bfloat16)
    _require_scale(_FUSED, "x_scale", x_scale)
    matrices, weights = as_nd(_FUSED, weight), weight_scale.float()
    parts: dict[Group, Int8Rows] = {}
    for group in groups_of(_FUSED, group_list, GroupListType.CUMSUM, num_experts, num_rows):
        total = integer_product(x[group.rows], matrices[group.expert]).float()
        rows = total * weights[group.expert] * x_scale.view(-1, 1)[group.rows]
        parts[group] = divided_int8(*rows.chunk(2, dim=-1))
    return *_filled(parts, num_rows, width // 2), undefined([], torch.float32)


def _require_scale(operator: str, name: str, scale: Tensor | None, *taken: torch.dtype) -> None:
    """Check a scale of one of the dtypes, by default float32; None passes."""
    expected = taken or (torch.float32,)
    if scale is not None:
        rule = f"{name} is {' or '.join(map(str, expected))}, got {scale.dtype}"
        require(operator, scale.dtype in expected, rule)


def _filled(parts: dict[Group, Int8Rows], num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    codes = {group: rows.codes for group, rows in parts.items()}
    scales = {group: rows.scales for group, rows in parts.items()}
    return (
        fill_rows(codes, [num_rows, width], torch.int8),
        fill_rows(scales, [num_rows], torch.float32),
    )
