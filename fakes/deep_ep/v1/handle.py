"""Name the tuples that dispatch returns for combine, which are opaque for callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fakes.deep_ep.limits import require

# Bits of a layout range below its beginning.
_COUNT_BITS = 32


@dataclass(frozen=True, kw_only=True)
class NormalHandle:
    """The handle that a normal dispatch leaves on a rank; tensors are int32 unless noted.

    rank_prefix [W, W]: column `rank` counts received rows up to and with each source; the other
        columns are 0 in the recording.
    channel_prefix [W, C]: rows sent to each rank up to and with each channel.
    recv_channel_prefix [W, C]: rows received from each rank before each channel.
    src_idx [N]: the token at its source that a received row is.
    is_in_rank: bool [T, W], the caller's own tensor.
    send_head [T, W]: place of a token in the queue of its channel, -1 where it is not sent.
    """

    rank_prefix: Tensor
    channel_prefix: Tensor
    recv_channel_prefix: Tensor
    src_idx: Tensor
    is_in_rank: Tensor
    send_head: Tensor

    def as_tuple(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the handle in the form of the real package."""
        return (
            self.rank_prefix,
            self.channel_prefix,
            self.recv_channel_prefix,
            self.src_idx,
            self.is_in_rank,
            self.send_head,
        )

    @classmethod
    def of(cls, handle: tuple[Tensor, ...], num_ranks: int, channels: int) -> Self:
        """Read a handle back.

        Raises:
            RuntimeError: it belongs to other ranks or another Config, or was never written.
        """
        prefix, channel_prefix, recv_channel_prefix, src_idx, is_in_rank, send_head = handle
        require(list(prefix.shape) == [num_ranks] * 2, "rank_prefix_matrix is [num_ranks] * 2")
        require(
            channel_prefix.shape[1] == channels, "channel_prefix_matrix.size(1) == num_channels"
        )
        for matrix in (prefix, channel_prefix, recv_channel_prefix, src_idx, send_head):
            require(matrix.dtype == torch.int32 and matrix.is_contiguous(), "handle is int32")
        written = bool(((prefix >= 0) & (prefix <= src_idx.shape[0])).all())
        require(written, "the fake: the handle is undefined; wait for its event")
        return cls(
            rank_prefix=prefix,
            channel_prefix=channel_prefix,
            recv_channel_prefix=recv_channel_prefix,
            src_idx=src_idx,
            is_in_rank=is_in_rank,
            send_head=send_head,
        )

    def recv_splits(self, rank: int) -> list[int]:
        """Return the number of rows from each source."""
        return self.rank_prefix[:, rank].diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()

    def send_splits(self) -> list[int]:
        """Return the number of rows for each rank."""
        return self.is_in_rank.sum(0).tolist()


@dataclass(frozen=True, kw_only=True)
class LowLatencyHandle:
    """src_info int32 [L, W*M]: tokens at their sources; layout_range int64 [L, W]; M, H, E."""

    src_info: Tensor
    layout_range: Tensor
    max_tokens: int
    hidden_size: int
    num_experts: int

    def as_tuple(self) -> tuple[Tensor, Tensor, int, int, int]:
        """Return the handle in the form of the real package."""
        return (
            self.src_info,
            self.layout_range,
            self.max_tokens,
            self.hidden_size,
            self.num_experts,
        )

    @classmethod
    def of(cls, handle: tuple[Tensor, Tensor, int, int, int]) -> Self:
        """Read a handle back."""
        src_info, layout_range, max_tokens, hidden_size, num_experts = handle
        return cls(
            src_info=src_info,
            layout_range=layout_range,
            max_tokens=max_tokens,
            hidden_size=hidden_size,
            num_experts=num_experts,
        )

    def ranges(self) -> list[list[tuple[int, int]]]:
        """First row and number of rows, for each local expert and source.

        Raises:
            RuntimeError: nobody has written them, or a later dispatch has overwritten them.
        """
        num_rows = self.src_info.shape[1]
        ranges = [
            [(value >> _COUNT_BITS, value & ((1 << _COUNT_BITS) - 1)) for value in values]
            for values in self.layout_range.tolist()
        ]
        written = all(
            0 <= first <= first + count <= num_rows for row in ranges for first, count in row
        )
        require(written, "the fake: the handle is undefined; call its hook, hold at most 2 results")
        return ranges


def layout_range(first: int, count: int) -> int:
    """Pack first row and row count into one number."""
    return first << _COUNT_BITS | count
