"""Check what the real package asserts about calls of normal mode: RuntimeError in its words."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.integrations.deep_ep import Config
from fakes.deep_ep.limits import require, require_size
from fakes.deep_ep.strict_v1.sizes import num_channels, require_ids, require_nvl_bytes

# Bytes that the kernels move at once.
_VECTOR_BYTES = 16
# Ranks for which the kernels are compiled.
_RANKS = (2, 4, 8)
# One lane of a warp for each.
_MAX_TOPK = 32
_MAX_LOCAL_EXPERTS = 1024


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The tensors of a dispatch: x [T, H], scales with FP8, and ids and weights or neither."""

    x: Tensor
    scales: Tensor | None = None
    topk_idx: Tensor | None = None
    topk_weights: Tensor | None = None

    def columns(self) -> list[Tensor]:
        """Return the tensors that are sent, in this order."""
        tensors = (self.x, self.scales, self.topk_idx, self.topk_weights)
        return [tensor for tensor in tensors if tensor is not None]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that take part, with their buffer and Config."""

    group: dist.ProcessGroup
    num_nvl_bytes: int
    config: Config

    @property
    def rank(self) -> int:
        """Return this rank."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.group.size()


def check_sent(sent: Sent, is_in_rank: Tensor, ranks: Ranks) -> None:
    """Check what the real package asserts about the tensors of a dispatch."""
    x = sent.x
    require_size(ranks.size in _RANKS, f"num_ranks in {_RANKS}, the kernels' cases")
    require(x.dim() == 2 and x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
    require(x.dtype in (torch.bfloat16, torch.float8_e4m3fn), "x is bfloat16 or float8_e4m3fn")
    rule = "(x.size(1) * x.element_size()) % sizeof(int4) == 0"
    require_size(x.shape[1] * x.element_size() % _VECTOR_BYTES == 0, rule)
    require(is_in_rank.dtype == torch.bool, "is_token_in_rank.scalar_type() == torch::kBool")
    require(is_in_rank.is_contiguous(), "is_token_in_rank.is_contiguous()")
    rule = "is_token_in_rank.size(0) == x.size(0) and is_token_in_rank.size(1) == num_ranks"
    require(list(is_in_rank.shape) == [x.shape[0], ranks.size], rule)
    _check_scales(sent)
    _check_topk(sent)
    token_bytes = sum(column.shape[1] * column.element_size() for column in sent.columns()) + 4
    require_nvl_bytes(ranks.config, ranks.size, token_bytes, ranks.num_nvl_bytes)


def _check_scales(sent: Sent) -> None:
    scales = sent.scales
    # The real package would accept FP8 without scales, which no expert could read.
    require((scales is not None) == (sent.x.element_size() == 1), "x.element_size() == 1")
    if scales is not None:
        require(scales.dtype in (torch.float32, torch.int32), "x_scales is float32 or int")
        require(scales.dim() == 2, "x_scales->dim() == 2")
        require(scales.shape[0] == sent.x.shape[0], "x_scales->size(0) == num_tokens")


def _check_topk(sent: Sent) -> None:
    ids, weights = sent.topk_idx, sent.topk_weights
    require((ids is None) == (weights is None), "topk_idx.has_value() == topk_weights.has_value()")
    if ids is None or weights is None:
        return
    require(ids.dim() == 2 and ids.is_contiguous(), "topk_idx is 2-D and contiguous")
    require(ids.dtype == torch.int64, "topk_idx.scalar_type() == topk_idx_t")
    require(weights.dim() == 2 and weights.is_contiguous(), "topk_weights is 2-D and contiguous")
    require(weights.shape == ids.shape, "num_topk == topk_weights->size(1)")
    require(ids.shape[0] == sent.x.shape[0], "num_tokens == topk_idx->size(0)")
    require(weights.dtype == torch.float32, "topk_weights->scalar_type() == torch::kFloat32")
    require_size(ids.shape[1] <= _MAX_TOPK, f"num_topk <= {_MAX_TOPK}")
    # The kernel compares pointers, as intranode.cu has it, and stops the process.
    have_memory = _has_memory(ids) == _has_memory(weights)
    require(have_memory, "(topk_idx == nullptr) == (topk_weights == nullptr)")


def _has_memory(tensor: Tensor) -> bool:
    """Whether data_ptr<T>() of C++ is a pointer; a slice without rows keeps that of its tensor."""
    # In Python data_ptr() is 0 for every tensor without elements.
    return tensor.untyped_storage().data_ptr() != 0


def check_counts(
    sent: Sent, per_rank: Tensor, per_expert: Tensor, is_in_rank: Tensor, ranks: Ranks
) -> None:
    """Check the layout that the caller passes: int32 [W] and int32 [E]."""
    for tensor in (per_rank, per_expert):
        require(tensor.dtype == torch.int32, "num_tokens_per_*.scalar_type() == torch::kInt32")
        require(tensor.dim() == 1 and tensor.is_contiguous(), "num_tokens_per_* is contiguous")
    require(per_rank.shape[0] == ranks.size, "num_tokens_per_rank->size(0) == num_ranks")
    num_experts = per_expert.shape[0]
    require(num_experts % ranks.size == 0, "num_tokens_per_expert->size(0) % num_ranks == 0")
    require(num_experts // ranks.size <= _MAX_LOCAL_EXPERTS, "local experts <= 1024")
    # The real kernels would wait for ever for rows that were signalled and never sent.
    is_true = torch.equal(is_in_rank.sum(0, dtype=torch.int32), per_rank)
    require(is_true, "num_tokens_per_rank is the sum of is_token_in_rank")
    if sent.topk_idx is not None:
        require_ids(sent.topk_idx, num_experts)


def check_combined(
    x: Tensor,
    topk_weights: Tensor | None,
    biases: list[Tensor],
    handle: tuple[Tensor, ...],
    ranks: Ranks,
) -> None:
    """Check what the real package asserts about a combine."""
    require_size(ranks.size in _RANKS, f"num_ranks in {_RANKS}, the kernels' cases")
    require(x.dim() == 2 and x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
    require(x.dtype == torch.bfloat16, "x is bfloat16")
    require(handle[3].shape[0] == x.shape[0], "src_idx.size(0) == num_tokens")
    row_bytes = x.shape[1] * x.element_size()
    require_size(row_bytes % _VECTOR_BYTES == 0, "hidden bytes % sizeof(int4) == 0")
    num_topk = 0
    if topk_weights is not None:
        is_fit = topk_weights.dim() == 2 and topk_weights.is_contiguous()
        require(is_fit, "topk_weights->dim() == 2 and topk_weights->is_contiguous()")
        require(topk_weights.shape[0] == x.shape[0], "topk_weights->size(0) == num_tokens")
        require(topk_weights.dtype == torch.float32, "topk_weights is float32")
        num_topk = topk_weights.shape[1]
    for bias in biases:
        require(bias.dim() == 2 and bias.is_contiguous(), "bias is 2-D and contiguous")
        require(bias.dtype == x.dtype, "bias.scalar_type() == x.scalar_type()")
        shape = [handle[4].shape[0], x.shape[1]]
        require(list(bias.shape) == shape, "bias.size(0) == num_recv_tokens")
    require_nvl_bytes(ranks.config, ranks.size, row_bytes + 4 + 4 * num_topk, ranks.num_nvl_bytes)


def check_handle(handle: tuple[Tensor, ...], ranks: Ranks) -> None:
    """Check that a handle belongs to these ranks and their Config, and was written."""
    prefix, channel_prefix, recv_channel_prefix, src_idx, _, send_head = handle
    require(list(prefix.shape) == [ranks.size] * 2, "rank_prefix_matrix is [num_ranks] * 2")
    channels = num_channels(ranks.config)
    require(channel_prefix.shape[1] == channels, "channel_prefix_matrix.size(1) == num_channels")
    for matrix in (prefix, channel_prefix, recv_channel_prefix, src_idx, send_head):
        require(matrix.dtype == torch.int32 and matrix.is_contiguous(), "handle is int32")
    written = bool(((prefix >= 0) & (prefix <= src_idx.shape[0])).all())
    require(written, "the handle is undefined; wait for its event")
