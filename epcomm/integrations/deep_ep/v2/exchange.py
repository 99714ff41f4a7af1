"""One dispatch of V2: what is asked for, and what arrived, on epcomm's buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.errors import EPError
from epcomm.integrations.deep_ep.normal import (
    Received,
    Rows,
    RowWay,
    Sizes,
    dispatch_rows,
    send_columns,
)
from epcomm.integrations.deep_ep.ranks import Ranks
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

    sources: [R], int32, source rank * M + token of each row.
    topk_ids: [R, K], int64, experts of this rank or -1.
    topk_weights: [R, K], float32, those for other ranks too; None where none were given.
    index, slot_weights: the slots over the rows.
    way: of the rows.
    rank, num_ranks, max_tokens: this rank, W and M.
    is_row: [R], bool, rows that came; None: all did.
    """

    sources: Tensor
    topk_ids: Tensor
    topk_weights: Tensor | None
    index: SlotIndex
    slot_weights: Tensor
    way: RowWay
    rank: int
    num_ranks: int
    max_tokens: int
    is_row: Tensor | None

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
        ranks = (self.sources // self.max_tokens).long()
        if self.is_row is not None:
            ranks = torch.where(self.is_row, ranks, self.num_ranks)
        counts = torch.zeros(self.num_ranks + 1, dtype=torch.int32, device=ranks.device)
        counts.scatter_add_(0, ranks, torch.ones_like(ranks, dtype=torch.int32))
        return counts[: self.num_ranks].cumsum(0).to(torch.int32)


def exchange(
    ranks: Ranks, request: DispatchRequest, error: EPError | None
) -> tuple[Received, Arrived]:
    """Send the tokens of a request, and beside them what a handle of V2 tells of each.

    error: why this rank takes part without tokens, if it does.

    Collective: yes.   Host sync: one with do_cpu_sync, else none.
    Raises:
        ShapeError, CapacityError: the call of some rank cannot be; on every rank with do_cpu_sync
            and on CPUs, else there alone, and the other ranks get NaN from combine.
    """
    rows, topk_idx, weights = request.rows, request.topk_idx, request.topk_weights
    if error is not None:
        rows, topk_idx, weights = _none_of(rows), topk_idx[:0].to(torch.int64), None
    is_static = not request.do_cpu_sync
    received = dispatch_rows(
        ranks,
        rows,
        topk_idx,
        topk_idx.new_zeros(topk_idx.shape, dtype=torch.float32) if weights is None else weights,
        request.num_experts,
        sizes=Sizes(
            expert_alignment=request.expert_alignment,
            max_tokens=request.max_tokens if is_static else None,
            num_sms=request.asked_sms,
        ),
        error=error,
    )
    way = received.way
    if is_static and ranks.device.type == "cpu":
        way.buffer.check()
    if error is not None:
        raise error
    tokens = torch.arange(topk_idx.shape[0], dtype=torch.int32, device=topk_idx.device)
    columns = (tokens + ranks.rank * request.max_tokens).unsqueeze(1)
    top_k = topk_idx.shape[1]
    if weights is not None:
        columns = torch.cat([columns, weights.contiguous().view(torch.int32)], dim=1)
    # Whole vectors, which every buffer carries.
    columns = send_columns(way, F.pad(columns, (0, -columns.shape[1] % _VECTOR_WORDS)))
    received_weights = columns[:, 1 : 1 + top_k].contiguous().view(torch.float32)
    return received, Arrived(
        sources=columns[:, 0].contiguous(),
        topk_ids=received.topk_ids,
        topk_weights=None if weights is None else received_weights,
        index=received.index,
        slot_weights=received.slot_weights,
        way=way,
        rank=ranks.rank,
        num_ranks=ranks.size,
        max_tokens=request.max_tokens,
        is_row=(received.topk_ids >= 0).any(1) if is_static else None,
    )


def _none_of(rows: Rows) -> Rows:
    return Rows(x=rows.x[:0], scales=None if rows.scales is None else rows.scales[:0])
