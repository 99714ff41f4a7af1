"""The handle of a normal dispatch of V1: six tensors, and the way of the rows behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self, SupportsIndex

import torch
from torch import Tensor

from epcomm.errors import HandleError
from epcomm.integrations.deep_ep.normal import Received, RowWay, send_columns
from epcomm.records import SlotIndex

_NUM_TENSORS = 6


class NormalHandle(tuple[Tensor, ...]):
    """The tuple that V1 returns; programs pass it on and read none of it.

    rank_prefix_matrix [W, W], int32: column `rank` counts received rows up to and with each source.
    channel_prefix_matrix [W, C], int32: rows sent to each rank up to and with each channel.
    recv_channel_prefix_matrix [W, C], int32: rows from each rank before each channel.
    recv_src_idx [R], int32: the token at its source that a received row is.
    is_token_in_rank [T, W], bool: the caller's own tensor.
    send_head [T, W], int32: place of a token in the queue of its channel, -1 where it is not sent.

    The tensors are made when one of them is read. That is a collective operation, for what a row is
    at its source travels along the way then, and so all ranks read handles at the same place.
    It needs no close: what it stands for lives as long as it is held.
    """

    way: RowWay
    is_in_rank: Tensor
    channels: int
    # R with rows that nobody sent, H, T.
    sizes: tuple[int, int, int]
    # Of rows that may be fewer than have memory, else None.
    static_index: SlotIndex | None
    _tensors: tuple[Tensor, ...] | None

    @classmethod
    def of(cls, received: Received, is_in_rank: Tensor, *, channels: int, hidden_size: int) -> Self:
        """Make the handle of a dispatch of V1 with so many channels. Local."""
        handle = cls()
        handle.way, handle.is_in_rank, handle.channels = received.way, is_in_rank, channels
        handle.sizes = (received.rows.x.shape[0], hidden_size, is_in_rank.shape[0])
        is_static = received.dispatched.index.host_num_tokens_per_expert is None
        handle.static_index = received.dispatched.index if is_static else None
        handle._tensors = None
        return handle

    def __len__(self) -> int:
        return _NUM_TENSORS

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._read())

    def __getitem__(self, place: SupportsIndex | slice) -> Any:  # noqa: ANN401 - as a tuple has it
        return self._read()[place]

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def _read(self) -> tuple[Tensor, ...]:
        if self._tensors is None:
            self._tensors = _tensors_of(self)
        return self._tensors


def _tensors_of(handle: NormalHandle) -> tuple[Tensor, ...]:
    """Return the six tensors. Collective: source tokens travel along the way."""
    is_in_rank, channels, rank = handle.is_in_rank, handle.channels, handle.way.rank
    num_tokens, num_ranks = is_in_rank.shape
    share = max(-(-num_tokens // max(channels, 1)), 1)
    device = is_in_rank.device
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
    # Four columns are 16 bytes, which every buffer carries.
    columns = (torch.full_like(tokens, rank), tokens, tokens // share, tokens)
    received = send_columns(handle.way, torch.stack(columns, dim=1))
    if handle.static_index is not None:
        assert handle.static_index.slots_of_row is not None, "rows have an index over them"
        received = received[(handle.static_index.slots_of_row >= 0).any(1)]
    source, token, channel, _ = received.unbind(1)
    from_rank = torch.bincount(source, minlength=num_ranks)
    rank_prefix = torch.zeros(num_ranks, num_ranks, dtype=torch.int32, device=device)
    rank_prefix[:, rank] = from_rank.cumsum(0)
    width = channels + 1
    by_channel = torch.bincount(source * width + channel + 1, minlength=num_ranks * width)
    before = by_channel.view(num_ranks, width).cumsum(1)[:, :channels].to(torch.int32)
    src_idx = torch.empty(handle.sizes[0], dtype=torch.int32, device=device)
    src_idx[: token.shape[0]] = token
    prefix, send_head = _channels(is_in_rank, channels, share)
    return rank_prefix, prefix, before.contiguous(), src_idx, is_in_rank, send_head


def handle_error(handle: object, function: str, where: str) -> HandleError:
    """Return what is wrong with a handle that no dispatch of normal mode made. Local."""
    return HandleError(
        f"{function}: handle is {type(handle).__name__}, expected what dispatch() returned, as "
        f"it was returned ({where}); keep the handle and pass it on"
    )


def _channels(is_in_rank: Tensor, channels: int, share: int) -> tuple[Tensor, Tensor]:
    """Return [W, C] and [T, W]: each channel takes a `share` of the tokens in turn."""
    num_tokens, num_ranks = is_in_rank.shape
    padded = torch.zeros(channels * share, num_ranks, dtype=torch.int32, device=is_in_rank.device)
    padded[:num_tokens] = is_in_rank
    by_channel = padded.view(channels, share, num_ranks)
    prefix = by_channel.sum(1).cumsum(0).T.to(torch.int32).contiguous()
    places = (by_channel.cumsum(1) - 1).view(-1, num_ranks)[:num_tokens].to(torch.int32)
    return prefix, places.masked_fill(~is_in_rank, -1).contiguous()
