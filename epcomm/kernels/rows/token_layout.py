"""Count the tokens of each rank and of each expert in one launch.

A program writes the counts of one rank, or of a few experts, and reads all ids for them. No count
is shared, so nothing is initialised, atomic, or summed afterwards. The ids of 4096 tokens are 256
KB, which fit into the L2 cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two
from epcomm.kernels.prepared import launch

# Experts that a program counts, and ids that it compares with them in one step: 16 loads in flight
# for each thread.
_EXPERTS, _PAIRS, _WARPS = 4, 8192, 16


@triton.jit(do_not_specialize=["num_tokens"])
def _write_token_layout_kernel(
    ids_ptr: tl.tensor,
    per_rank_ptr: tl.tensor,
    per_expert_ptr: tl.tensor,
    is_in_rank_ptr: tl.tensor,
    num_tokens: tl.tensor,
    W: tl.constexpr,
    E: tl.constexpr,
    LOCAL: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Write one rank in each of the first W programs, and EXPERTS experts in each of the others.

    4 experts on 2 ranks and the ids 0 1 | 1 2 make 2 1 tokens for ranks, 1 2 1 0 for experts, and
    the rows 1 0 | 1 1 of is_in_rank.
    """
    program = tl.program_id(0)
    if program < W:
        k = tl.arange(0, triton.next_power_of_2(K))[None, :]
        first, end = program * LOCAL, tl.minimum((program + 1) * LOCAL, E)
        count = tl.zeros([TOKENS], tl.int32)
        for start in tl.range(0, num_tokens, TOKENS):
            token = tl.cast(start, tl.int64) + tl.arange(0, TOKENS)
            is_token = token < num_tokens
            ids_at = token[:, None] * K + k
            experts = tl.load(ids_ptr + ids_at, mask=is_token[:, None] & (k < K), other=-1)
            is_here = ((experts >= first) & (experts < end)).to(tl.int32)
            goes = tl.max(is_here, 1)
            tl.store(is_in_rank_ptr + token * W + program, goes != 0, mask=is_token)
            count += goes
        tl.store(per_rank_ptr + program, tl.sum(count, 0))
    else:
        expert = (program - W) * EXPERTS + tl.arange(0, EXPERTS)
        num_pairs = tl.cast(num_tokens, tl.int64) * K
        counts = tl.zeros([PAIRS, EXPERTS], tl.int32)
        for first_pair in tl.range(0, num_pairs, PAIRS):
            pair = first_pair + tl.arange(0, PAIRS)
            ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
            counts += (ids[:, None] == expert[None, :]).to(tl.int32)
        tl.store(per_expert_ptr + expert, tl.sum(counts, 0), mask=expert < E)


def write_token_layout(
    topk_ids: Tensor, per_rank: Tensor, per_expert: Tensor, is_in_rank: Tensor
) -> None:
    """Write the tokens of each rank and of each expert, and which token goes to which rank.

    Args:
        topk_ids: [T, K], int64 or int32; ids that name no expert count nowhere.
        per_rank: [W], int32, written.
        per_expert: [E], int32, written; rank r owns the experts from r * (E // W) on, or expert r
            where there are fewer experts than ranks.
        is_in_rank: [T, W], bool, contiguous, written.

    Allocates a copy of ids that are not contiguous.   Compiled for each W, E and K.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    """
    (num_tokens, top_k), num_ranks, num_experts = topk_ids.shape, len(per_rank), len(per_expert)
    launch(
        _write_token_layout_kernel,
        num_ranks + -(-num_experts // _EXPERTS),
        (topk_ids.contiguous(), per_rank, per_expert, is_in_rank, num_tokens),
        W=num_ranks,
        E=num_experts,
        LOCAL=max(num_experts // num_ranks, 1),
        K=top_k,
        TOKENS=max(_PAIRS // next_power_of_two(top_k), 1),
        EXPERTS=_EXPERTS,
        PAIRS=_PAIRS,
        num_warps=_WARPS,
    )
