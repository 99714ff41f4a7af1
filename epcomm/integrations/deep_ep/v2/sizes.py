"""The sizes of V2: bytes of a buffer, rows of a dispatch without CPU sync, SMs and queue pairs.

Source: deepseek-ai/DeepEP, csrc/elastic/buffer.hpp and deep_ep/buffers/elastic.py.
"""

from __future__ import annotations

import math

from epcomm.types import align_up

# 2 MB: the granularity of symmetric memory.
BUFFER_ALIGNMENT_BYTES = 1 << 21
# SMs of an H200, on whose model the count of a CPU rank is taken.
NUM_DEVICE_SMS = 132
# 32 B: one token's message starts at a vector load.
_TOKEN_ALIGNMENT_BYTES = 32
# num_topk that the package assumes where it is not given: its limit.
_DEFAULT_NUM_TOPK = 32
# Elements of a row for which it assumes one scale word.
_HIDDEN_PER_SCALE_WORD = 32
_WORD_BYTES = 4
# GB/s of one direction of NVLink on an H200.
_NVLINK_GBS = 450.0
# SMs that it takes at least, and where computation need not overlap.
_MIN_SMS, _MIN_SMS_ALONE = 4, 64
# What the model forgets.
_SMS_MARGIN = 1.25


def dispatch_bytes(
    num_ranks: int, max_tokens: int, row_bytes: int, num_scale_words: int, num_topk: int
) -> int:
    """Return the bytes of all ranks' messages: elements, scales, ids and weights, the source."""
    token_bytes = row_bytes + _WORD_BYTES * (num_scale_words + 2 * num_topk + 1)
    return num_ranks * max_tokens * align_up(token_bytes, _TOKEN_ALIGNMENT_BYTES)


def combine_bytes(
    num_ranks: int, max_tokens: int, hidden: int, num_topk: int, allow_multiple_reduction: bool
) -> int:
    """Return the bytes of returned partial sums: one a rank, or unreduced one an expert."""
    num_parts = min(num_ranks, num_topk) if allow_multiple_reduction else num_topk
    token_bytes = 2 * hidden + _WORD_BYTES * num_topk
    return num_parts * max_tokens * align_up(token_bytes, _TOKEN_ALIGNMENT_BYTES)


def buffer_bytes(
    num_ranks: int,
    max_tokens: int,
    hidden: int,
    num_topk: int,
    *,
    use_fp8_dispatch: bool,
    allow_multiple_reduction: bool,
) -> int:
    """Return the larger of both sizes, aligned to 2 MB; num_topk 0 means 32."""
    top_k = num_topk or _DEFAULT_NUM_TOPK
    row = (hidden, -(-hidden // _HIDDEN_PER_SCALE_WORD)) if use_fp8_dispatch else (2 * hidden, 0)
    for_dispatch = dispatch_bytes(num_ranks, max_tokens, *row, top_k)
    for_combine = combine_bytes(num_ranks, max_tokens, hidden, top_k, allow_multiple_reduction)
    return align_up(max(for_dispatch, for_combine), BUFFER_ALIGNMENT_BYTES)


def theoretical_num_sms(
    num_ranks: int,
    num_experts: int,
    num_topk: int,
    *,
    nvlink_gbs: float,
    sm_read_gbs: float,
    sm_write_gbs: float,
    is_alone: bool,
) -> int:
    """Return the SMs whose memory traffic keeps NVLink busy with balanced routing, even.

    nvlink_gbs: GB/s of one direction, 0 for those of an H200.
    is_alone: nothing is computed during the communication.
    """
    others = num_experts - num_experts // num_ranks
    missed = math.comb(others, num_topk) / math.comb(num_experts, num_topk)
    num_expected_ranks = num_ranks * (1 - missed)
    remote_share = 1 - 1 / num_ranks
    num_sms = float(NUM_DEVICE_SMS)
    if remote_share > 0 and num_expected_ranks > 0:
        rows_gbs = (nvlink_gbs or _NVLINK_GBS) / remote_share
        num_sms = max(rows_gbs / num_expected_ranks / sm_read_gbs, rows_gbs / sm_write_gbs)
    wanted = align_up(max(_MIN_SMS, math.ceil(num_sms * _SMS_MARGIN)), 2)
    return min(max(wanted, _MIN_SMS_ALONE) if is_alone else wanted, NUM_DEVICE_SMS)
