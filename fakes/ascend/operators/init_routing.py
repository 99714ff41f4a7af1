"""Imitate the initial routing: copies of tokens sorted by expert, with counts and positions.

Source: the operator's documentation and shape kernel. Only the unambiguous parts are imitated:
    every row (no capacity), no quantisation or INT8 by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.types import Int8Profile
from fakes.ascend.int8 import quantize_rows
from fakes.ascend.limits import Soc, require, require_modelled, require_size, require_soc
from fakes.ascend.registry import implements
from fakes.ascend.undefined import has_values, undefined

INIT_ROUTING = "npu_moe_init_routing_v2"

NO_QUANTISATION = -1
INT8_PER_TOKEN = 1
# MXFP8 e5m2 and e4m3, MXFP4.
MX_MODES = (2, 3, 9)
CUMULATIVE, COUNTS, PAIRS = 0, 1, 2

MAX_EXPERTS = 10240
# The limit of the kernel that writes pairs.
MAX_EXPERTS_OF_PAIRS = 5120


@dataclass(frozen=True, kw_only=True)
class _Sorted:
    """The copies of active experts, ordered by expert, then token, then choice.

    copies: [A], int64, t * K + k.
    counts: [E_active], int64.
    first_expert: id of the first active expert.
    """

    copies: Tensor
    counts: Tensor
    first_expert: int


@implements(INIT_ROUTING, "CPU", "Meta")
def moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows of the active experts, sorted by expert, then token.

    Args:
        x: [n, H], float16, bfloat16, float32; int8 without quantisation.
        expert_idx: [n, K], int32, 0 <= id < expert_num.
        scale: [n], float32, a factor that is moved with its token, except for INT8 rows; smoothing
            factors of quantisation are not modelled.
        offset: not modelled.
        active_num: n * K; -1 means the same; fewer rows are not modelled.
        expert_capacity: not read without a capacity.
        expert_num: E.
        drop_pad_mode: 0; 1 (a capacity) is not modelled.
        expert_tokens_num_type: 0 inclusive cumulative sums, 1 counts, 2 (expert, count) pairs of
            the experts that got rows.
        expert_tokens_num_flag: True; without, the vendor's shape function and host code disagree.
        quant_mode: -1 none, 1 INT8 with a scale a row; the others are not modelled.
        active_expert_range: [first, one past the last]; none: all.
        row_idx_type: 0: the row of each copy, or -1; 1: the copy of each row.
        x_dtype: not modelled.

    Returns:
        expanded_x [n * K, H], dtype of x or int8, unwritten after the active rows; row indices [n *
        K], int32, with type 1 unwritten after the active rows; tokens [E_active] or, as pairs, [E,
        2] with an unwritten tail, int64; scales [n * K], float32, unwritten after the active rows,
        without scale, and for INT8 x.
    """
    _check_modelled(quant_mode, drop_pad_mode, x_dtype, offset)
    require_modelled(INIT_ROUTING, expert_tokens_num_flag, "expert_tokens_num_flag=False")
    _check_tensors(x, expert_idx, scale, quant_mode)
    _check_experts(expert_idx, expert_num, active_expert_range, expert_tokens_num_type)
    require(INIT_ROUTING, row_idx_type in (0, 1), f"row_idx_type is {row_idx_type}, expected 0, 1")
    num_copies = expert_idx.numel()
    rule = f"active_num={active_num} beside {num_copies}, all rows,"
    require_modelled(INIT_ROUTING, active_num in (-1, num_copies), rule)
    first, last = active_expert_range or (0, expert_num)
    if not has_values(x):
        is_pairs, is_int8 = expert_tokens_num_type == PAIRS, quant_mode == INT8_PER_TOKEN
        return (
            x.new_empty(num_copies, x.shape[1], dtype=torch.int8 if is_int8 else x.dtype),
            x.new_empty(num_copies, dtype=torch.int32),
            x.new_empty([expert_num, 2] if is_pairs else [last - first], dtype=torch.int64),
            x.new_empty(num_copies, dtype=torch.float32),
        )
    found = _sort(expert_idx, first, last)
    num_active = len(found.copies)
    tokens = found.copies // max(1, expert_idx.shape[1])
    expanded_scale = undefined([num_copies], torch.float32)
    if quant_mode == INT8_PER_TOKEN:
        rows, expanded_scale[:num_active] = quantize_rows(x[tokens], Int8Profile.DIVTRUNC16)
    else:
        rows = x[tokens]
        if scale is not None and x.dtype != torch.int8:
            expanded_scale[:num_active] = scale[tokens]
    expanded_x = undefined([num_copies, x.shape[1]], rows.dtype)
    expanded_x[:num_active] = rows
    return (
        expanded_x,
        _row_indices(found.copies, num_copies, row_idx_type),
        _token_numbers(found, expert_num, expert_tokens_num_type),
        expanded_scale,
    )


