"""npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2 over CPU ranks.

Ranks of shared experts, tensor parallelism, and experts that are no experts (zero, copy, constant)
are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epcomm.testing.ascend import exchange
from epcomm.testing.ascend.communicators import group_of
from epcomm.testing.ascend.int8 import quantize_rows
from epcomm.testing.ascend.limits import (
    Soc,
    current_machine,
    require,
    require_modelled,
)
from epcomm.testing.ascend.registry import implements
from epcomm.testing.ascend.sizes import require_size
from epcomm.testing.ascend.undefined import undefined, undefined_value
from epcomm.testing.ascend.windows import low_latency_bytes, require_window
from epcomm.types import Int8Profile

DISPATCH = "npu_moe_distribute_dispatch_v2"
COMBINE = "npu_moe_distribute_combine_v2"

# quant_mode.
PLAIN, PER_TOKEN = 0, 2
# expert_token_nums_type.
PREFIX, COUNTS = 0, 1
# int32 of assist_info a row; what they mean is the operators' own.
_ASSIST = 128
_WINDOW = ("HCCL_BUFFSIZE",)


@implements(DISPATCH)
def distribute_dispatch_v2(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    elastic_info: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
    y_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Send each token to its experts, one row for each.

    Args:
        x: [T, H], bfloat16 or float16.
        expert_ids: [T, K], int32, the ids of a row all different.
        group_ep: see communicators.py.
        scales: [E, H], float32, with quant_mode 2: each row is multiplied by its expert's first.
        x_active_mask: bool [T], true ones first, or [T, K]: what is not active is not sent.
        expert_scales: [T, K], float32; read by hierarchical communication alone.
        shared_expert_num: 0 or 1; with shared_expert_rank_num 0 neither means an expert.
        quant_mode: 0, or 2 for INT8 with a scale a token (rint127).
        global_bs: most tokens of a rank times ranks, or 0 where all ranks have the same number.
        expert_token_nums_type: 0 inclusive sums, 1 counts.

    Returns:
        expand_x [A, H], with A = global_bs * min(K, L), by (local expert, source, token);
        dynamic_scales float32 [A], written with quant_mode 2; assist_info int32 [A * 128];
        expert_token_nums int64 [L]; ep_recv_counts int32 [E]; tp_recv_counts int32 [1] and
        expand_scales float32 [A], not written. What is behind the rows is not written either.

    Collective over the group.
    Source: documented arithmetic of the operator; not checked on an NPU.
    """
    del performance_info, tp_rank_id, expert_scales
    foreign = (elastic_info, y_dtype, x_dtype, scales_dtype)
    _require_plain(DISPATCH, foreign, tp_world_size, expert_shard_type, shared_expert_rank_num)
    _require_experts(DISPATCH, zero_expert_num, copy_expert_num, const_expert_num)
    require_modelled(DISPATCH, not group_tp, "group_tp")
    group = group_of(DISPATCH, group_ep)

    def check() -> Sequence[int]:
        _check_world(DISPATCH, group.size(), group.rank(), ep_world_size, ep_rank_id)
        _check_tokens(DISPATCH, x, expert_ids, moe_expert_num, ep_world_size)
        require(DISPATCH, x.dtype in (torch.bfloat16, torch.float16), "x is bfloat16 or float16")
        require(DISPATCH, shared_expert_num in (0, 1), "shared_expert_num in [0, 1]")
        require(DISPATCH, quant_mode in (PLAIN, PER_TOKEN), f"quant_mode is {quant_mode}")
        require(DISPATCH, scales is None or quant_mode == PER_TOKEN, "scales need quant_mode 2")
        require(DISPATCH, expert_token_nums_type in (PREFIX, COUNTS), "expert_token_nums_type")
        _active_ids(expert_ids, x_active_mask)
        max_tokens = _max_tokens(DISPATCH, x.shape[0], global_bs, ep_world_size)
        _check_sizes(DISPATCH, x, expert_ids, moe_expert_num, ep_world_size, max_tokens, comm_alg)
        # With global_bs 0 the tokens of this rank stand for those of all.
        return [x.shape[1], expert_ids.shape[1], moe_expert_num, quant_mode, max_tokens]

    exchange.agree(group, DISPATCH, check)
    num_topk, num_local = expert_ids.shape[1], moe_expert_num // ep_world_size
    num_rows = max(x.shape[0] * ep_world_size, global_bs) * min(num_topk, num_local)
    pairs = exchange.pairs_of(_active_ids(expert_ids, x_active_mask), moe_expert_num)
    rows, row_scales = x[pairs.tokens], None
    if quant_mode == PER_TOKEN:
        wide = rows.float() if scales is None else rows.float() * scales[pairs.experts()]
        rows, row_scales = quantize_rows(wide, Int8Profile.RINT127)
    received = exchange.send(group, pairs, rows, row_scales)
    written = undefined([0], torch.float32) if received.scales is None else received.scales
    triples = received.triples.flatten()
    nums = received.per_expert()
    return (
        exchange.rows_then_undefined(received.rows, num_rows),
        exchange.rows_then_undefined(written, num_rows),
        exchange.rows_then_undefined(triples, num_rows * _ASSIST),
        nums.cumsum(0) if expert_token_nums_type == PREFIX else nums,
        received.prefix(),
        undefined([1], torch.int32),
        undefined([num_rows], torch.float32),
    )


