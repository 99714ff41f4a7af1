"""Compute the bytes of a buffer, and the rows of a dispatch without CPU sync."""

from __future__ import annotations

from epcomm.types import align_up

# 2 MB: the granularity of symmetric memory.
BUFFER_ALIGNMENT_BYTES = 1 << 21
# 32 B: one token's message starts at a vector load.
_TOKEN_ALIGNMENT_BYTES = 32
# num_topk that the package assumes where it is not given: the limit.
_DEFAULT_NUM_TOPK = 32
# Elements of a row for which it assumes one scale word.
_HIDDEN_PER_SCALE_WORD = 32
_WORD_BYTES = 4


def dispatch_bytes(
    *, num_ranks: int, max_tokens: int, row_bytes: int, num_scale_words: int, num_topk: int
) -> int:
    """Messages of all ranks: elements, scale words, index and weight for each k, the source."""
    token_bytes = row_bytes + _WORD_BYTES * (num_scale_words + 2 * num_topk + 1)
    return num_ranks * max_tokens * align_up(token_bytes, _TOKEN_ALIGNMENT_BYTES)


def combine_bytes(
    *, num_ranks: int, max_tokens: int, hidden: int, num_topk: int, allow_multiple_reduction: bool
) -> int:
    """Partial sums that come back: one for each rank, or unreduced one for each expert."""
    num_parts = min(num_ranks, num_topk) if allow_multiple_reduction else num_topk
    token_bytes = 2 * hidden + _WORD_BYTES * num_topk
    return num_parts * max_tokens * align_up(token_bytes, _TOKEN_ALIGNMENT_BYTES)


def buffer_bytes(
    *,
    num_ranks: int,
    max_tokens: int,
    hidden: int,
    num_topk: int,
    use_fp8_dispatch: bool,
    allow_multiple_reduction: bool,
) -> int:
    """Return the larger of both sizes, aligned to 2 MB."""
    num_topk = num_topk or _DEFAULT_NUM_TOPK
    for_dispatch = dispatch_bytes(
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        row_bytes=hidden if use_fp8_dispatch else 2 * hidden,
        num_scale_words=-(-hidden // _HIDDEN_PER_SCALE_WORD) if use_fp8_dispatch else 0,
        num_topk=num_topk,
    )
    for_combine = combine_bytes(
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        hidden=hidden,
        num_topk=num_topk,
        allow_multiple_reduction=allow_multiple_reduction,
    )
    return align_up(max(for_dispatch, for_combine), BUFFER_ALIGNMENT_BYTES)


def worst_case_expanded_rows(
    *, num_ranks: int, max_tokens: int, num_topk: int, num_local_experts: int, alignment: int
) -> int:
    """Rows that an expanding dispatch returns where the host does not wait for counts."""
    num_rows = num_ranks * max_tokens * min(num_topk, num_local_experts)
    return align_up(num_rows + (alignment - 1) * num_local_experts, alignment)
