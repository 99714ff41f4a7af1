"""Plan and pack the rows that leave a rank in one dispatch: one row for each (token, rank).

Worked example, 2 ranks, 1 expert each, on rank 0:

    topk_ids [[0, 1], [1, -1]]      token 0 goes to ranks 0 and 1, token 1 to rank 1
    row_of_topk [[0, 1], [2, -1]]   rows leave by rank, then token: 1 row to rank 0, 2 to rank 1
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from epcomm.buffers.row_layout import RowLayout, Scratch, wire_tensor_of
from epcomm.calls.call import DispatchCall
from epcomm.calls.counts import empty_headers, guard_ids, make_headers, seal
from epcomm.calls.header import ROWS, CallKind, CallSign
from epcomm.calls.order import Calls
from epcomm.ops.slots import AnyMembers, MemberTable, count_experts, members_of
from epcomm.protocol import FaultCode, fault_word

if TYPE_CHECKING:
    from epcomm.ops.with_triton import TritonRowOps


@dataclass(frozen=True, kw_only=True, eq=False)
class SendOrder:
    """The N rows that leave this rank, by destination rank, then token.

    token_of_row: [N], int64; None where kernels read rows_of_token instead.
    rows_of_token: the rows that carry each token, by rank.
    row_of_topk: [T, K], the row that carries (t, k), or -1.
    """

    token_of_row: Tensor | None
    rows_of_token: AnyMembers
    row_of_topk: Tensor

    def copy_tokens(self, hidden_states: Tensor, rows: slice, out: Tensor) -> None:
        """Write the tokens [T, H] of a range of the rows; without token_of_row, of all."""
        assert self.token_of_row is not None, "an order in plain torch"
        torch.index_select(hidden_states, 0, self.token_of_row[rows], out=out)


class SendPlan(ABC):
    """The sends of one dispatch while they are planned; the calls below come in their order."""

    def __init__(self, call: DispatchCall, layout: RowLayout, num_local: int) -> None:
        """Begin with what this rank sends, `call`, laid out as `layout`; L is num_local."""
        self._call, self._layout, self._num_local = call, layout, num_local

    @abstractmethod
    def headers(self, calls: Calls, sign: CallSign, *, has_rest: bool) -> tuple[Tensor, Tensor]:
        """Count, and make the headers of the dispatch, see make_headers(), without a host sync.

        Memory is allocated and tokens are converted here, before the header, which can tell other
        ranks of a failure.
        """

    def run_ahead(self) -> None:  # noqa: B027 - plain torch has nothing to do
        """Launch what needs no answer of other ranks."""

    @abstractmethod
    def order(self, num_sends: int) -> SendOrder:
        """Order the rows, whose number the host knows now."""

    @abstractmethod
    def packed(self, order: SendOrder) -> Tensor | Callable[[slice, Tensor], None]:
        """Return all rows as they are sent, or what writes a range of them where it is told."""


class PlainSendPlan(SendPlan):
    """Plans in plain torch."""

    def headers(self, calls: Calls, sign: CallSign, *, has_rest: bool) -> tuple[Tensor, Tensor]:
        call, num_local = self._call, self._num_local
        num_experts = num_local * calls.world_size
        self._topk_ids, fault = guard_ids(call.topk_ids, num_experts, call.error)
        self._destination = torch.div(self._topk_ids, num_local, rounding_mode="floor")
        self._needed = _ranks_needed(self._destination, calls.world_size)
        # Each token is converted once, not once a copy: rows are gathered from the result.
        self._wire = wire_tensor_of(call, self._layout.format)
        counts = (fault, self._needed.sum(0), count_experts(self._topk_ids, num_experts))
        return make_headers(calls, sign, call.flags, counts, has_rest=has_rest)

    def order(self, num_sends: int) -> SendOrder:
        return _order_sends(self._needed, self._destination, num_sends)

    def packed(self, order: SendOrder) -> Callable[[slice, Tensor], None]:
        assert order.token_of_row is not None, "as order() made it"
        token_of_row, weights = order.token_of_row, self._call.topk_weights

        def write(rows: slice, out: Tensor) -> None:
            self._layout.pack_tokens(
                self._wire,
                token_of_row[rows],
                self._topk_ids,
                weights,
                out=out,
            )

        return write


class KernelSendPlan(SendPlan):
    """Plans by kernels: rows are numbered and packed while headers travel and the host reads."""

    def __init__(
        self,
        call: DispatchCall,
        layout: RowLayout,
        num_local: int,
        *,
        ops: TritonRowOps,
        memory: Scratch,
    ) -> None:
        """Plan a call as SendPlan does; rows are packed by `ops` into `memory`."""
        super().__init__(call, layout, num_local)
        self._ops, self._memory = ops, memory

    def headers(self, calls: Calls, sign: CallSign, *, has_rest: bool) -> tuple[Tensor, Tensor]:
        call, num_local = self._call, self._num_local
        self._topk_ids = call.topk_ids.contiguous()
        num_tokens, top_k = self._topk_ids.shape
        self._wire = wire_tensor_of(call, self._layout.format)
        # The most rows that there can be: how many are sent is known when they are packed.
        most = num_tokens * min(top_k, calls.world_size)
        self._rows = self._memory.rows(most, self._layout.row_bytes, torch.uint8)
        words = calls.header(CallKind.DISPATCH, sign, flags=int(call.flags))[:ROWS]
        words[-2] = fault_word(call.error)
        self._header, rest = empty_headers(calls, num_local, has_rest=has_rest)
        self._ops.count_sends(
            self._topk_ids,
            self._header,
            rest,
            tuple(words),
            wrong_ids=int(FaultCode.IDS),
            num_local=num_local,
        )
        seal(self._header)
        return self._header, rest

    def run_ahead(self) -> None:
        self._row_of_rank, self._row_of_topk = self._ops.order_sends(
            self._topk_ids, self._header, rows_at=ROWS, num_local=self._num_local
        )
        layout, rows = self._layout, self._rows
        self._ops.scatter_tokens(
            (
                self._wire.data,
                self._wire.scales,
                self._topk_ids,
                self._call.topk_weights.contiguous(),
            ),
            self._row_of_rank,
            (layout.data(rows), layout.scales(rows), layout.ids(rows), layout.scalars(rows)),
        )

    def order(self, num_sends: int) -> SendOrder:
        self._rows = self._rows[:num_sends]
        return KernelSendOrder(
            token_of_row=None,
            rows_of_token=MemberTable(table=self._row_of_rank),
            row_of_topk=self._row_of_topk,
            ops=self._ops,
        )

    def packed(self, order: SendOrder) -> Tensor:
        return self._rows


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelSendOrder(SendOrder):
    """An order that kernels made, and read."""

    ops: TritonRowOps

    def copy_tokens(self, hidden_states: Tensor, rows: slice, out: Tensor) -> None:
        assert isinstance(self.rows_of_token, MemberTable), "as order() made it"
        nothing = (None, None, None)
        self.ops.scatter_tokens(
            (hidden_states, *nothing), self.rows_of_token.table, (out, *nothing)
        )


def _ranks_needed(destination: Tensor, world_size: int) -> Tensor:
    """Return whether token t goes to rank d, [T, W], bool; destination [T, K] has ranks or -1."""
    # One more column takes the -1 entries and is cut off.
    needed = torch.zeros(
        destination.shape[0], world_size + 1, dtype=torch.bool, device=destination.device
    )
    needed.scatter_(1, torch.where(destination < 0, world_size, destination), True)
    return needed[:, :world_size]


def _order_sends(needed: Tensor, destination: Tensor, num_sends: int) -> SendOrder:
    """Order the rows to send by destination rank, then by token."""
    by_rank = needed.T.flatten().cumsum(0).view(needed.shape[1], needed.shape[0]).T - 1
    row_of_rank = torch.where(needed, by_rank, -1)
    rows_of_token = members_of(row_of_rank, num_sends)
    tokens = torch.arange(needed.shape[0], device=needed.device)
    token_of_row = torch.empty(num_sends, dtype=torch.int64, device=needed.device)
    token_of_row[rows_of_token.flat] = torch.repeat_interleave(
        tokens, needed.sum(1), output_size=num_sends
    )
    picked = row_of_rank.gather(1, destination.clamp(min=0))
    return SendOrder(
        token_of_row=token_of_row,
        rows_of_token=rows_of_token,
        row_of_topk=torch.where(destination >= 0, picked, -1),
    )
