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
# The places of the tensors that this rank knows without the others.
_CHANNEL_PREFIX, _IS_IN_RANK, _SEND_HEAD = 1, 4, 5


class NormalHandle(tuple[Tensor, ...]):
    """The tuple that V1 returns; programs pass it on and read none of it.

    rank_prefix_matrix [W, W], int32: column `rank` counts received rows up to and with each source.
    channel_prefix_matrix [W, C], int32: rows sent to each rank up to and with each channel.
    recv_channel_prefix_matrix [W, C], int32: rows from each rank before each channel.
    recv_src_idx [R], int32: the token at its source that a received row is.
    is_token_in_rank [T, W], bool: the caller's own tensor.
    send_head [T, W], int32: place of a token in the queue of its channel, -1 where it is not sent.

    The tensors are made when they are read. channel_prefix_matrix, is_token_in_rank and send_head
    are of this rank's own tokens, and reading them is local. Reading one of the other three, or all
    six, is collective the first time: what a row is at its source travels along the way then, so
    all ranks must read at the same place, and none may where a rank has refused the dispatch.
    It needs no close: what it stands for lives as long as it is held.
    """

    way: RowWay
    is_in_rank: Tensor
    channels: int
    # R with rows that nobody sent, H, T.
    sizes: tuple[int, int, int]
    # Of rows that may be fewer than have memory, else None.
    static_index: SlotIndex | None
    # channel_prefix_matrix and send_head; what has travelled, in the order of the tuple.
    _own: tuple[Tensor, Tensor] | None
    _travelled: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def of(cls, received: Received, is_in_rank: Tensor, *, channels: int, hidden_size: int) -> Self:
        """Make the handle of a dispatch of V1 with so many channels. Local."""
        handle = cls()
        handle.way, handle.is_in_rank, handle.channels = received.way, is_in_rank, channels
        handle.sizes = (received.rows.x.shape[0], hidden_size, is_in_rank.shape[0])
        is_static = received.dispatched.index.host_num_tokens_per_expert is None
        handle.static_index = received.dispatched.index if is_static else None
        handle._own = handle._travelled = None
        return handle

    def __len__(self) -> int:
        return _NUM_TENSORS

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._read())

    def __getitem__(self, place: SupportsIndex | slice) -> Any:  # noqa: ANN401 - as a tuple has it
        if isinstance(place, slice):
            return tuple(self[each] for each in range(_NUM_TENSORS)[place])
        number = range(_NUM_TENSORS)[place]
        if number == _IS_IN_RANK:
            return self.is_in_rank
        if number in (_CHANNEL_PREFIX, _SEND_HEAD):
            return self._read_own()[number == _SEND_HEAD]
        return self._read()[number]

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    # That of a tuple compares what a tuple holds, which is nothing here.
    def __ne__(self, other: object) -> bool:
        return self is not other

    def __repr__(self) -> str:
        return f"<NormalHandle of R, H, T = {self.sizes} on rank {self.way.rank}>"

    def _read(self) -> tuple[Tensor, ...]:
        """Return the six tensors. Collective: the first time."""
        if self._travelled is None:
            self._travelled = _travelled_of(self)
        rank_prefix, before, src_idx = self._travelled
        prefix, send_head = self._read_own()
        return rank_prefix, prefix, before, src_idx, self.is_in_rank, send_head

    def _read_own(self) -> tuple[Tensor, Tensor]:
        """Return channel_prefix_matrix and send_head. Local."""
        if self._own is None:
            self._own = _channels(self.is_in_rank, self.channels, _share(self))
        return self._own


def _share(handle: NormalHandle) -> int:
    """Return the tokens of a channel, of which the last may have fewer."""
    return max(-(-handle.is_in_rank.shape[0] // max(handle.channels, 1)), 1)


def _travelled_of(handle: NormalHandle) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of received rows. Collective: source tokens travel along the way."""
    is_in_rank, channels, rank = handle.is_in_rank, handle.channels, handle.way.rank
    num_tokens, num_ranks = is_in_rank.shape
    device = is_in_rank.device
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
    # Four columns are 16 bytes, which every buffer carries.
    columns = (torch.full_like(tokens, rank), tokens, tokens // _share(handle), tokens)
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
    return rank_prefix, before.contiguous(), src_idx


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
