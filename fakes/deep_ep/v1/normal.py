"""Imitate normal mode: a row for each (token, rank), and a combine that sums without weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fakes.deep_ep.limits import require, require_size
from fakes.deep_ep.v1.config import Config, num_channels, require_nvl_bytes
from fakes.deep_ep.v1.handle import NormalHandle
from fakes.deep_ep.v1.layout import require_ids
from fakes.deep_ep.v1.transport import exchange, gather, pack, unpack
from fakes.deep_ep.v1.undefined import undefined

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
        """Return the tensors that travel, in this order."""
        tensors = (self.x, self.scales, self.topk_idx, self.topk_weights)
        return [tensor for tensor in tensors if tensor is not None]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The caller's layout: int32 [W] and int32 [E]."""

    per_rank: Tensor
    per_expert: Tensor


@dataclass(frozen=True, kw_only=True)
class Received:
    """The results of a dispatch; scales, ids and weights are those that were sent."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are not None."""
        all_of_them = (self.x, self.scales, self.topk_idx, self.topk_weights)
        return [tensor for tensor in all_of_them if tensor is not None]


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
    """Check what the real package asserts about the tensors of a dispatch.

    Raises:
        RuntimeError: an assertion fails; with the words of the package.
    """
    x = sent.x
    require_size(ranks.size in _RANKS, f"num_ranks in {_RANKS}, the kernels' cases")
    require(x.dim() == 2 and x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
    require(x.dtype in (torch.bfloat16, torch.float8_e4m3fn), "x is bfloat16 or float8_e4m3fn")
    require_size(
        x.shape[1] * x.element_size() % _VECTOR_BYTES == 0,
        "(x.size(1) * x.element_size()) % sizeof(int4) == 0",
    )
    require(is_in_rank.dtype == torch.bool, "is_token_in_rank.scalar_type() == torch::kBool")
    require(is_in_rank.is_contiguous(), "is_token_in_rank.is_contiguous()")
    require(
        list(is_in_rank.shape) == [x.shape[0], ranks.size],
        "is_token_in_rank.size(0) == x.size(0) and is_token_in_rank.size(1) == num_ranks",
    )
    _check_scales(sent)
    _check_topk(sent)
    token_bytes = sum(column.shape[1] * column.element_size() for column in sent.columns()) + 4
    require_nvl_bytes(ranks.config, ranks.size, token_bytes, ranks.num_nvl_bytes)


def _check_scales(sent: Sent) -> None:
    scales = sent.scales
    # The real one would take FP8 without scales for a tensor; nobody could read it.
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


def notify(
    sent: Sent, counts: Counts, is_in_rank: Tensor, ranks: Ranks, num_worst_tokens: int
) -> tuple[NormalHandle, Tensor]:
    """Tell every rank how much comes.

    Returns:
        The handle, its src_idx still undefined, and rows for each local expert.
    """
    _check_counts(sent, counts, is_in_rank, ranks)
    channels = num_channels(ranks.config)
    channel_prefix, send_head = _channels(is_in_rank, channels)
    message = torch.cat([counts.per_rank, counts.per_expert, channel_prefix.flatten()])
    messages = gather(ranks.group, message)
    num_experts = counts.per_expert.shape[0]
    num_local = num_experts // ranks.size
    first_expert = ranks.size + ranks.rank * num_local
    per_expert = messages[:, first_expert : first_expert + num_local].sum(0)
    rank_prefix = torch.zeros(ranks.size, ranks.size, dtype=torch.int32)
    rank_prefix[:, ranks.rank] = messages[:, ranks.rank].cumsum(0)
    all_channels = messages[:, ranks.size + num_experts :].view(ranks.size, ranks.size, channels)
    before = torch.zeros(ranks.size, channels, dtype=torch.int32)
    before[:, 1:] = all_channels[:, ranks.rank, :-1]
    num_rows = int(rank_prefix[-1, ranks.rank])
    # The real kernel would write behind its tensors. Of all ranks, so that none waits for another.
    most = int(messages[:, : ranks.size].sum(0).max())
    require(num_worst_tokens == 0 or most <= num_worst_tokens, "rows <= num_worst_tokens")
    handle = NormalHandle(
        rank_prefix=rank_prefix,
        channel_prefix=channel_prefix,
        recv_channel_prefix=before,
        src_idx=undefined((num_worst_tokens or num_rows,), torch.int32),
        is_in_rank=is_in_rank,
        send_head=send_head,
    )
    return handle, per_expert


def _check_counts(sent: Sent, counts: Counts, is_in_rank: Tensor, ranks: Ranks) -> None:
    per_rank, per_expert = counts.per_rank, counts.per_expert
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


def _channels(is_in_rank: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """channel_prefix [W, C] and send_head [T, W]: each channel takes ceil(T / C) tokens in turn."""
    num_tokens, num_ranks = is_in_rank.shape
    share = max(-(-num_tokens // channels), 1)
    padded = torch.zeros(channels * share, num_ranks, dtype=torch.int32)
    padded[:num_tokens] = is_in_rank
    by_channel = padded.view(channels, share, num_ranks)
    prefix = by_channel.sum(1).cumsum(0).T.to(torch.int32).contiguous()
    places = (by_channel.cumsum(1) - 1).view(-1, num_ranks)[:num_tokens].to(torch.int32)
    return prefix, places.masked_fill(~is_in_rank, -1).contiguous()


def dispatch(sent: Sent, handle: NormalHandle, ranks: Ranks, num_local: int) -> Received:
    """Move the rows; writes the handle's src_idx.

    Args:
        sent: checked.
        handle: of notify(), or of an earlier dispatch of the same tokens.
        ranks: who takes part.
        num_local: experts of a rank, to localise ids; not read without ids.
    """
    # Rank by rank, within each by token.
    tokens = handle.is_in_rank.T.nonzero()[:, 1]
    src = tokens.to(torch.int32).unsqueeze(1)
    columns = [src, *(column[tokens] for column in sent.columns())]
    recv_splits = handle.recv_splits(ranks.rank)
    rows = exchange(ranks.group, pack(columns), handle.send_splits(), recv_splits)
    num_rows, capacity = rows.shape[0], handle.src_idx.shape[0]
    recv_src, *parts = (_padded(part, capacity) for part in unpack(rows, columns))
    handle.src_idx.copy_(recv_src.squeeze(1))
    received = iter(parts)
    x = next(received)
    scales = None if sent.scales is None else next(received)
    if sent.topk_idx is None:
        return Received(x=x, scales=scales, topk_idx=None, topk_weights=None)
    ids, weights = next(received), next(received)
    is_here = ids // num_local == ranks.rank
    is_here[num_rows:] = False
    ids = torch.where(is_here, ids - ranks.rank * num_local, -1)
    # Weights of rows that nobody sent stay undefined.
    weights[:num_rows].masked_fill_(~is_here[:num_rows], 0.0)
    return Received(x=x, scales=scales, topk_idx=ids, topk_weights=weights)


def _padded(rows: Tensor, capacity: int) -> Tensor:
    padded = undefined((capacity, rows.shape[1]), rows.dtype)
    padded[: rows.shape[0]] = rows
    return padded


def combine(
    x: Tensor,
    topk_weights: Tensor | None,
    biases: list[Tensor],
    handle: NormalHandle,
    ranks: Ranks,
) -> tuple[Tensor, Tensor | None]:
    """Sum the rows of each token over its ranks in float32, and the weights likewise."""
    _check_combined(x, topk_weights, biases, handle, ranks)
    num_rows = int(handle.rank_prefix[-1, ranks.rank])
    columns = [x[:num_rows]] if topk_weights is None else [x[:num_rows], topk_weights[:num_rows]]
    send_splits = handle.recv_splits(ranks.rank)
    rows = exchange(ranks.group, pack(columns), send_splits, handle.send_splits())
    parts = unpack(rows, columns)
    num_tokens = handle.is_in_rank.shape[0]
    total = torch.zeros(num_tokens, x.shape[1])
    for bias in biases:
        total += bias.float()
    _add_rows(total, parts[0], handle)
    if topk_weights is None:
        return total.to(x.dtype), None
    weights = torch.zeros(num_tokens, topk_weights.shape[1])
    _add_rows(weights, parts[1], handle)
    return total.to(x.dtype), weights


def _add_rows(total: Tensor, rows: Tensor, handle: NormalHandle) -> None:
    # Adding rank by rank uses no index twice in one addition and defines the order of the sum.
    splits = handle.send_splits()
    for is_sent, part in zip(handle.is_in_rank.T, rows.split(splits), strict=True):
        total[is_sent] += part.float()


def _check_combined(
    x: Tensor,
    topk_weights: Tensor | None,
    biases: list[Tensor],
    handle: NormalHandle,
    ranks: Ranks,
) -> None:
    require_size(ranks.size in _RANKS, f"num_ranks in {_RANKS}, the kernels' cases")
    require(x.dim() == 2 and x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
    require(x.dtype == torch.bfloat16, "x is bfloat16")
    require(handle.src_idx.shape[0] == x.shape[0], "src_idx.size(0) == num_tokens")
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
        shape = [handle.is_in_rank.shape[0], x.shape[1]]
        require(list(bias.shape) == shape, "bias.size(0) == num_recv_tokens")
    require_nvl_bytes(ranks.config, ranks.size, row_bytes + 4 + 4 * num_topk, ranks.num_nvl_bytes)