def _sort(expert_idx: Tensor, first: int, last: int) -> _Sorted:
    ids = expert_idx.flatten().long()
    is_active = (ids >= first) & (ids < last)
    # Stable: copies of one expert stay in the order of their tokens.
    order = ids.masked_fill(~is_active, last).argsort(stable=True)
    return _Sorted(
        copies=order[: int(is_active.sum())],
        counts=torch.bincount(ids[is_active] - first, minlength=last - first),
        first_expert=first,
    )


def _row_indices(copies: Tensor, num_copies: int, row_idx_type: int) -> Tensor:
    if row_idx_type == 0:
        indices = torch.full([num_copies], -1, dtype=torch.int32)
        indices[copies] = torch.arange(len(copies), dtype=torch.int32)
    else:
        indices = undefined([num_copies], torch.int32)
        indices[: len(copies)] = copies.int()
    return indices


def _token_numbers(found: _Sorted, expert_num: int, kind: int) -> Tensor:
    if kind == CUMULATIVE:
        return found.counts.cumsum(0)
    if kind == COUNTS:
        return found.counts
    (experts,) = torch.nonzero(found.counts, as_tuple=True)
    pairs = undefined([expert_num, 2], torch.int64)
    pairs[: len(experts), 0] = experts + found.first_expert
    pairs[: len(experts), 1] = found.counts[experts]
    return pairs


def _check_modelled(
    quant_mode: int, drop_pad_mode: int, x_dtype: int | None, offset: Tensor | None
) -> None:
    if quant_mode in MX_MODES:
        require_soc(INIT_ROUTING, f"quant_mode={quant_mode}", Soc.A5)
    for is_modelled, feature in (
        (quant_mode in (NO_QUANTISATION, INT8_PER_TOKEN), f"quant_mode={quant_mode}"),
        (drop_pad_mode == 0, f"drop_pad_mode={drop_pad_mode}"),
        (x_dtype is None, f"x_dtype={x_dtype}"),
        (offset is None, "offset"),
    ):
        require_modelled(INIT_ROUTING, is_modelled, feature)


def _check_tensors(x: Tensor, expert_idx: Tensor, scale: Tensor | None, quant_mode: int) -> None:
    allowed = [torch.float16, torch.bfloat16, torch.float32]
    if quant_mode == NO_QUANTISATION:
        allowed.append(torch.int8)
    rule = f"x is {list(x.shape)} {x.dtype}, expected [n, H] of {', '.join(map(str, allowed))}"
    require(INIT_ROUTING, x.dim() == 2 and x.dtype in allowed, rule)
    fits = expert_idx.dim() == 2 and len(expert_idx) == len(x) and expert_idx.dtype == torch.int32
    found = f"{list(expert_idx.shape)} {expert_idx.dtype}"
    require(INIT_ROUTING, fits, f"expert_idx is {found}, expected [{len(x)}, K] int32")
    if scale is None:
        return
    require_modelled(INIT_ROUTING, quant_mode == NO_QUANTISATION, "scale of quantisation")
    rule = f"scale is {list(scale.shape)} {scale.dtype}, expected [{len(x)}] float32"
    require(INIT_ROUTING, scale.dtype == torch.float32 and scale.shape == x.shape[:1], rule)


def _check_experts(
    expert_idx: Tensor, expert_num: int, active_range: Sequence[int], kind: int
) -> None:
    require(INIT_ROUTING, expert_num >= 1, f"expert_num is {expert_num}, expected 1 at least")
    rule = f"expert_tokens_num_type is {kind}, expected 0, 1 or 2"
    require(INIT_ROUTING, kind in (CUMULATIVE, COUNTS, PAIRS), rule)
    first, last = active_range or (0, expert_num)
    require(
        INIT_ROUTING,
        0 <= first < last <= expert_num,
        f"active_expert_range is [{first}, {last}], expected a rising one within [0, {expert_num}]",
    )
    is_outside = (expert_idx < 0) | (expert_idx >= expert_num)
    rule = f"expert_idx holds ids outside 0 to {expert_num - 1}, expert_num - 1"
    require(INIT_ROUTING, not (has_values(expert_idx) and is_outside.any()), rule)
    maximum = MAX_EXPERTS_OF_PAIRS if kind == PAIRS else MAX_EXPERTS
    rule = f"expert_num is {expert_num}, expected {maximum} at most"
    require_size(INIT_ROUTING, expert_num <= maximum, rule)
