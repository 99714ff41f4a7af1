"""Imitate low latency: packed rows at the start of memory with capacity for the maximum."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.types import Int8Profile
from fakes.ascend.deep_ep import exchange
from fakes.ascend.deep_ep.config import WINDOW_VARIABLES, Settings, settings
from fakes.ascend.deep_ep.quant_mode import INT8
from fakes.ascend.int8 import quantize_rows
from fakes.ascend.limits import Soc, current_machine, require
from fakes.ascend.sizes import require_size
from fakes.ascend.windows import low_latency_bytes, require_window

DISPATCH = "deep_ep.Buffer.low_latency_dispatch"
COMBINE = "deep_ep.Buffer.low_latency_combine"

# src_info, layout_range, M, H, E, recv_count, nothing.
Handle = tuple[Tensor, Tensor, int, int, int, Tensor, None]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that all ranks share: at most M tokens of a rank, E experts; mode: bf16 or int8."""

    max_tokens: int
    num_experts: int
    mode: str


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """x [A, H]; scales float32 [A], written with INT8; count int64 [L], or sums."""

    x: Tensor
    scales: Tensor
    count: Tensor
    handle: Handle


def dispatch(group: dist.ProcessGroup, x: Tensor, ids: Tensor, sizes: Sizes) -> Arrived:
    """Send the rows; A = M * W * min(K, L)."""
    known = settings()

    def check() -> Sequence[int]:
        _check_sent(x, ids, sizes, group.size(), known)
        is_int8 = int(sizes.mode == INT8)
        return [x.shape[1], ids.shape[1], sizes.num_experts, sizes.max_tokens, is_int8]

    exchange.agree(group, DISPATCH, check)
    num_local = sizes.num_experts // group.size()
    num_rows = sizes.max_tokens * group.size() * min(ids.shape[1], num_local)
    pairs = exchange.pairs_of(ids, sizes.num_experts)
    rows, row_scales = x[pairs.tokens], None
    if sizes.mode == INT8:
        rows, row_scales = quantize_rows(rows, Int8Profile.RINT127)
    received = exchange.send(group, pairs, rows, row_scales)
    written = torch.empty(0) if received.scales is None else received.scales
    per_expert = received.per_expert()
    count = per_expert.cumsum(0) if known.counts_are_sums else per_expert
    triples = exchange.rows_then_undefined(received.triples, num_rows).flatten()
    handle = (
        *(triples, received.prefix(), sizes.max_tokens, x.shape[1], sizes.num_experts),
        *(count, None),
    )
    return Arrived(
        x=exchange.rows_then_undefined(received.rows, num_rows),
        scales=exchange.rows_then_undefined(written, num_rows),
        count=count,
        handle=handle,
    )


def combine(
    group: dist.ProcessGroup, x: Tensor, ids: Tensor, weights: Tensor, handle: Handle
) -> Tensor:
    """Sum rows times weights: [T, H]; both are those of the arguments, not of the handle."""
    src_info, prefix, max_tokens, hidden_size, num_experts = handle[:5]
    known = settings()

    def check() -> Sequence[int]:
        require(COMBINE, x.dim() == 2 and x.is_contiguous(), "x is 2-D and contiguous")
        require(COMBINE, x.dtype == torch.bfloat16, f"x is bfloat16, got {x.dtype}")
        shape = [src_info.numel() // 3, hidden_size]
        require(COMBINE, list(x.shape) == shape, f"x is {shape}, got {list(x.shape)}")
        fits = ids.dim() == 2 and ids.dtype == torch.int64 and ids.shape[0] <= max_tokens
        require(COMBINE, fits, "topk_idx is int64 [T, K]")
        fits = weights.shape == ids.shape and weights.dtype == torch.float32
        require(COMBINE, fits, "topk_weights is float32 [T, K]")
        exchange.require_written(COMBINE, prefix, src_info.view(-1, 3), group.size())
        exchange.require_ids(COMBINE, ids, num_experts, allow_none=known.allows_none)
        return [hidden_size, num_experts, max_tokens, ids.shape[1]]

    exchange.agree(group, COMBINE, check)
    counts = exchange.counts_of(prefix, group.size())
    return exchange.combine(group, COMBINE, x[: int(counts.sum())], counts, ids, weights)


def _check_sent(x: Tensor, ids: Tensor, sizes: Sizes, num_ranks: int, known: Settings) -> None:
    require(DISPATCH, x.dim() == 2 and x.is_contiguous(), "x is 2-D and contiguous")
    require(DISPATCH, x.dtype == torch.bfloat16, f"x is bfloat16, got {x.dtype}")
    fits = ids.dim() == 2 and ids.is_contiguous() and ids.shape[0] == x.shape[0]
    require(DISPATCH, fits and ids.dtype == torch.int64, "topk_idx is int64 [T, K], contiguous")
    (num_tokens, hidden_size), num_topk = x.shape, ids.shape[1]
    max_tokens, num_experts = sizes.max_tokens, sizes.num_experts
    rule = f"num_max_dispatch_tokens_per_rank is {max_tokens}, less than {num_tokens} tokens"
    require(DISPATCH, num_tokens <= max_tokens, rule)
    fits = num_experts > 0 and num_experts % num_ranks == 0
    require(DISPATCH, fits, f"num_experts is a multiple of {num_ranks}, got {num_experts}")
    exchange.require_ids(DISPATCH, ids, num_experts, allow_none=known.allows_none)
    is_a2 = current_machine().soc is Soc.A2
    limit = 256 if is_a2 else 512
    fits = 1 <= max_tokens <= limit
    require_size(DISPATCH, fits, f"1 to {limit} tokens a rank, got {max_tokens}")
    require_size(DISPATCH, 1 <= num_topk <= 16, f"K is 1 to 16, got {num_topk}")
    require_size(DISPATCH, num_experts <= 512, f"E is at most 512, got {num_experts}")
    limit = 7168 if is_a2 else 8192
    fits = 1024 <= hidden_size <= limit and (not is_a2 or hidden_size % 32 == 0)
    require_size(DISPATCH, fits, f"H is 1024 to {limit} (A2: by 32), got {hidden_size}")
    require_size(DISPATCH, 2 <= num_ranks <= 768, f"2 to 768 ranks, got {num_ranks}")
    needed = low_latency_bytes(max_tokens, num_topk, hidden_size, num_experts)
    require_window(DISPATCH, needed, WINDOW_VARIABLES)