@implements(COMBINE)
def distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    elastic_info: Tensor | None = None,
    ori_x: Tensor | None = None,
    const_expert_alpha_1: Tensor | None = None,
    const_expert_alpha_2: Tensor | None = None,
    const_expert_v: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> Tensor:
    """Bring rows home and sum them by expert_scales, in float32, in the order of a token's ids.

    Args:
        expand_x: [A, H], bfloat16 or float16, rows as dispatch gave them.
        expert_ids, x_active_mask, global_bs: those of the dispatch.
        assist_info_for_combine, ep_send_counts: assist_info and ep_recv_counts of the dispatch.
        expert_scales: [T, K], float32.
        tp_send_counts, expand_scales: of the dispatch; not read.

    Returns:
        [T, H], dtype of expand_x. A token that is not active has an undefined row.

    Collective over the group.
    Source: documented arithmetic of the operator; not checked on an NPU.
    """
    del tp_send_counts, expand_scales, performance_info, tp_rank_id, shared_expert_num, comm_alg
    foreign = (
        *(shared_expert_x, elastic_info, ori_x),
        *(const_expert_alpha_1, const_expert_alpha_2, const_expert_v),
    )
    _require_plain(COMBINE, foreign, tp_world_size, expert_shard_type, shared_expert_rank_num)
    _require_experts(COMBINE, zero_expert_num, copy_expert_num, const_expert_num)
    require_modelled(COMBINE, not group_tp and comm_quant_mode == 0, "group_tp, comm_quant_mode")
    group = group_of(COMBINE, group_ep)

    def check() -> Sequence[int]:
        _check_world(COMBINE, group.size(), group.rank(), ep_world_size, ep_rank_id)
        _check_tokens(COMBINE, expand_x, expert_ids, moe_expert_num, ep_world_size, rows=False)
        num_topk, num_tokens = expert_ids.shape[1], expert_ids.shape[0]
        fits = list(expert_scales.shape) == [num_tokens, num_topk]
        fits = fits and expert_scales.dtype == torch.float32
        require(COMBINE, fits, f"expert_scales is float32 [{num_tokens}, {num_topk}]")
        fits = list(ep_send_counts.shape) == [moe_expert_num]
        require(COMBINE, fits, f"ep_send_counts has {moe_expert_num} elements")
        num_rows = assist_info_for_combine.numel() // _ASSIST
        require(COMBINE, expand_x.shape[0] == num_rows, f"expand_x has {num_rows} rows")
        _active_ids(expert_ids, x_active_mask)
        max_tokens = _max_tokens(COMBINE, num_tokens, global_bs, ep_world_size)
        triples = assist_info_for_combine[: 3 * num_rows].view(-1, 3)
        exchange.require_written(COMBINE, ep_send_counts, triples, ep_world_size)
        return [expand_x.shape[1], num_topk, moe_expert_num, max_tokens]

    exchange.agree(group, COMBINE, check)
    counts = exchange.counts_of(ep_send_counts, ep_world_size)
    ids = _active_ids(expert_ids, x_active_mask)
    rows = expand_x[: int(counts.sum())]
    combined = exchange.combine(group, COMBINE, rows, counts, ids, expert_scales)
    if x_active_mask is not None:
        is_active = x_active_mask if x_active_mask.dim() == 1 else x_active_mask.any(1)
        combined[~is_active] = undefined_value(combined.dtype)
    return combined


