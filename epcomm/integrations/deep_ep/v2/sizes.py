"""The sizes of V2: bytes of a buffer, and the assumptions of its model of SMs.

Source: deepseek-ai/DeepEP, csrc/elastic/buffer.hpp and deep_ep/buffers/elastic.py.
"""

from epcomm.types import align_up

# 2 MB: the granularity of symmetric memory.
BUFFER_ALIGNMENT_BYTES = 1 << 21
# SMs of an H200; CPU ranks return the number for this GPU.
NUM_DEVICE_SMS = 132
# 32 B: one token's message starts at a vector load.
_TOKEN_ALIGNMENT_BYTES = 32
# The most experts of a token, which the package assumes where num_topk is not given.
MAX_TOPK = 32
# Elements of a row for which it assumes one scale word.
HIDDEN_PER_SCALE_WORD = 32
_WORD_BYTES = 4
# GB/s of one direction of NVLink on an H200.
NVLINK_GBS = 450.0
# The minimum number of SMs, and the minimum if no computation overlaps.
MIN_SMS, MIN_SMS_ALONE = 4, 64
# The factor covers traffic that the model leaves out.
SMS_MARGIN = 1.25


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
