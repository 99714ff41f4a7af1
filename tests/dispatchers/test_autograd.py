"""Backward of combine in one process, over a buffer that records its calls."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from epcomm.buffers.base import Buffer
from epcomm.buffers.nvlink.low_latency_state import NVLinkLowLatencyExchangePlan
from epcomm.dispatchers import autograd
from epcomm.dispatchers.autograd import combine_rows
from epcomm.records import ExchangePlan, Handle, RowsCombineInput, SlotIndex
from epcomm.types import RowsPer

NUM_ROWS, HIDDEN = 3, 4


class OneMemoryBuffer:
    """A buffer whose rows are overwritten by the next call, as caps.batches_in_flight allows."""

    def __init__(self) -> None:
        self.received = torch.full((NUM_ROWS, HIDDEN), 2.0)

    def combine(
        self, rows: Tensor, exchange_plan: ExchangePlan | None, **_: object
    ) -> tuple[Tensor, None]:
        return rows.detach().clone(), None

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        return self.received.view(NUM_ROWS, HIDDEN)


def combine_input_of(rows: Tensor) -> RowsCombineInput:
    integers = torch.zeros(NUM_ROWS, dtype=torch.int32)
    index = SlotIndex(
        row_of_slot=integers,
        slots_of_row=integers.view(NUM_ROWS, 1),
        num_tokens_per_expert=integers[:1],
        first_slot=integers[:2],
        host_num_tokens_per_expert=None,
        expert_alignment=1,
    )
    exchange_plan = NVLinkLowLatencyExchangePlan(
        index=index, num_tokens=NUM_ROWS, num_rows=NUM_ROWS, batch=0
    )
    handle = Handle(owner=None, num_tokens=NUM_ROWS)
    # The dispatch had no gradients, but the expert results need some.
    handle.open(exchange_plan, call=1, needs_backward=False)
    return RowsCombineInput(
        hidden_states=rows, rows_per=RowsPer.ROW, slot_weights=None, handle=handle
    )


def test_gradients_of_rows_outlive_the_buffers_next_call() -> None:
    rows = torch.ones(NUM_ROWS, HIDDEN, requires_grad=True)
    buffer = OneMemoryBuffer()
    y = combine_rows(cast(Buffer, buffer), combine_input_of(rows), torch.float32)
    y.sum().backward()
    buffer.received.fill_(7.0)
    assert (rows.grad == 2).all()


def test_combine_without_gradients_makes_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(autograd._Call, "apply", made.append)
    rows = torch.ones(NUM_ROWS, HIDDEN)
    y = combine_rows(cast(Buffer, OneMemoryBuffer()), combine_input_of(rows), torch.float32)
    assert not made
    assert torch.equal(y, rows)