def _require_plain(
    operator: str,
    foreign: Sequence[object],
    tp_world_size: int,
    expert_shard_type: int,
    shared_expert_rank_num: int,
) -> None:
    is_plain = all(value is None for value in foreign)
    require_modelled(operator, is_plain, "elastic_info, shared_expert_x, or another dtype")
    require_modelled(operator, tp_world_size <= 1, f"tp_world_size={tp_world_size}")
    require_modelled(operator, expert_shard_type == 0, f"expert_shard_type={expert_shard_type}")
    is_plain = shared_expert_rank_num == 0
    require_modelled(operator, is_plain, f"shared_expert_rank_num={shared_expert_rank_num}")


def _require_experts(operator: str, *numbers: int) -> None:
    require_modelled(operator, not any(numbers), "zero, copy and constant experts")


def _check_world(operator: str, size: int, rank: int, world_size: int, rank_id: int) -> None:
    rule = f"ep_world_size, ep_rank_id are {size}, {rank}, got {world_size}, {rank_id}"
    require(operator, (size, rank) == (world_size, rank_id), rule)


def _check_tokens(
    operator: str, x: Tensor, ids: Tensor, num_experts: int, num_ranks: int, *, rows: bool = True
) -> None:
    require(operator, x.dim() == 2 and x.is_contiguous(), "x is 2-D and contiguous")
    fits = ids.dim() == 2 and (not rows or ids.shape[0] == x.shape[0])
    require(operator, fits, f"expert_ids is [T, K], got {list(ids.shape)}")
    require(operator, ids.dtype == torch.int32, f"expert_ids is int32, got {ids.dtype}")
    require(operator, num_experts % num_ranks == 0, "moe_expert_num % ep_world_size == 0")
    exchange.require_ids(operator, ids, num_experts, allow_none=False)


def _max_tokens(operator: str, num_tokens: int, global_bs: int, num_ranks: int) -> int:
    if global_bs == 0:
        return num_tokens
    require(operator, global_bs % num_ranks == 0, "global_bs % ep_world_size == 0")
    max_tokens = global_bs // num_ranks
    require(operator, num_tokens <= max_tokens, f"{num_tokens} tokens, of {max_tokens} at most")
    return max_tokens


def _check_sizes(
    operator: str,
    x: Tensor,
    ids: Tensor,
    num_experts: int,
    num_ranks: int,
    max_tokens: int,
    comm_alg: str,
) -> None:
    hidden_size, num_topk = x.shape[1], ids.shape[1]
    is_a2 = current_machine().soc is Soc.A2
    is_other = comm_alg in ("fullmesh_v2", "hierarchy")
    limit = 256 if is_a2 or is_other else 512
    require_size(operator, 1 <= max_tokens <= limit, f"1 to {limit} tokens, got {max_tokens}")
    limit = 12 if comm_alg == "fullmesh_v2" else 16
    require_size(operator, 1 <= num_topk <= limit, f"K is 1 to {limit}, got {num_topk}")
    limit = 7168 if is_a2 else 8192
    fits = 1024 <= hidden_size <= limit and (not is_a2 or hidden_size % 32 == 0)
    require_size(operator, fits, f"H is 1024 to {limit} (A2: by 32), got {hidden_size}")
    fits = 2 <= num_ranks <= 768 and num_experts <= 2048
    require_size(operator, fits, "2 to 768 ranks, local experts * ranks <= 2048")
    needed = low_latency_bytes(max_tokens, num_topk, hidden_size, num_experts, overhead=64)
    require_window(operator, needed, _WINDOW)


def _active_ids(ids: Tensor, mask: Tensor | None) -> Tensor:
    """int64 [T, K], -1 where the mask has no."""
    ids = ids.to(torch.int64)
    if mask is None:
        return ids
    fits = mask.dtype == torch.bool and mask.shape in (ids.shape, ids.shape[:1])
    require(DISPATCH, fits, "x_active_mask is bool [T] or [T, K]")
    if mask.dim() == 1:
        is_first = not bool((mask[1:] & ~mask[:-1]).any())
        require(DISPATCH, is_first, "x_active_mask [T] has its true ones first")
        mask = mask[:, None]
    return ids.masked_fill(~mask, -1)
