"""Route tokens in one launch: a program of one warp chooses the experts of one token or of a few.

All experts of a token are in registers. Scores become integers in the same order, so that a
maximum over the warp is one instruction of the GPU; K rounds of a maximum and of the lowest expert
that has it give the top k, ties and NaN included. Weights are computed again from the K logits that
were chosen, which are in the cache. Programs count the load and choose replicas as they store.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import EXACT, IS_INTERPRETED, next_power_of_two
from epcomm.kernels.nvlink.common.dependent_launch import (
    await_previous,
    let_next_start,
    overlapping,
)
from epcomm.kernels.prepared import launch
from epcomm.kernels.routing.scores import adjust_logits, exp_up_to_20, score_logits
from epcomm.kernels.rows.tiles import row_stride
from epcomm.records import ReplicaTable

# Largest K for which the loop over rounds is unrolled.
_UNROLLED = tl.constexpr(8)

# Experts of a program, 4 a thread, over as many tokens as fit. The interpreter takes as long for
# many experts as for one.
_LANES, _INTERPRETED_LANES = 128, 2**14

# Launches of at most this many programs overlap the kernel before them. On an H200 that saves 0.5
# us with 128 programs. 4096 programs fill the GPU, and those that wait slow down the others, by 1.8
# us with 128 experts. Numbers in between were not measured.
_MAX_EARLY_PROGRAMS = 1024

# Keys below those of all scores: of NaN, which ranks last, and of lanes without a free expert.
_NAN_KEY, _TAKEN = tl.constexpr(-(2**31) + 1), tl.constexpr(-(2**31))
_NOWHERE = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class GateForm:
    """The constants of a gate, named as the fields of RoutingSpec.

    score: softmax, sigmoid, sqrt_softplus, or logit where softmax comes after top-k.
    bias: none, selection or score.   epsilon_mode: none, added or clamp.
    fills_zero: experts of dropped groups have the score 0, not -inf.
    group_top_n: experts whose scores a group adds up.   renormalizes: divide by the selected sum.
    """

    num_experts: int
    top_k: int
    score: str
    bias: str
    softcap: float | None
    num_groups: int
    topk_groups: int
    group_top_n: int
    fills_zero: bool
    renormalizes: bool
    epsilon_mode: str
    epsilon: float
    scale: float


@triton.jit
def _key_of(scores: tl.tensor) -> tl.tensor:
    """Return integers in the order of float32 scores, with NaN below all, and one zero."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(scores == scores, keys, _NAN_KEY)


