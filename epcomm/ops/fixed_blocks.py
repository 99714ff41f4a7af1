"""Multiply rows by the matrices of their experts in blocks of fixed sizes, on CPUs.

The libraries behind torch choose a kernel, its order of sums and the work of each thread by the
number of rows: with MKL and AVX2 the last rows of a product have other bits if they are fewer than
four. Here every product has one of three shapes, so the bits of a row depend on no other row if
all positions in a block are treated alike. A plan tests that: equal rows in, equal rows out, for
the shapes of its experts.

Each expert's rows are padded to whole blocks. Counts 3 0 17, blocks of 16 and 8 rows: slots 0 1 2
are rows 0 1 2 of a block of 8, slots 3 to 19 are a block of 16 and one of 8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from epcomm.ops.activation import activate
from epcomm.types import align_up
from epcomm.weights.unquantized import ExpertFormat, ExpertWeights

# Sizes of blocks. Threads share the rows of a large block, which is nearly as fast as a product of
# all rows; the last rows of an expert are padded to the smallest size.
BLOCK_SIZES = (256, 64, 8)
# The most elements that torch's elementwise functions compute on one thread. With more, a thread
# may begin within a row, and the last elements of a thread's part are not vectorised.
_ONE_THREAD = 32768


class FixedShapes(ABC):
    """Products of rows and the matrices of their experts, in shapes that no batch changes."""

    @abstractmethod
    def products(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Return rows [rows, K] times the matrix of their expert, of [L, K, N]; no gradients."""

    @abstractmethod
    def sum_products(self, rows: Tensor, other: Tensor, like: Tensor) -> Tensor:
        """Return the product of each expert's rows [rows, K], transposed, and `other` [rows, N].

        like: [L, K, N], whose shape, dtype and device the result has.

        There is one product for all rows of an expert.
        """

    @abstractmethod
    def biases(self, bias: Tensor) -> Tensor:
        """Return the bias of the expert of each row, [rows, *]; bias is [L, *]. Differentiable."""

    def activated(self, gate_up: Tensor, expert_format: ExpertFormat) -> Tensor:
        """Activate [rows, 2I]. Differentiable."""
        return activate(gate_up, expert_format)

    def run(self, rows: Tensor, weights: ExpertWeights) -> Tensor:
        """Return the result of each row, [rows, H], without router weights. Differentiable."""
        gate_up = self._multiply(rows, weights.gate_up_matrices(), weights.gate_up_bias)
        hidden = self.activated(gate_up, weights.format)
        return self._multiply(hidden, weights.down_matrices(), weights.down_bias)

    def _multiply(self, rows: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:
        products = _Multiply.apply(rows, matrices, self)
        assert isinstance(products, Tensor), "a Function returns what forward() does"
        return products if bias is None else products + self.biases(bias)


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks(FixedShapes):
    """Blocks of consecutive rows of one expert each, which together are all rows.

    experts: the expert of each block.   sizes: its rows.   num_experts: L.
    slot_of_row: [rows], int64, the slot that is this row; -1: padding, a row of zeros.
    row_of_slot: [C], int64, its inverse; -1: a slot that no expert computes.
    """

    experts: tuple[int, ...]
    sizes: tuple[int, ...]
    num_experts: int
    slot_of_row: Tensor
    row_of_slot: Tensor

    @classmethod
    def of(
        cls,
        first_slot: Sequence[int],
        counts: Sequence[int],
        num_slots: int,
        sizes: Sequence[int] = BLOCK_SIZES,
    ) -> Blocks:
        """Divide the slots of experts into blocks.

        first_slot: [L + 1].   counts: [L].   sizes: of blocks, each a multiple of the next.
        """
        experts, used = list[int](), list[int]()
        slot_of_row, row_of_slot = list[Tensor](), torch.full((num_slots,), -1, device="cpu")
        num_rows = 0
        for expert, count in enumerate(counts):
            padded = left = align_up(count, sizes[-1])
            for size in sizes:
                experts += [expert] * (left // size)
                used += [size] * (left // size)
                left %= size
            slots = torch.arange(first_slot[expert], first_slot[expert] + count, device="cpu")
            slot_of_row.append(torch.nn.functional.pad(slots, (0, padded - count), value=-1))
            row_of_slot[slots] = torch.arange(num_rows, num_rows + count, device="cpu")
            num_rows += padded
        return cls(
            experts=tuple(experts),
            sizes=tuple(used),
            num_experts=len(counts),
            slot_of_row=torch.cat(slot_of_row),
            row_of_slot=row_of_slot,
        )

    def biases(self, bias: Tensor) -> Tensor:
        return bias[self._expert_of_row]

    @cached_property
    def _expert_of_row(self) -> Tensor:
        experts = torch.tensor(self.experts, dtype=torch.int64, device="cpu")
        return experts.repeat_interleave(torch.tensor(self.sizes, device="cpu", dtype=torch.int64))

    def products(self, rows: Tensor, matrices: Tensor) -> Tensor:
        out, each = rows.new_empty(rows.shape[0], matrices.shape[2]), matrices.unbind()
        parts = zip(rows.split(self.sizes), out.split(self.sizes), self.experts, strict=True)
        for part, out_part, expert in parts:
            torch.mm(part, each[expert], out=out_part)
        return out

    def activated(self, gate_up: Tensor, expert_format: ExpertFormat) -> Tensor:
        # In parts of fixed sizes, on one thread each.
        if not self.sizes:
            return activate(gate_up, expert_format)
        fitting = [size for size in BLOCK_SIZES if size * gate_up.shape[1] <= _ONE_THREAD]
        most = fitting[0] if fitting else BLOCK_SIZES[-1]
        part_sizes = [min(size, most) for size in self.sizes for _ in range(max(1, size // most))]
        return torch.cat([activate(part, expert_format) for part in gate_up.split(part_sizes)])

    def sum_products(self, rows: Tensor, other: Tensor, like: Tensor) -> Tensor:
        sums = torch.zeros_like(like)
        ends = torch.bincount(self._expert_of_row, minlength=self.num_experts).tolist()
        for total, part, other_part in zip(sums, rows.split(ends), other.split(ends), strict=True):
            torch.mm(part.T, other_part, out=total)
        return sums


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, matrices: Tensor, shapes: FixedShapes) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.shapes = shapes  # type: ignore[attr-defined]
        return shapes.products(rows, matrices)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        rows, matrices = ctx.saved_tensors  # type: ignore[attr-defined]
        shapes: FixedShapes = ctx.shapes  # type: ignore[attr-defined]
        needs_rows, needs_matrices = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
        grad = grad.contiguous()
        return (
            shapes.products(grad, matrices.transpose(1, 2)) if needs_rows else None,
            shapes.sum_products(rows, grad, matrices) if needs_matrices else None,
            None,
        )


def run_blocks(slots: Tensor, weights: ExpertWeights, blocks: Blocks) -> Tensor:
    """Return the result of each slot, [C, H], without router weights. Differentiable."""
    return _select(blocks.run(_select(slots, blocks.slot_of_row), weights), blocks.row_of_slot)


def _select(rows: Tensor, source: Tensor) -> Tensor:
    """Return the row of each source, zeros for -1, whose gradient is not read. Differentiable."""
    if rows.shape[0] == 0:
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    selected = rows.index_select(0, source.clamp(min=0))
    # In place, because a copy of all rows takes as long as a tenth of the products.
    return selected.index_fill_(0, (source < 0).nonzero().squeeze(1), 0)
