"""The handle of a normal dispatch of V1: six tensors, and the way of the rows of the dispatch.

A program may keep the six tensors in place of the handle, for instance by
`ctx.save_for_backward(*handle)`. `SavedHandles` finds the way of the rows by their memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, SupportsIndex

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from epcomm.errors import HandleError
from epcomm.integrations.deep_ep.normal import Received, RowWay, send_columns
from epcomm.records import SlotIndex

_NUM_TENSORS = 6
# The positions of the tensors that this rank computes alone.
_CHANNEL_PREFIX, _IS_IN_RANK = 1, 4
_OWN = (0, _CHANNEL_PREFIX, 5)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What combine, and dispatch along a handle, need of the dispatch that made the handle.

    sizes: R with rows that nobody sent, H, T.
    """

    way: RowWay
    sizes: tuple[int, int, int]


class SavedHandles:
    """Finds the batch of a plain tuple or list of the six tensors of a handle.

    The key is the memory of channel_prefix_matrix, which a handle allocates: autograd may return
    other tensor objects in the same memory. An entry is removed, and its batch freed, by the first
    call after the program has freed this memory.
    """

    def __init__(self) -> None:
        self._batches: dict[StorageWeakRef, Batch] = {}

    def keep(self, channel_prefix: Tensor, batch: Batch) -> None:
        """Keep the batch for as long as the memory of channel_prefix_matrix exists."""
        self.drop_freed()
        self._batches[StorageWeakRef(channel_prefix.untyped_storage())] = batch

    def drop_freed(self) -> None:
        """Free the batches whose tensors the program has freed."""
        for key in [key for key in self._batches if key.expired()]:
            del self._batches[key]

    def find(self, handle: object) -> Batch | None:
        """Return the batch of a handle or of its six tensors, or None if there is none."""
        if isinstance(handle, NormalHandle):
            return handle.batch
        if not isinstance(handle, tuple | list) or len(handle) != _NUM_TENSORS:
            return None
        prefix = handle[_CHANNEL_PREFIX]
        if not isinstance(prefix, Tensor):
            return None
        return self._batches.get(StorageWeakRef(prefix.untyped_storage()))


class NormalHandle(tuple[Tensor, ...]):
    """The tuple that V1 returns; programs pass it on and read none of it.

    rank_prefix_matrix [W, W], int32: column `rank` counts received rows up to and with each source.
    channel_prefix_matrix [W, C], int32: rows sent to each rank up to and with each channel.
    recv_channel_prefix_matrix [W, C], int32: rows from each rank before each channel.
    recv_src_idx [R], int32: the token at its source that a received row is.
    is_token_in_rank [T, W], bool: the caller's own tensor.
    send_head [T, W], int32: place of a token in the queue of its channel, -1 where it is not sent.

    The tensors are made when they are read. Reading recv_channel_prefix_matrix or recv_src_idx, or
    all six, is collective the first time: the source ranks send the numbers of their tokens, so
    all ranks must read at the same point, and none may where a rank has refused the dispatch.
    Reading one of the other four, or the repr, is local.
    A handle needs no close: its memory lives as long as the program holds it, or its tensors.
    """

    batch: Batch
    is_in_rank: Tensor
    channels: int
    # Set where rows may be fewer than there is memory for.
    static_index: SlotIndex | None
    _saved: SavedHandles
    # The tensors of _OWN; recv_channel_prefix_matrix and recv_src_idx.
    _own: tuple[Tensor, Tensor, Tensor] | None
    _travelled: tuple[Tensor, Tensor] | None

    @classmethod
    def of(
        cls,
        received: Received,
        is_in_rank: Tensor,
        saved: SavedHandles,
        *,
        channels: int,
        hidden_size: int,
    ) -> Self:
        """Make the handle of a dispatch of V1 with so many channels. Local.

        saved: of the Buffer that will get the handle back.
        """
        handle = cls()
        sizes = (received.rows.x.shape[0], hidden_size, is_in_rank.shape[0])
        handle.batch = Batch(way=received.way, sizes=sizes)
        handle.is_in_rank, handle.channels, handle._saved = is_in_rank, channels, saved
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
        if number in _OWN:
            return self._read_own()[_OWN.index(number)]
        return self._read()[number]

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    # That of a tuple compares what a tuple holds, which is nothing here.
    def __ne__(self, other: object) -> bool:
        return self is not other

    def __repr__(self) -> str:
        return f"<NormalHandle of R, H, T = {self.batch.sizes} on rank {self.batch.way.rank}>"

    def _read(self) -> tuple[Tensor, ...]:
        """Return the six tensors. Collective: the first time."""
        if self._travelled is None:
            self._travelled = _travelled_of(self)
        before, src_idx = self._travelled
        rank_prefix, prefix, send_head = self._read_own()
        return rank_prefix, prefix, before, src_idx, self.is_in_rank, send_head

    def _read_own(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors that this rank computes alone. Local."""
        if self._own is None:
            way, num_ranks = self.batch.way, self.is_in_rank.shape[1]
            rank_prefix = self.is_in_rank.new_zeros(num_ranks, num_ranks, dtype=torch.int32)
            rank_prefix[:, way.rank] = way.exchange_plan.rows_from_ranks().cumsum(0)
            prefix, send_head = _channels(self.is_in_rank, self.channels, _share(self))
            self._own = rank_prefix, prefix, send_head
            self._saved.keep(prefix, self.batch)
        return self._own


def _share(handle: NormalHandle) -> int:
    """Return the tokens of a channel, of which the last may have fewer."""
    return max(-(-handle.is_in_rank.shape[0] // max(handle.channels, 1)), 1)


def _travelled_of(handle: NormalHandle) -> tuple[Tensor, Tensor]:
    """Return recv_channel_prefix_matrix and recv_src_idx.

    Collective: the numbers of tokens are sent along the way.
    """
    is_in_rank, channels, way = handle.is_in_rank, handle.channels, handle.batch.way
    num_tokens, num_ranks = is_in_rank.shape
    device = is_in_rank.device
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
    # Four columns are 16 bytes, which every buffer carries.
    columns = (torch.full_like(tokens, way.rank), tokens, tokens // _share(handle), tokens)
    received = send_columns(way, torch.stack(columns, dim=1))
    if handle.static_index is not None:
        assert handle.static_index.slots_of_row is not None, "rows have an index over them"
        received = received[(handle.static_index.slots_of_row >= 0).any(1)]
    source, token, channel, _ = received.unbind(1)
    width = channels + 1
    by_channel = torch.bincount(source * width + channel + 1, minlength=num_ranks * width)
    before = by_channel.view(num_ranks, width).cumsum(1)[:, :channels].to(torch.int32)
    src_idx = torch.empty(handle.batch.sizes[0], dtype=torch.int32, device=device)
    src_idx[: token.shape[0]] = token
    return before.contiguous(), src_idx


def handle_error(handle: object, function: str, where: str) -> HandleError:
    """Return the error for a handle that no dispatch of normal mode made. Local."""
    return HandleError(
        f"{function}: handle is {type(handle).__name__}, expected what dispatch() of this Buffer "
        f"returned, or its six tensors ({where}); pass the handle, or the tensors without a copy"
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
