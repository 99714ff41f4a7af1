"""Shapes and dtypes of results, for tensors without memory (device "meta") and fake tensors.

Nothing is checked, as in the vendor's own shape functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epcomm.testing.ascend import dynamic_quant, gating, init_routing, permute
from epcomm.testing.ascend.registry import implements


@implements(gating.GATING, "Meta")
def moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """See gating.py."""
    chosen = (x.shape[0], k)
    return (
        x.new_empty(chosen),
        x.new_empty(chosen, dtype=torch.int32),
        x.new_empty(x.shape, dtype=torch.float32),
    )


@implements(gating.GATING_SOFTMAX, "Meta")
def moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """See gating.py."""
    chosen = (*x.shape[:-1], k)
    return (
        x.new_empty(chosen),
        x.new_empty(chosen, dtype=torch.int32),
        x.new_empty(chosen, dtype=torch.int32),
    )


@implements(init_routing.INIT_ROUTING, "Meta")
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
    """See init_routing.py."""
    num_copies = expert_idx.numel()
    first, last = active_expert_range or (0, expert_num)
    is_int8 = quant_mode == init_routing.INT8_PER_TOKEN
    if not expert_tokens_num_flag:
        numbers = []
    elif expert_tokens_num_type == init_routing.PAIRS:
        numbers = [expert_num, 2]
    else:
        numbers = [last - first]
    return (
        x.new_empty((num_copies, x.shape[1]), dtype=torch.int8 if is_int8 else x.dtype),
        x.new_empty(num_copies, dtype=torch.int32),
        x.new_empty(numbers, dtype=torch.int64),
        x.new_empty(num_copies, dtype=torch.float32),
    )


@implements(permute.PERMUTE, "Meta")
def moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """See permute.py."""
    num_copies = indices.numel()
    return (
        tokens.new_empty(num_copies, tokens.shape[1]),
        tokens.new_empty(num_copies, dtype=torch.int32),
    )


@implements(permute.UNPERMUTE, "Meta")
def moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """See permute.py."""
    num_tokens = sorted_indices.numel() if probs is None else probs.shape[0]
    return permuted_tokens.new_empty(num_tokens, permuted_tokens.shape[1])


@implements(permute.FINALIZE, "Meta")
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
    """See permute.py."""
    num_tokens = expanded_src_to_dst_row.numel() if scales is None else scales.shape[0]
    return expanded_permuted_rows.new_empty(num_tokens, expanded_permuted_rows.shape[-1])


@implements(dynamic_quant.DYNAMIC_QUANT, "Meta")
def dynamic_quantise(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """See dynamic_quant.py."""
    return (
        input.new_empty(input.shape, dtype=torch.int8),
        input.new_empty(input.shape[:-1], dtype=torch.float32),
    )
