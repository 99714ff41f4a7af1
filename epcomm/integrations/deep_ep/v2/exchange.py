"""One dispatch of V2: what is asked for, and what arrived, on epcomm's buffers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.errors import EPError
from epcomm.integrations.deep_ep.normal import (
    ReceivedRows,
    RowExchange,
    Rows,
    detached,
    dispatch_rows,
    return_rows,
    send_columns,
    spec_of,
)
from epcomm.integrations.deep_ep.ranks import Options, Ranks
from epcomm.records import SlotIndex

# 16 B, in words of an int32.
_VECTOR_WORDS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchRequest:
    """One dispatch of T tokens on new routes; see ElasticBuffer.dispatch.

    max_tokens: M.   do_cpu_sync: sizes are exact, and the host waits for them.
    num_sms: as the handle tells it.   asked_sms: as the caller asks for them, None for any number.
    """

    rows: Rows
    topk_idx: Tensor
    topk_weights: Tensor | None
    recv_stats: Tensor | None
    num_experts: int
    max_tokens: int
    expert_alignment: int
    num_sms: int
    asked_sms: int | None
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrived:
    """Holds what one dispatch brought to this rank.

    brought_sources: `sources`, where the dispatch brought them, else None.
    topk_ids: [R, K], int64, experts of this rank or -1.
    topk_weights: [R, K], float32; None where none were given. Those for other ranks too, unless
        rows expand, and are handed out with slot_weights.
    index, slot_weights: the slots over the rows.
    way: of the rows.
    rank, num_ranks, max_tokens: this rank, W and M.
    is_row: [R], bool, rows that came; None: all did.
    """

    brought_sources: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor | None
    index: SlotIndex
    slot_weights: Tensor
    way: RowExchange
    rank: int
    num_ranks: int
    max_tokens: int
    is_row: Tensor | None

    @cached_property
    def sources(self) -> Tensor:
        """Source rank * M + token of each row, [R], int32.

        Collective: at the first read, unless the dispatch brought them.   Host sync: none.
        """
        if self.brought_sources is not None:
            return self.brought_sources
        return _send_words(self.way, _own_sources(self.way, self.max_tokens))[:, 0].contiguous()

    @property
    def most_messages(self) -> int:
        """The tokens that came, each counted once; with static sizes the most that can come."""
        return self.way.num_rows if self.is_row is None else self.num_ranks * self.max_tokens

    @property
    def row_of_slot(self) -> Tensor:
        """The row of each slot, [C], int32, -1 for padding."""
        assert self.index.row_of_slot is not None, "rows have an index over them"
        return self.index.row_of_slot

    @property
    def slots_of_row(self) -> Tensor:
        """The slots of each row, [R, K], int32, -1 for none."""
        assert self.index.slots_of_row is not None, "rows have an index over them"
        return self.index.slots_of_row

    def ends_of_ranks(self) -> Tensor:
        """Return where the rows of each source rank end, [W], int32. Host sync: none."""
        if self.is_row is None:
            counts = self.way.exchange_plan.rows_from_ranks()
        else:
            # As many places for each rank.
            counts = self.is_row.view(self.num_ranks, -1).sum(1)
        return counts.cumsum(0).to(torch.int32)


def exchange(
    ranks: Ranks, request: DispatchRequest, error: EPError | None, *, num_combines: int
) -> tuple[ReceivedRows, Arrived]:
    """Send the tokens of a request.

    Weights of experts of other ranks, which rows that do not expand are handed out with, come in an
    exchange of their own, and sources with them; else sources come when they are read.

    error: why this rank takes part without tokens, if it does.   num_combines: of the buffer, by
        which the other ranks bring the results of this dispatch home, if they do nothing else.

    Collective: yes.   Host sync: one with do_cpu_sync, else none.
    Raises:
        ShapeError, CapacityError: the call of some rank cannot be; on every rank with do_cpu_sync
            and on CPUs, else there alone, and the other ranks get NaN from combine.
    """
    rows, topk_idx, weights = request.rows, request.topk_idx, request.topk_weights
    hidden_size = rows.x.shape[1]
    if error is not None:
        rows, topk_idx, weights = _none_of(rows), topk_idx[:0].to(torch.int64), None
    is_static = not request.do_cpu_sync
    received = dispatch_rows(
        ranks,
        rows,
        topk_idx,
        topk_idx.new_zeros(topk_idx.shape, dtype=torch.float32) if weights is None else weights,
        spec_of(
            rows,
            topk_idx.shape[1],
            request.num_experts // ranks.size,
            expert_alignment=request.expert_alignment,
            max_tokens=request.max_tokens if is_static else None,
            num_sms=request.asked_sms,
        ),
        options=Options(
            num_max_tokens_per_rank=request.max_tokens,
            has_topk_weights=request.topk_weights is not None,
            do_expand=request.do_expand,
        ),
        error=error,
    )
    way, brings_weights = (
        received.exchange,
        request.topk_weights is not None and not request.do_expand,
    )
    if is_static and ranks.reads_faults:
        way.buffer.check()
    elif is_static and error is not None:
        # No host of the others hears of it: they go on, to sums of NaN, and wait for this rank.
        if brings_weights:
            _send_words(way, torch.zeros(0, 1, dtype=torch.int32, device=ranks.device))
        zeros = received.rows.x.new_zeros(way.num_rows, hidden_size, dtype=torch.bfloat16)
        for _ in range(num_combines):
            return_rows(way, zeros)
    if error is not None:
        raise error
    slot_weights = received.dispatched.slot_weights
    assert slot_weights is not None, "weights travel in normal mode"
    sources, received_weights = None, None if weights is None else received.topk_weights
    if weights is not None and brings_weights:
        own = _own_sources(way, request.max_tokens)
        columns = _send_words(way, torch.cat([own, weights.contiguous().view(torch.int32)], dim=1))
        sources = columns[:, 0].contiguous()
        received_weights = columns[:, 1 : 1 + weights.shape[1]].contiguous().view(torch.float32)
    return received, Arrived(
        brought_sources=sources,
        topk_ids=received.topk_ids,
        topk_weights=received_weights,
        index=received.dispatched.index,
        slot_weights=slot_weights,
        way=way,
        rank=ranks.rank,
        num_ranks=ranks.size,
        max_tokens=request.max_tokens,
        is_row=(received.topk_ids >= 0).any(1) if is_static else None,
    )


def send_weights(way: RowExchange, topk_weights: Tensor) -> Tensor:
    """Send weights [T, K], float32, along a way; [R, K], those of experts of other ranks too.

    Collective: yes.   Host sync: none.
    """
    words = _send_words(way, detached(topk_weights).contiguous().view(torch.int32))
    return words[:, : way.spec.top_k].contiguous().view(torch.float32)


def _own_sources(way: RowExchange, max_tokens: int) -> Tensor:
    """Return this rank * M + token of its tokens, [T, 1], int32."""
    tokens = torch.arange(way.num_tokens, dtype=torch.int32, device=way.device)
    return (tokens + way.rank * max_tokens).unsqueeze(1)


def _send_words(way: RowExchange, words: Tensor) -> Tensor:
    """Send [T, N], int32, along a way, in whole vectors, which every buffer carries; [R, N + gap].

    Collective: yes.   Host sync: none.
    """
    return send_columns(way, F.pad(words, (0, -words.shape[1] % _VECTOR_WORDS)))


def _none_of(rows: Rows) -> Rows:
    return Rows(x=rows.x[:0], scales=None if rows.scales is None else rows.scales[:0])
