"""Pack received rows into slots, differentiably: backward is a gather and a sum, no scatter-add."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from epcomm.ops.slots import gather_rows, reduce_rows, slots_by_row
from epcomm.records import SlotIndex


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, index: SlotIndex) -> Tensor:
        ctx.index = index  # type: ignore[attr-defined]
        return gather_rows(rows, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_slots: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        index: SlotIndex = ctx.index  # type: ignore[attr-defined]
        return reduce_rows(grad_slots, slots_by_row(index)), None


def pack(rows: Tensor, index: SlotIndex) -> Tensor:
    """Copy the received row of each slot, [R, H] to [C, H], in expert-major order.

    Differentiable in rows: the gradient of a row is the sum over its slots, in k order.
    Padding slots are zero, and their gradient is ignored.
    Host sync: none.
    """
    if index.row_of_slot is None:
        return rows
    return _Pack.apply(rows, index)
