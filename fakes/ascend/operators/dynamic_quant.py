"""Imitate dynamic quantisation: rows to INT8 with a scale from each row.

Source: the operator's documentation; of its arithmetics the one that divides (Int8Profile.DIV).
"""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.types import Int8Profile
from fakes.ascend.dtypes import dtype_of
from fakes.ascend.int8 import quantize_rows
from fakes.ascend.limits import Soc, require, require_modelled, require_soc
from fakes.ascend.registry import implements
from fakes.ascend.undefined import has_values

DYNAMIC_QUANT = "npu_dynamic_quant"


@implements(DYNAMIC_QUANT, "CPU", "Meta")
def dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of the rows.

    Args:
        input: [..., H], float16 or bfloat16, two dimensions at least.
        smooth_scales: [H], dtype of input, multiplies the rows first, in float32; with group_index
            [E, H], a line of it for each group of rows.
        group_index: [E], int32, the rising ends of the groups; the last is the number of rows.
        dst_type: number of int8, or None for the same; other dtypes are not modelled.
        quant_mode: "pertoken"; other modes are not modelled.
        dst_type_max: not modelled.

    Returns:
        codes [..., H], int8; scales [...], float32.
    """
    require_modelled(DYNAMIC_QUANT, quant_mode == "pertoken", f"quant_mode={quant_mode!r}")
    require_modelled(DYNAMIC_QUANT, dst_type_max == 0.0, f"dst_type_max={dst_type_max}")
    dst_dtype = torch.int8 if dst_type is None else dtype_of(DYNAMIC_QUANT, dst_type)
    if dst_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        require_soc(DYNAMIC_QUANT, f"dst_type={dst_dtype}", Soc.A5)
    require_modelled(DYNAMIC_QUANT, dst_dtype == torch.int8, f"dst_type={dst_dtype}")
    require(
        DYNAMIC_QUANT,
        input.dim() >= 2 and input.dtype in (torch.float16, torch.bfloat16),
        f"input is {list(input.shape)} {input.dtype}, expected [..., H] float16 or bfloat16",
    )
    rows = input.flatten(0, -2).float()
    if smooth_scales is not None:
        rows = rows * _smooth_rows(input, smooth_scales, group_index)
    else:
        require(DYNAMIC_QUANT, group_index is None, "group_index comes without smooth_scales")
    codes, scales = quantize_rows(rows, Int8Profile.DIV)
    return codes.view(input.shape), scales.view(input.shape[:-1])


def _smooth_rows(input: Tensor, smooth_scales: Tensor, group_index: Tensor | None) -> Tensor:
    """Return the factors of each row, [R, H] or [H], float32."""
    num_groups = [] if group_index is None else list(group_index.shape)
    expected = [*num_groups, input.shape[-1]]
    require(
        DYNAMIC_QUANT,
        smooth_scales.dtype == input.dtype and list(smooth_scales.shape) == expected,
        f"smooth_scales is {list(smooth_scales.shape)} {smooth_scales.dtype}, expected {expected} "
        f"{input.dtype}, as input",
    )
    if group_index is None:
        return smooth_scales.float()
    require_soc(DYNAMIC_QUANT, "group_index", Soc.A2, Soc.A3)
    num_rows = input.numel() // input.shape[-1]
    is_list = group_index.dim() == 1 and group_index.dtype == torch.int32
    rule = f"group_index is int32 [E], got {group_index.dtype} {num_groups}"
    require(DYNAMIC_QUANT, is_list, rule)
    if not has_values(group_index):
        return smooth_scales.new_empty(num_rows, input.shape[-1], dtype=torch.float32)
    sizes = group_index.diff(prepend=group_index.new_zeros(1))
    require(
        DYNAMIC_QUANT,
        bool((sizes >= 0).all()) and int(sizes.sum()) == num_rows,
        f"group_index is {group_index.tolist()}, expected rising ends of the groups, the last "
        f"{num_rows}, the rows",
    )
    return smooth_scales.float().repeat_interleave(sizes.long(), dim=0)
