"""Check what the real package asserts about low-latency calls: RuntimeError in its words."""

import torch
from torch import Tensor

from epcomm.buffers.deep_ep.rows import low_latency_bytes
from fakes.deep_ep.limits import require, require_size
from fakes.deep_ep.strict_v1.sizes import require_ids

# Values for which the kernels are compiled.
HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
MAX_TOPK = 11
# Elements that share a scale, and those that share a word of four one-byte scales.
_SCALE_BLOCK = 128
_PACKED_BLOCK = 512
# Rows whose scales the tensor memory access unit reads together.
_ROWS_OF_TMA = 4


def check_dispatch(
    x: Tensor, topk_idx: Tensor, max_tokens: int, num_experts: int, num_ranks: int, *, is_fp8: bool
) -> None:
    """Refuse what low_latency_dispatch refuses."""
    require(x.dim() == 2 and x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
    require(x.dtype == torch.bfloat16, "x.scalar_type() == torch::kBFloat16")
    require_size(x.shape[1] % _SCALE_BLOCK == 0, "x.size(1) % 128 == 0")
    _check_topk_idx(topk_idx, num_experts)
    require(x.shape[0] == topk_idx.shape[0], "x.size(0) == topk_idx.size(0)")
    require(x.shape[0] <= max_tokens, "x.size(0) <= num_max_dispatch_tokens_per_rank")
    require(num_experts % num_ranks == 0, "num_experts % num_ranks == 0")
    rule = "TMA requires the number of tokens to be multiple of 4"
    require_size(num_ranks * max_tokens % _ROWS_OF_TMA == 0, rule)
    require_size(not is_fp8 or x.shape[1] % _PACKED_BLOCK == 0, "hidden % 512 == 0")
    _check_compiled(x.shape[1])


def check_combine(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    handle: tuple[Tensor, Tensor, int, int, int],
    num_ranks: int,
    out: Tensor | None,
) -> None:
    """Refuse what low_latency_combine refuses."""
    src_info, layout_range, max_tokens, _, num_experts = handle
    num_local = num_experts // num_ranks
    require(x.dim() == 3 and x.is_contiguous(), "x.dim() == 3 and x.is_contiguous()")
    require(x.dtype == torch.bfloat16, "x.scalar_type() == torch::kBFloat16")
    require(x.shape[0] == num_local, "x.size(0) == num_experts / num_ranks")
    num_rows = num_ranks * max_tokens
    require(x.shape[1] == num_rows, "x.size(1) == num_ranks * num_max_dispatch_tokens_per_rank")
    require_size(x.shape[2] % _SCALE_BLOCK == 0, "x.size(2) % 128 == 0")
    _check_compiled(x.shape[2])
    _check_topk_idx(topk_idx, num_experts)
    require(topk_idx.shape == topk_weights.shape, "topk_idx.size(0) == topk_weights.size(0)")
    require(topk_weights.is_contiguous(), "topk_weights.is_contiguous()")
    require(topk_weights.dtype == torch.float32, "topk_weights.scalar_type() == torch::kFloat32")
    require(topk_weights.shape[0] <= max_tokens, "topk_weights.size(0) <= max tokens")
    require(src_info.dtype == torch.int32 and src_info.is_contiguous(), "src_info is int32")
    require(src_info.shape[0] == num_local, "x.size(0) == src_info.size(0)")
    require(layout_range.dtype == torch.int64, "layout_range.scalar_type() == torch::kInt64")
    shape = [num_local, num_ranks]
    require(list(layout_range.shape) == shape, "layout_range.size(1) == num_ranks")
    if out is not None:
        require(out.dim() == 2 and out.is_contiguous(), "out->dim() == 2 and out->is_contiguous()")
        fits = list(out.shape) == [topk_idx.shape[0], x.shape[2]]
        require(fits, "out->size(0) == num_combined_tokens and out->size(1) == hidden")
        require(out.dtype == x.dtype, "out->scalar_type() == x.scalar_type()")


def check_stats(
    expert_stats: Tensor | None, wait_stats: Tensor | None, num_experts: int, num_ranks: int
) -> None:
    """Check the statistics: int32 [L] of rows, int64 [W] of waiting."""
    for stats, dtype, size in (
        (expert_stats, torch.int32, num_experts // num_ranks),
        (wait_stats, torch.int64, num_ranks),
    ):
        if stats is not None:
            require(stats.dtype == dtype, f"stats->scalar_type() == {dtype}")
            require(stats.dim() == 1 and stats.is_contiguous(), "stats->is_contiguous()")
            require(stats.shape[0] == size, f"stats->size(0) == {size}")


def check_bytes(max_tokens: int, hidden_size: int, num_experts: int, num_rdma_bytes: int) -> None:
    """Refuse a buffer that is too small."""
    needed = low_latency_bytes(max_tokens, hidden_size, num_experts)
    require_size(needed <= num_rdma_bytes, "layout.total_bytes <= num_rdma_bytes")


def _check_compiled(hidden_size: int) -> None:
    require_size(hidden_size in HIDDEN_SIZES, f"Unsupported hidden: one of {HIDDEN_SIZES}")


def _check_topk_idx(topk_idx: Tensor, num_experts: int) -> None:
    require(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx is 2-D and contiguous")
    require_ids(topk_idx, num_experts)
    require_size(topk_idx.shape[1] <= MAX_TOPK, f"num_topk <= kNumMaxTopK, {MAX_TOPK}")
