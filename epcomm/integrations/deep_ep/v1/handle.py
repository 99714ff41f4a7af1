"""The handle of a normal dispatch of V1: six tensors, and the exchange of the rows.

A program may keep the six tensors in place of the handle, for instance by
`ctx.save_for_backward(*handle)`. `SavedHandles` finds the exchange by their memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from epcomm.errors import HandleError
from epcomm.integrations.deep_ep.normal import RowExchange

_NUM_TENSORS = 6
# The position of the tensor whose memory stands for the handle.
_CHANNEL_PREFIX = 1
# Fills the tensors whose numbers only the source ranks know: no index, so that indexing fails.
UNKNOWN = torch.iinfo(torch.int32).min


class SavedHandles:
    """Finds the exchange of a plain tuple or list of the six tensors of a handle.

    The key is the memory of channel_prefix_matrix, which a handle allocates: autograd may return
    other tensor objects in the same memory. An entry is removed, and its exchange freed, by the
    first call after the program has freed this memory.
    """

    def __init__(self) -> None:
        self._exchanges: dict[StorageWeakRef, RowExchange] = {}

    def keep(self, channel_prefix: Tensor, exchange: RowExchange) -> None:
        """Keep the exchange for as long as the memory of channel_prefix_matrix exists."""
        self.drop_freed()
        self._exchanges[StorageWeakRef(channel_prefix.untyped_storage())] = exchange

    def drop_freed(self) -> None:
        """Free the exchanges whose tensors the program has freed."""
        for key in [key for key in self._exchanges if key.expired()]:
            del self._exchanges[key]

    def find(self, handle: object) -> RowExchange | None:
        """Return the exchange of a handle or of its six tensors, or None if there is none."""
        if isinstance(handle, NormalHandle):
            return handle.exchange
        if not isinstance(handle, tuple | list) or len(handle) != _NUM_TENSORS:
            return None
        prefix = handle[_CHANNEL_PREFIX]
        if not isinstance(prefix, Tensor):
            return None
        return self._exchanges.get(StorageWeakRef(prefix.untyped_storage()))


class NormalHandle(tuple[Tensor, ...]):
    """The tuple that V1 returns; programs pass it on and read none of it.

    0: rank_prefix_matrix [W, W], int32; column `rank` has the received rows up to and with each
        source, the other columns are 0.
    1: channel_prefix_matrix [W, C], int32; rows sent to each rank up to and with each channel.
    2: recv_channel_prefix_matrix [W, C], int32, filled with UNKNOWN.
    3: recv_src_idx [R], int32, filled with UNKNOWN.
    4: is_token_in_rank [T, W], bool; the caller's own tensor.
    5: send_head [T, W], int32; position of a token in the queue of its channel, -1 where it is not
        sent.

    Reading, printing and comparing are local: the tensors are computed from what the dispatch left
    on this rank, at the first read. The numbers of 2 and 3 are on the source ranks, and do not
    travel: no call reads them.
    Lifetime: a handle needs no close; its memory lives as long as the program holds it, or its
        tensors.
    """

    exchange: RowExchange
    is_in_rank: Tensor
    channels: int
    _saved: SavedHandles

    @classmethod
    def of(
        cls, exchange: RowExchange, is_in_rank: Tensor, saved: SavedHandles, channels: int
    ) -> Self:
        """Make the handle of a dispatch of V1 with this number of channels. Local.

        saved: of the Buffer whose calls will take the handle.
        """
        handle = cls()
        handle.exchange, handle.is_in_rank = exchange, is_in_rank
        handle.channels, handle._saved = channels, saved
        return handle

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The six tensors. Local."""
        exchange, is_in_rank = self.exchange, self.is_in_rank
        num_ranks = is_in_rank.shape[1]
        rank_prefix = is_in_rank.new_zeros(num_ranks, num_ranks, dtype=torch.int32)
        rank_prefix[:, exchange.rank] = exchange.exchange_plan.rows_from_ranks().cumsum(0)
        prefix, send_head = _channels(is_in_rank, self.channels)
        before = torch.full_like(prefix, UNKNOWN)
        src_idx = is_in_rank.new_full((exchange.max_rows,), UNKNOWN, dtype=torch.int32)
        self._saved.keep(prefix, exchange)
        return rank_prefix, prefix, before, src_idx, is_in_rank, send_head

    def __len__(self) -> int:
        return _NUM_TENSORS

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __getitem__(self, position: SupportsIndex | slice) -> Any:  # noqa: ANN401 - as a tuple has it
        return self.tensors[position]

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    # That of a tuple compares what a tuple holds, which is nothing here.
    def __ne__(self, other: object) -> bool:
        return self is not other

    def __repr__(self) -> str:
        exchange = self.exchange
        sizes = (exchange.max_rows, exchange.spec.hidden_size, exchange.num_tokens)
        return f"<NormalHandle of R, H, T = {sizes} on rank {exchange.rank}>"

    def __reduce__(self) -> NoReturn:
        raise HandleError(
            f"{self!r} cannot be pickled or copied: it belongs to the memory of one Buffer; pass "
            "the handle itself"
        )


def _channels(is_in_rank: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Return [W, C] and [T, W]: each channel takes the same number of consecutive tokens."""
    num_tokens, num_ranks = is_in_rank.shape
    share = max(-(-num_tokens // channels), 1)
    padded = torch.zeros(channels * share, num_ranks, dtype=torch.int32, device=is_in_rank.device)
    padded[:num_tokens] = is_in_rank
    by_channel = padded.view(channels, share, num_ranks)
    prefix = by_channel.sum(1).cumsum(0).T.to(torch.int32).contiguous()
    positions = (by_channel.cumsum(1) - 1).view(-1, num_ranks)[:num_tokens].to(torch.int32)
    return prefix, positions.masked_fill(~is_in_rank, -1).contiguous()
