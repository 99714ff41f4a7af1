"""Check the package's assertions, about the meaning of a call and about devices.

The package throws `Assertion exception (<file>:<line>): <condition>` as a RuntimeError. The texts
here are such conditions; like the package's, they say neither value nor rank.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.integrations.deep_ep import EPHandle, EventHandle, topk_idx_t
from epcomm.integrations.deep_ep.v2.sizes import (
    BUFFER_ALIGNMENT_BYTES,
    NUM_DEVICE_SMS,
    combine_bytes,
    dispatch_bytes,
)
from fakes.deep_ep.limits import require, require_size

# Lanes of a warp: one holds one of the K experts of a token.
MAX_TOPK = 32
# Elements: a warp reduces 32 vectors of 16 B at a time.
COMBINE_HIDDEN_MULTIPLE = 256
# 16 B: bulk copies move whole vectors.
ROW_MULTIPLE_BYTES = 16
MAX_RANKS = 1024
MAX_SCALEUP_RANKS = 64
MAX_EXPERTS = 2048
MAX_LOCAL_EXPERTS = 256
SCALE_WORD_BYTES = 4


def check_buffer_bytes(num_bytes: int, num_cpu_bytes: int) -> None:
    """Refuse a size that is not of whole 2 MB."""
    require(num_bytes > 0, "num_buffer_bytes > 0")
    require_size(
        num_bytes % BUFFER_ALIGNMENT_BYTES == 0, "num_buffer_bytes % kNumAlignmentBytes == 0"
    )
    rule = "num_cpu_buffer_bytes >= 0 and num_cpu_buffer_bytes % kNumAlignmentBytes == 0"
    require_size(num_cpu_bytes >= 0 and num_cpu_bytes % BUFFER_ALIGNMENT_BYTES == 0, rule)
    require(num_cpu_bytes <= num_bytes, "num_cpu_buffer_bytes <= num_buffer_bytes")


def check_sizing(max_tokens: int, hidden: int) -> None:
    """Refuse sizes from which no buffer can be made."""
    require(max_tokens > 0 and hidden > 0, "num_max_tokens_per_rank > 0 and hidden > 0")


def check_events(given: Mapping[str, Any]) -> None:
    """Refuse objects that are not events, and memory of results that computation may still use."""
    for name in ("previous_event", "previous_event_before_epilogue"):
        event = given[name]
        if event is not None and not isinstance(event, EventHandle):
            raise TypeError(f"incompatible function arguments: {type(event).__name__}")
    # With an event, computation overlaps the call and must not get the memory of its tensors.
    is_safe = given["previous_event"] is None or given["allocate_on_comm_stream"]
    require(is_safe, "allocate_on_comm_stream")


def check_sms(num_sms: int) -> None:
    """Refuse a number of SMs that no GPU has."""
    require(num_sms > 0, "num_sms > 0")
    require_size(num_sms <= NUM_DEVICE_SMS, "num_sms <= device num_sms")


def check_handle(given: Mapping[str, Any], handle: EPHandle) -> None:
    """Refuse arguments that a cached dispatch does not take.

    Raises:
        AssertionError: as the package's Python does.
    """
    assert given["topk_idx"] is None
    assert not given["do_cpu_sync"], "Cannot do CPU sync with cached handle"
    for name in ("num_experts", "expert_alignment", "num_max_tokens_per_rank"):
        assert given[name] is None or given[name] == getattr(handle, name)
    require(handle.do_expand or not given["do_expand"], "not do_expand or handle.do_expand")


def check_dispatch(given: Mapping[str, Any], max_tokens: int, num_ranks: int) -> None:
    """Refuse what the package refuses, before anything is sent.

    Args:
        given: the arguments of dispatch(), by name, with routes and sizes of the handle.
        max_tokens: M.
        num_ranks: W.
    """
    x, sf = given["x"] if isinstance(given["x"], tuple) else (given["x"], None)
    require(x.dim() == 2 and x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
    rule = "x is bfloat16, or float8_e4m3fn with sf"
    require(x.dtype == (torch.bfloat16 if sf is None else torch.float8_e4m3fn), rule)
    _check_row_bytes(x)
    require(x.shape[0] <= max_tokens, "num_tokens <= num_max_tokens_per_rank")
    _check_scales(x, sf)
    _check_routes(given, x.shape[0], num_ranks)
    require(not given["do_zero_padding"] or given["do_expand"], "do_expand or not do_zero_padding")


def check_dispatch_bytes(
    given: Mapping[str, Any], max_tokens: int, num_ranks: int, num_bytes: int
) -> None:
    """Refuse a dispatch of more than the buffer holds."""
    x, sf = given["x"] if isinstance(given["x"], tuple) else (given["x"], None)
    needed_bytes = dispatch_bytes(
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        row_bytes=x.shape[1] * x.element_size(),
        num_scale_words=0 if sf is None else sf.shape[1],
        num_topk=given["topk_idx"].shape[1],
    )
    require_size(needed_bytes <= num_bytes, "get_dispatch_buffer_size(...) <= num_buffer_bytes")


def check_combine(
    given: Mapping[str, Any], biases: tuple[Tensor, ...], *, allow_multiple_reduction: bool
) -> None:
    """Refuse what the package refuses, before anything is sent; the arguments by name."""
    x, handle = given["x"], given["handle"]
    require(x.dim() == 2 and x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
    require(x.dtype == torch.bfloat16, "x.scalar_type() == torch::kBFloat16")
    _check_row_bytes(x)
    require_size(x.shape[1] % COMBINE_HIDDEN_MULTIPLE == 0, "Invalid hidden: kHidden % 256 == 0")
    num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
    # The package does not check the rows of expanded layouts and would read beyond them.
    require(x.shape[0] == num_rows, "num_reduced_tokens == num_tokens")
    is_backward = given["topk_weights"] is not None
    is_sent_expanded = handle.do_expand and not allow_multiple_reduction
    require(not (is_backward and is_sent_expanded), "Expanding send mode must not be backward")
    _check_combine_extras(x, handle, given["topk_weights"], biases)


def check_combine_bytes(
    given: Mapping[str, Any], num_ranks: int, num_bytes: int, *, allow_multiple_reduction: bool
) -> None:
    """Refuse a combine of more than the buffer holds."""
    handle = given["handle"]
    needed_bytes = combine_bytes(
        num_ranks=num_ranks,
        max_tokens=handle.num_max_tokens_per_rank,
        hidden=given["x"].shape[1],
        num_topk=handle.topk_idx.shape[1],
        allow_multiple_reduction=allow_multiple_reduction,
    )
    require_size(needed_bytes <= num_bytes, "get_combine_buffer_size(...) <= num_buffer_bytes")


def agree(group: dist.ProcessGroup, values: list[int], names: str) -> None:
    """Refuse numbers that differ between the ranks.

    The package does not compare them, and corrupts memory where they differ.
    """
    mine = torch.tensor(values, dtype=torch.int64)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(theirs, mine, group=group)
    require(all(torch.equal(mine, other) for other in theirs), f"{names} are the same on all ranks")


def check_received_routes(local_idx: Tensor) -> None:
    """Refuse a token that names one expert of this rank twice: [N, K], -1 elsewhere.

    The receiving kernel finds it and traps.
    """
    ordered = local_idx.sort(dim=1).values
    is_twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    require(not is_twice.any(), "device side: deduplicate(dst_expert_idx, lane_idx)")


def _check_row_bytes(x: Tensor) -> None:
    rule = "(x.size(1) * x.element_size()) % sizeof(int4) == 0"
    require_size(x.shape[1] * x.element_size() % ROW_MULTIPLE_BYTES == 0, rule)


def _check_scales(x: Tensor, sf: Tensor | None) -> None:
    if sf is not None:
        require(sf.dim() == 2 and sf.shape[0] == x.shape[0], "num_tokens == num_tokens_ of sf")
        require(sf.element_size() == SCALE_WORD_BYTES, "sf->element_size() == sizeof(sf_pack_t)")


def _check_routes(given: Mapping[str, Any], num_tokens: int, num_ranks: int) -> None:
    topk_idx, weights, num_experts = given["topk_idx"], given["topk_weights"], given["num_experts"]
    num_local_experts = num_experts // num_ranks
    require(topk_idx.dim() == 2 and topk_idx.shape[0] == num_tokens, "num_tokens == num_tokens_")
    require(topk_idx.dtype == topk_idx_t, "topk_idx.scalar_type() == topk_idx_t")
    require(topk_idx.is_contiguous(), "topk_idx.is_contiguous()")
    require_size(topk_idx.shape[1] <= MAX_TOPK, "Too many top-k selections: kNumTopk <= 32")
    require(num_experts % num_ranks == 0, "num_experts % num_ranks == 0")
    require_size(num_experts <= MAX_EXPERTS, "num_experts <= kNumMaxExperts")
    require_size(num_local_experts <= MAX_LOCAL_EXPERTS, "num_local_experts <= 256")
    # The package would write beyond the memory of all ranks.
    require(bool((topk_idx < num_experts).all()), "topk_idx < num_experts")
    if weights is not None:
        require(weights.shape == topk_idx.shape, "topk_weights and topk_idx have one shape")
        require(weights.dtype == torch.float32, "topk_weights->scalar_type() == torch::kFloat")
        require(weights.is_contiguous(), "topk_weights->is_contiguous()")
    stats = given["cumulative_local_expert_recv_stats"]
    if stats is not None:
        require(stats.shape == (num_local_experts,), "num_local_experts == num_local_experts_")
        require(stats.dtype == torch.int32 and stats.is_contiguous(), "stats are int")


def _check_combine_extras(
    x: Tensor, handle: EPHandle, weights: Tensor | None, biases: tuple[Tensor, ...]
) -> None:
    if weights is not None:
        shape = (len(x),) if handle.do_expand else (len(x), handle.topk_idx.shape[1])
        require(weights.shape == shape, "num_tokens == num_tokens__ and num_topk == num_topk__")
        require(weights.dtype == torch.float32, "topk_weights->scalar_type() == torch::kFloat")
        require(weights.is_contiguous(), "topk_weights->is_contiguous()")
    for bias in biases:
        require(bias.dim() == 2 and bias.is_contiguous(), "bias.dim() == 2, contiguous")
        require(bias.dtype == x.dtype, "bias.scalar_type() == x.scalar_type()")
        rule = "bias.size(0) == num_combined_tokens and bias.size(1) == hidden"
        require(bias.shape == (handle.topk_idx.shape[0], x.shape[1]), rule)
