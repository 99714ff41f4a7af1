"""Check the package's assertions, about the meaning of a call and about devices.

The package throws `Assertion exception (<file>:<line>): <condition>` as a RuntimeError. The texts
here are such conditions; like the package's, they say neither value nor rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakes.deep_ep.limits import is_enforced
from fakes.deep_ep.v2.handle import topk_idx_t
from fakes.deep_ep.v2.records import CombineRequest, DispatchRequest, Domain
from fakes.deep_ep.v2.sizes import BUFFER_ALIGNMENT_BYTES, combine_bytes, dispatch_bytes

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
# SMs of an H200, on which the recorded values were made.
NUM_DEVICE_SMS = 132
SCALE_WORD_BYTES = 4


def require(condition: bool, text: str) -> None:
    """Throw as the package does, whatever the limits.

    Raises:
        RuntimeError: the condition does not hold.
    """
    if not condition:
        raise RuntimeError(f"Assertion exception (deep_ep V2 stand-in): {text}")


def limit(condition: bool, text: str) -> None:
    """Check an assertion that only devices have; see limits_off()."""
    require(condition or not is_enforced(), text)


def check_buffer_bytes(num_bytes: int, num_cpu_bytes: int) -> None:
    """Refuse a size that is not of whole 2 MB."""
    require(num_bytes > 0, "num_buffer_bytes > 0")
    limit(num_bytes % BUFFER_ALIGNMENT_BYTES == 0, "num_buffer_bytes % kNumAlignmentBytes == 0")
    limit(
        num_cpu_bytes >= 0 and num_cpu_bytes % BUFFER_ALIGNMENT_BYTES == 0,
        "num_cpu_buffer_bytes >= 0 and num_cpu_buffer_bytes % kNumAlignmentBytes == 0",
    )
    require(num_cpu_bytes <= num_bytes, "num_cpu_buffer_bytes <= num_buffer_bytes")


def check_sizing(max_tokens: int, hidden: int) -> None:
    """Refuse sizes from which no buffer follows."""
    require(max_tokens > 0 and hidden > 0, "num_max_tokens_per_rank > 0 and hidden > 0")


def check_dispatch(request: DispatchRequest, domain: Domain) -> None:
    """Refuse what the package refuses, before anything is sent."""
    x = request.x
    require(request.num_sms > 0, "num_sms > 0")
    limit(request.num_sms <= NUM_DEVICE_SMS, "num_sms <= device num_sms")
    require(x.dim() == 2 and x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
    require(
        x.dtype == (torch.bfloat16 if request.sf is None else torch.float8_e4m3fn),
        "x is bfloat16, or float8_e4m3fn with sf",
    )
    _check_row_bytes(x)
    require(x.shape[0] <= request.max_tokens, "num_tokens <= num_max_tokens_per_rank")
    _check_scales(request)
    _check_routes(request, domain)
    require(not request.do_zero_padding or request.do_expand, "do_expand or not do_zero_padding")
    if request.handle is not None:
        require(request.handle.do_expand == request.do_expand, "do_expand == handle.do_expand")
    needed_bytes = dispatch_bytes(
        num_ranks=domain.num_ranks,
        max_tokens=request.max_tokens,
        row_bytes=x.shape[1] * x.element_size(),
        num_scale_words=0 if request.sf is None else request.sf.shape[1],
        num_topk=request.num_topk,
    )
    limit(needed_bytes <= domain.num_bytes, "get_dispatch_buffer_size(...) <= num_buffer_bytes")


def check_combine(request: CombineRequest, domain: Domain) -> None:
    """Refuse what the package refuses, before anything is sent."""
    x, handle = request.x, request.handle
    num_tokens, num_topk = handle.topk_idx.shape
    require(request.num_sms > 0, "num_sms > 0")
    require(x.dim() == 2 and x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
    require(x.dtype == torch.bfloat16, "x.scalar_type() == torch::kBFloat16")
    _check_row_bytes(x)
    limit(x.shape[1] % COMBINE_HIDDEN_MULTIPLE == 0, "Invalid hidden: kHidden % 256 == 0")
    require(num_tokens <= handle.num_max_tokens_per_rank, "num_combined_tokens <= M")
    num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
    # The package does not check the rows of expanded layouts and would read beyond them.
    require(x.shape[0] == num_rows, "num_reduced_tokens == num_tokens")
    _check_combine_extras(request)
    needed_bytes = combine_bytes(
        num_ranks=domain.num_ranks,
        max_tokens=handle.num_max_tokens_per_rank,
        hidden=x.shape[1],
        num_topk=num_topk,
        allow_multiple_reduction=domain.allow_multiple_reduction,
    )
    limit(needed_bytes <= domain.num_bytes, "get_combine_buffer_size(...) <= num_buffer_bytes")


def check_received_routes(local_idx: Tensor) -> None:
    """Refuse a token that names one expert of this rank twice: [N, K], -1 elsewhere.

    The receiving kernel finds it and traps.
    """
    ordered = local_idx.sort(dim=1).values
    is_twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    require(not is_twice.any(), "device side: deduplicate(dst_expert_idx, lane_idx)")


def _check_row_bytes(x: Tensor) -> None:
    limit(
        x.shape[1] * x.element_size() % ROW_MULTIPLE_BYTES == 0,
        "(x.size(1) * x.element_size()) % sizeof(int4) == 0",
    )


def _check_scales(request: DispatchRequest) -> None:
    if request.sf is None:
        return
    sf = request.sf
    require(sf.dim() == 2 and sf.shape[0] == request.x.shape[0], "num_tokens == num_tokens_ of sf")
    require(sf.element_size() == SCALE_WORD_BYTES, "sf->element_size() == sizeof(sf_pack_t)")


def _check_routes(request: DispatchRequest, domain: Domain) -> None:
    num_tokens, topk_idx, weights = request.x.shape[0], request.topk_idx, request.topk_weights
    num_local_experts = request.num_experts // domain.num_ranks
    require(topk_idx.dim() == 2 and topk_idx.shape[0] == num_tokens, "num_tokens == num_tokens_")
    require(topk_idx.dtype == topk_idx_t, "topk_idx.scalar_type() == topk_idx_t")
    require(topk_idx.is_contiguous(), "topk_idx.is_contiguous()")
    limit(request.num_topk <= MAX_TOPK, "Too many top-k selections: kNumTopk <= 32")
    require(request.num_experts % domain.num_ranks == 0, "num_experts % num_ranks == 0")
    limit(request.num_experts <= MAX_EXPERTS, "num_experts <= kNumMaxExperts")
    limit(num_local_experts <= MAX_LOCAL_EXPERTS, "num_local_experts <= 256")
    # The package would write to the memory of nobody.
    require(bool((topk_idx < request.num_experts).all()), "topk_idx < num_experts")
    if weights is not None:
        require(weights.shape == topk_idx.shape, "topk_weights and topk_idx have one shape")
        require(weights.dtype == torch.float32, "topk_weights->scalar_type() == torch::kFloat")
        require(weights.is_contiguous(), "topk_weights->is_contiguous()")
    stats = request.recv_stats
    if stats is not None:
        require(stats.shape == (num_local_experts,), "num_local_experts == num_local_experts_")
        require(stats.dtype == torch.int32 and stats.is_contiguous(), "stats are int")


def _check_combine_extras(request: CombineRequest) -> None:
    x, handle, weights = request.x, request.handle, request.topk_weights
    if weights is not None:
        # Whoever expands multiplies by the weights before combine, in the activation.
        require(not handle.do_expand, "not topk_weights.has_value()")
        require(
            weights.shape == (x.shape[0], handle.topk_idx.shape[1]),
            "num_tokens == num_tokens__ and num_topk == num_topk__",
        )
        require(weights.dtype == torch.float32, "topk_weights->scalar_type() == torch::kFloat")
        require(weights.is_contiguous(), "topk_weights->is_contiguous()")
    for bias in request.biases:
        require(bias.dim() == 2 and bias.is_contiguous(), "bias.dim() == 2, contiguous")
        require(bias.dtype == x.dtype, "bias.scalar_type() == x.scalar_type()")
        require(
            bias.shape == (handle.topk_idx.shape[0], x.shape[1]),
            "bias.size(0) == num_combined_tokens and bias.size(1) == hidden",
        )