@triton.jit
def _take_best(keys: tl.tensor, codes: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the lowest code of the largest key along axis 1, and the keys without it."""
    best = tl.max(keys, 1, keep_dims=True)
    code = tl.min(tl.where(keys == best, codes, _NOWHERE), 1, keep_dims=True)
    return code, tl.where(codes == code, _TAKEN, keys)


@triton.jit
def _groups_kept(
    scores: tl.tensor,
    TOKENS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    MEMBER_LANES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP_N: tl.constexpr,
) -> tl.tensor:
    """Return whether the group of each expert is among the best by the sum of its best scores.

    Scores 3 1 | 2 2 | 0 1 with TOP_N = 2 give 4, 4, 1; of TOPK_GROUPS = 1 the first is kept.
    """
    left = tl.where(scores == scores, scores, float("-inf"))
    left = tl.reshape(left, [TOKENS, GROUP_LANES, MEMBER_LANES])
    member = tl.arange(0, MEMBER_LANES)[None, None, :]
    best = tl.max(left, 2, keep_dims=True)
    sums = best
    for _ in range(TOP_N - 1):
        # Remove only one of equal scores.
        place = tl.min(tl.where(left == best, member, _NOWHERE), 2, keep_dims=True)
        left = tl.where(member == place, float("-inf"), left)
        best = tl.max(left, 2, keep_dims=True)
        sums += best
    group = tl.arange(0, GROUP_LANES)[None, :, None]
    keys = tl.where(group < NUM_GROUPS, _key_of(sums), _TAKEN)
    is_kept = keys < _TAKEN
    for _ in range(TOPK_GROUPS):
        taken, keys = _take_best(keys, group)
        is_kept = is_kept | (group == taken)
    is_kept = tl.broadcast_to(is_kept, [TOKENS, GROUP_LANES, MEMBER_LANES])
    return tl.reshape(is_kept, scores.shape)


@triton.jit
def _select(keys: tl.tensor, codes: tl.tensor, TOKENS: tl.constexpr, K: tl.constexpr) -> tl.tensor:
    """Return the codes of the K largest keys of each token, the largest first."""
    k = tl.arange(0, triton.next_power_of_2(K))[None, :]
    chosen = tl.zeros([TOKENS, k.shape[1]], tl.int32)
    if K <= _UNROLLED:
        for each in tl.static_range(K):
            code, keys = _take_best(keys, codes)
            chosen = tl.where(k == each, code, chosen)
    else:
        for each in range(K):
            code, keys = _take_best(keys, codes)
            chosen = tl.where(k == each, code, chosen)
    return chosen


@triton.jit
def _softmax_parts(logits: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return what softmax subtracts and divides by; exp is 0 everywhere if all logits are -inf."""
    top = tl.max(logits, 1, keep_dims=True)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(exp_up_to_20(logits - top), 1, keep_dims=True)
    return top, tl.where(total == 0.0, 1.0, total)


@triton.jit
def _softmax_of(logits: tl.tensor, top: tl.tensor, total: tl.tensor) -> tl.tensor:
    return tl.div_rn(exp_up_to_20(logits - top), tl.broadcast_to(total, logits.shape))


@triton.jit
def _renormalize(
    weights: tl.tensor, EPSILON_MODE: tl.constexpr, EPSILON: tl.constexpr
) -> tl.tensor:
    total = tl.sum(weights, 1, keep_dims=True)
    if EPSILON_MODE == "added":
        total += EPSILON
    elif EPSILON_MODE == "clamp":
        total = tl.maximum(total, EPSILON)
    total = tl.where(total == 0.0, 1.0, total)
    return tl.div_rn(weights, tl.broadcast_to(total, weights.shape))


@triton.jit
def _choose_replicas(
    experts: tl.tensor,
    is_chosen: tl.tensor,
    number: tl.tensor,
    replicas_ptr: tl.tensor,
    num_replicas_ptr: tl.tensor,
    REPLICAS: tl.constexpr,
) -> tl.tensor:
    """Return the physical id of each logical expert, -1 where it is nowhere.

    Number 4 of an expert with the replicas 2, 9, 5 is 9.
    """
    found = tl.load(num_replicas_ptr + experts, mask=is_chosen, other=0)
    place = number % tl.maximum(found, 1)
    return tl.load(replicas_ptr + experts * REPLICAS + place, mask=found > 0, other=-1)


@triton.jit
def _count_call(calls_ptr: tl.tensor, calls: tl.tensor) -> None:
    """Add 2**32 to the calls in as many parts as there are programs: the first makes up the rest.

    calls: what this program has read. The number of the call, in the upper bits, changes when all
        programs have added their part, which each does when it has read: so all read the same.
    """
    rest = (1 << 32) - (tl.num_programs(0) - 1).to(tl.int64)
    part = tl.where(tl.program_id(0) == 0, rest, 1)
    # The sum is never negative. The dependence on what was read orders the relaxed addition after
    # the load.
    tl.atomic_add(calls_ptr, tl.where(calls < 0, 0, part), sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens", "first"])
def _route_tokens_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor | None,
    load_ptr: tl.tensor | None,
    replicas_ptr: tl.tensor | None,
    num_replicas_ptr: tl.tensor | None,
    calls_ptr: tl.tensor | None,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    logical_ptr: tl.tensor | None,
    num_tokens: tl.tensor,
    first: tl.tensor,
    STRIDE: tl.constexpr,
    REPLICAS: tl.constexpr,
    LOAD_COPIES: tl.constexpr,
    OVERLAPS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    GROUP_TOP_N: tl.constexpr,
    FILLS_ZERO: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    EPSILON_MODE: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    MEMBER_LANES: tl.constexpr,
) -> None:
    """Route a few tokens.

    E = 4, K = 2, softmax of the logits 0 ln(2) -inf ln(2): scores 0.2 0.4 0 0.4, ids 1 3, weights
    0.4 0.4, with renormalisation 0.5 0.5.
    """
    if OVERLAPS:
        let_next_start()
        await_previous()
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    number = first + token
    if calls_ptr is not None:
        calls = tl.load(calls_ptr)
        number += ((calls >> 32) & 0x3FFFFFFF).to(tl.int32)
        _count_call(calls_ptr, calls)
    is_here = token < num_tokens
    row_ptr = logits_ptr + token.to(tl.int64) * STRIDE

    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    lane = tl.arange(0, GROUP_LANES * MEMBER_LANES)[None, :]
    expert = lane // MEMBER_LANES * GROUP_SIZE + lane % MEMBER_LANES
    is_expert = (lane // MEMBER_LANES < NUM_GROUPS) & (lane % MEMBER_LANES < GROUP_SIZE)
    raw = tl.load(row_ptr + expert, mask=is_expert & is_here, other=0.0).to(tl.float32)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)
    logits = adjust_logits(raw, bias if BIAS == "score" else 0.0, SOFTCAP)  # pyright: ignore[reportArgumentType]
    logits = tl.where(is_expert, logits, float("-inf"))
    scores = score_logits(logits, SCORE)
    top, total = 0.0, 1.0
    if SCORE == "softmax":
        top, total = _softmax_parts(logits)  # pyright: ignore[reportGeneralTypeIssues]
        scores = _softmax_of(logits, top, total)

    selection = scores
    if BIAS == "selection":
        selection = scores + bias
    selection = tl.where((raw == raw) & is_expert, selection, float("nan"))
    # The lowest bit of a code marks a dropped group; codes are in the order of experts.
    codes = tl.broadcast_to(expert * 2, raw.shape)
    if TOPK_GROUPS < NUM_GROUPS:
        is_kept = _groups_kept(
            selection, TOKENS, GROUP_LANES, MEMBER_LANES, NUM_GROUPS, TOPK_GROUPS, GROUP_TOP_N
        )
        fill = 0.0 if FILLS_ZERO else float("-inf")
        selection = tl.where(is_kept | (selection != selection), selection, fill)
        codes = tl.where(is_kept, codes, codes + 1)
    keys = tl.where(is_expert, _key_of(selection), _TAKEN)
    chosen = _select(keys, codes, TOKENS, TOP_K)

    k = tl.arange(0, triton.next_power_of_2(TOP_K))[None, :]
    experts, is_chosen = chosen >> 1, (k < TOP_K) & is_here
    # With a bias for the selection and the fill 0, as models have them, a dropped expert that was
    # chosen keeps its score.
    weighs = is_chosen & ((chosen & 1 == 0) | (FILLS_ZERO and BIAS == "selection"))
    raw = tl.load(row_ptr + experts, mask=is_chosen, other=0.0).to(tl.float32)
    bias = 0.0
    if BIAS == "score":
        bias = tl.load(bias_ptr + experts, mask=is_chosen, other=0.0).to(tl.float32)  # pyright: ignore[reportOptionalOperand]
    logits = tl.where(weighs, adjust_logits(raw, bias, SOFTCAP), float("-inf"))  # pyright: ignore[reportArgumentType]
    weights = score_logits(logits, SCORE)
    if SCORE == "logit":
        top, total = _softmax_parts(logits)  # pyright: ignore[reportGeneralTypeIssues]
        weights = _softmax_of(logits, top, total)
    elif SCORE == "softmax":
        weights = _softmax_of(logits, top, total)  # pyright: ignore[reportArgumentType]
    weights = tl.where(weighs, weights, 0.0)
    if RENORMALIZES:
        weights = _renormalize(weights, EPSILON_MODE, EPSILON)
    weights *= SCALE

    if load_ptr is not None:
        counter_ptr = load_ptr + tl.program_id(0) % LOAD_COPIES * NUM_EXPERTS + experts
        one = tl.full(experts.shape, 1, tl.int64)
        # Sums of integers do not depend on their order; a later kernel reads it.
        tl.atomic_add(counter_ptr, one, mask=is_chosen, sem="relaxed")
    place = token.to(tl.int64) * TOP_K + k
    ids = experts
    if logical_ptr is not None:
        tl.store(logical_ptr + place, experts.to(tl.int64), mask=is_chosen)
    if replicas_ptr is not None:
        ids = _choose_replicas(experts, is_chosen, number, replicas_ptr, num_replicas_ptr, REPLICAS)  # pyright: ignore[reportArgumentType]
    tl.store(ids_ptr + place, ids.to(tl.int64), mask=is_chosen)
    tl.store(weights_ptr + place, weights, mask=is_chosen)


def route_tokens(
    logits: Tensor,
    bias: Tensor | None,
    form: GateForm,
    *,
    load: Tensor | None = None,
    replicas: ReplicaTable | None = None,
    logical_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token and their weights by one kernel.

    Args:
        logits: [T, E], float32, bfloat16 or float16, with adjacent columns; T = 0 is legal.
        bias: [E], where the form has one.
        load: [N, E], int64, contiguous; each token adds 1 to each expert that it chose, in
            any row: a line of the cache takes one addition a cycle.
        replicas: the physical experts of each logical one; None: ids are logical.
        logical_ids: [T, K], int64, written; the experts of the model that were chosen.

    Returns:
        topk_ids [T, K], int64, and topk_weights [T, K], float32.

    Allocates what it returns.   Compiled for each form and stride, and for many programs.
    Host sync: none.   Deterministic: yes.   Graph capture: after one call of such a size.
    """
    num_tokens = logits.shape[0]
    ids = logits.new_empty(num_tokens, form.top_k, dtype=torch.int64)
    weights = logits.new_empty(num_tokens, form.top_k, dtype=torch.float32)
    if not num_tokens:
        return ids, weights
    num_programs = -(-num_tokens // _constants_of(form)["TOKENS"])
    tables: tuple[Tensor | None, ...] = (None, None, None)
    first = most_replicas = 0
    if replicas is not None:
        tables = (replicas.replicas, replicas.num_replicas, replicas.calls)
        first, most_replicas = replicas.first, replicas.replicas.shape[1]
    is_early = num_programs <= _MAX_EARLY_PROGRAMS
    overlap = overlapping(logits.device) if is_early else {"OVERLAPS": False}
    launch(
        _route_tokens_kernel,
        num_programs,
        (logits, bias, load, *tables, ids, weights, logical_ids, num_tokens, first),
        STRIDE=row_stride(logits),
        REPLICAS=most_replicas,
        LOAD_COPIES=1 if load is None else load.shape[0],
        **overlap,
        **_constants_of(form),
    )
    return ids, weights


@lru_cache(maxsize=64)
def _constants_of(form: GateForm) -> Mapping[str, Any]:
    group_lanes = next_power_of_two(form.num_groups)
    member_lanes = next_power_of_two(form.num_experts // form.num_groups)
    lanes = group_lanes * member_lanes
    return {
        **{each.name.upper(): getattr(form, each.name) for each in fields(form)},
        "TOKENS": max(1, (_INTERPRETED_LANES if IS_INTERPRETED else _LANES) // lanes),
        "GROUP_LANES": group_lanes,
        "MEMBER_LANES": member_lanes,
        "num_warps": 1,
        **EXACT,
    }
