"""Imitate the final routing: the sum of a token's rows, which are sorted by expert.

Source: the operator's documentation. Sums are float32, in the order of a token's experts, rounded
once.
"""

import torch
from torch import Tensor

from fakes.ascend.limits import require, require_modelled
from fakes.ascend.registry import implements
from fakes.ascend.undefined import has_values

FINALIZE = "npu_moe_finalize_routing"

# Modes of finalize_routing in which the index of token t, choice k, is k * n + t instead of t * K
# + k.
BY_CHOICE = (0, 1)
# Rows are [E, C, H], and -1 is the position of a dropped copy.
WITH_CAPACITY = (1, 3)


@implements(FINALIZE, "CPU", "Meta")
def moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """Return skip1 + skip2 + the sum over a token's experts of scale * (row + bias of the expert).

    Args:
        expanded_permuted_rows: [n * K, H]; in modes 1 and 3 [E, C, H], E at least K.
        skip1: [n, H].
        skip2: [n, H]; only with skip1.
        bias: [E, H].
        scales: [n, K], dtype of the rows or, for bfloat16, float32; without it K is 1.
        expanded_src_to_dst_row: [n * K], int32, the position of each copy; its order depends on the
            mode; -1 in modes 1 and 3 is a row of zeros, and refused in modes 0 and 2.
        export_for_source_row: [n, K], int32, the experts; only the bias needs it.
        drop_pad_mode: 0 to 3.
        k: K without scales; only 1 is modelled.

    Returns:
        [n, H], dtype of the rows.
    """
    mode = drop_pad_mode or 0
    require(FINALIZE, mode in range(4), f"drop_pad_mode is {mode}, expected 0 to 3")
    require(FINALIZE, skip1 is not None or skip2 is None, "skip2 comes without skip1")
    require_modelled(FINALIZE, scales is not None or k in (None, 1), f"k={k} without scales")
    num_dimensions = 3 if mode in WITH_CAPACITY else 2
    require(
        FINALIZE,
        expanded_permuted_rows.dim() == num_dimensions,
        f"expanded_permuted_rows is {list(expanded_permuted_rows.shape)}, expected "
        f"{num_dimensions} dimensions in drop_pad_mode {mode}",
    )
    rows = expanded_permuted_rows.flatten(0, -2)
    positions = expanded_src_to_dst_row
    weights = positions.new_ones(positions.numel(), 1) if scales is None else scales
    require(
        FINALIZE,
        positions.dim() == 1
        and positions.dtype == torch.int32
        and weights.numel() == positions.numel(),
        f"expanded_src_to_dst_row is {list(positions.shape)} {positions.dtype}, expected "
        f"[{weights.numel()}] int32, one for each of scales",
    )
    is_mixed = rows.dtype == torch.bfloat16 and weights.dtype == torch.float32
    require(
        FINALIZE,
        scales is None or is_mixed or weights.dtype == rows.dtype,
        f"scales are {weights.dtype} beside rows of {rows.dtype}, expected the same or float32 "
        "beside bfloat16",
    )
    num_places, num_choices = expanded_permuted_rows.shape[0], weights.shape[1]
    if mode in WITH_CAPACITY:
        rule = f"expanded_permuted_rows has {num_places} experts, expected {num_choices} at least"
        require(FINALIZE, num_places >= num_choices, rule)
    else:
        rule = f"expanded_permuted_rows has {num_places} rows, expected {positions.numel()}"
        require(FINALIZE, num_places == positions.numel(), rule)
    lowest = -1 if mode in WITH_CAPACITY else 0
    _check_range(f"expanded_src_to_dst_row ({mode=})", positions, lowest, len(rows))
    num_tokens, num_choices = weights.shape
    if mode in BY_CHOICE:
        index_of = positions.view(num_choices, num_tokens).T
    else:
        index_of = positions.view(num_tokens, num_choices)
    experts = export_for_source_row
    require(FINALIZE, bias is None or experts is not None, "bias without export_for_source_row")
    total = rows.new_zeros(num_tokens, rows.shape[1], dtype=torch.float32)
    for skip in (skip1, skip2):
        if skip is not None:
            total += skip.float()
    for choice in range(num_choices):
        index = index_of[:, choice].long()
        addends = rows[index.clamp(min=0)].float().masked_fill((index < 0).unsqueeze(1), 0.0)
        if bias is not None and experts is not None:
            addends += bias[experts[:, choice].long()].float()
        total += addends * weights[:, choice : choice + 1].float()
    return total.to(rows.dtype)


def _check_range(name: str, indices: Tensor, lowest: int, end: int) -> None:
    """Refuse indices outside a range, which would read other memory on the device."""
    if not has_values(indices):
        return
    is_outside = (indices < lowest) | (indices >= end)
    rule = f"{name} holds {indices[is_outside][:1].tolist()}, expected {lowest} to {end - 1}"
    require(FINALIZE, not is_outside.any(), rule)
