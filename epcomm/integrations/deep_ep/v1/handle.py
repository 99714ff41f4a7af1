"""The handle of a normal dispatch of V1: six tensors, and the way of the rows behind them."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from epcomm.errors import HandleError
from epcomm.integrations.deep_ep.normal import Received, RowWay, send_columns
from epcomm.integrations.deep_ep.ranks import Ranks


class NormalHandle(tuple[Tensor, ...]):
    """The tuple that V1 returns; programs pass it on and read none of it.

    rank_prefix_matrix [W, W], int32: column `rank` counts received rows up to and with each source.
    channel_prefix_matrix [W, C], int32: rows sent to each rank up to and with each channel.
    recv_channel_prefix_matrix [W, C], int32: rows from each rank before each channel.
    recv_src_idx [R], int32: the token at its source that a received row is.
    is_token_in_rank [T, W], bool: the caller's own tensor.
    send_head [T, W], int32: place of a token in the queue of its channel, -1 where it is not sent.

    It needs no close: what it stands for lives as long as it is held.
    """

    way: RowWay
    # R with rows that nobody sent, H, T.
    sizes: tuple[int, int, int]

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        received: Received,
        is_in_rank: Tensor,
        *,
        channels: int,
        hidden_size: int,
    ) -> Self:
        """Make the handle of a dispatch. Collective: source tokens travel along the way."""
        num_tokens, num_ranks = is_in_rank.shape
        share = max(-(-num_tokens // max(channels, 1)), 1)
        device = is_in_rank.device
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
        columns = torch.stack([torch.full_like(tokens, ranks.rank), tokens, tokens // share], dim=1)
        source, token, channel = send_columns(received.way, columns).unbind(1)
        from_rank = torch.bincount(source, minlength=num_ranks)
        rank_prefix = torch.zeros(num_ranks, num_ranks, dtype=torch.int32, device=device)
        rank_prefix[:, ranks.rank] = from_rank.cumsum(0)
        width = channels + 1
        by_channel = torch.bincount(source * width + channel + 1, minlength=num_ranks * width)
        before = by_channel.view(num_ranks, width).cumsum(1)[:, :channels].to(torch.int32)
        num_rows = received.rows.x.shape[0]
        src_idx = torch.empty(num_rows, dtype=torch.int32, device=device)
        src_idx[: token.shape[0]] = token
        prefix, send_head = _channels(is_in_rank, channels, share)
        handle = cls((rank_prefix, prefix, before.contiguous(), src_idx, is_in_rank, send_head))
        handle.way, handle.sizes = received.way, (num_rows, hidden_size, num_tokens)
        return handle


def handle_of(handle: object, function: str, where: str) -> NormalHandle:
    """Return a handle as dispatch() made it.

    Raises:
        HandleError: no dispatch of normal mode made it.
    """
    if not isinstance(handle, NormalHandle):
        raise HandleError(
            f"{function}: handle is {type(handle).__name__}, expected what dispatch() returned, as "
            f"it was returned ({where}); keep the handle and pass it on"
        )
    return handle


def _channels(is_in_rank: Tensor, channels: int, share: int) -> tuple[Tensor, Tensor]:
    """Return [W, C] and [T, W]: each channel takes a `share` of the tokens in turn."""
    num_tokens, num_ranks = is_in_rank.shape
    padded = torch.zeros(channels * share, num_ranks, dtype=torch.int32, device=is_in_rank.device)
    padded[:num_tokens] = is_in_rank
    by_channel = padded.view(channels, share, num_ranks)
    prefix = by_channel.sum(1).cumsum(0).T.to(torch.int32).contiguous()
    places = (by_channel.cumsum(1) - 1).view(-1, num_ranks)[:num_tokens].to(torch.int32)
    return prefix, places.masked_fill(~is_in_rank, -1).contiguous()
