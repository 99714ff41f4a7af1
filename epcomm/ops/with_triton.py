"""Move, sum and number rows by kernels; import this only where triton is installed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from epcomm.kernels.rows.gather import gather_rows
from epcomm.kernels.rows.scatter import scatter_tokens
from epcomm.kernels.rows.sends import count_sends, order_sends
from epcomm.kernels.rows.slot_index import number_slots
from epcomm.kernels.rows.sums import dot_rows, sum_parts, sum_rows
from epcomm.kernels.rows.swiglu import swiglu, swiglu_backward
from epcomm.kernels.rows.tiles import row_stride
from epcomm.kernels.rows.token_layout import write_token_layout
from epcomm.platforms.cuda import start_read
from epcomm.records import SlotIndex
from epcomm.types import align_up, sum_dtype


class TritonRowOps:
    """The kernels of epcomm/kernels/rows, with memory for what they write.

    epcomm/ops/slots.py takes them for the devices that it lists, and plain torch for others.
    """

    count_sends = staticmethod(count_sends)
    scatter_tokens = staticmethod(scatter_tokens)
    start_read = staticmethod(start_read)
    swiglu = staticmethod(swiglu)
    swiglu_backward = staticmethod(swiglu_backward)
    write_token_layout = staticmethod(write_token_layout)

    def gather_rows(self, rows: Tensor, row_of_slot: Tensor) -> Tensor:
        """Return the row of each slot, [C, H], zeros for -1."""
        rows = _with_adjacent_columns(rows)
        out = rows.new_empty(row_of_slot.shape[0], rows.shape[1])
        gather_rows(rows, row_of_slot, out)
        return out

    def sum_members(self, rows: Tensor, table: Tensor, weights: Tensor | None) -> Tensor:
        """Return the sums of the rows that each line of a table names: [targets, H]."""
        rows = _with_adjacent_columns(rows)
        out = rows.new_empty(table.shape[0], rows.shape[1])
        # The weights of a caller may be a column of another tensor.
        sum_rows(rows, table, out, None if weights is None else weights.contiguous())
        return out

    def sum_parts(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sums over the first dimension of [W, T, H]."""
        if parts.stride(2) != 1 or parts.stride(0) % row_stride(parts[0]) != 0:
            parts = parts.contiguous()
        out = parts.new_empty(parts.shape[1:], dtype=dtype)
        sum_parts(parts, out)
        return out

    def dot_rows(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the sum over the columns of the products of two [N, H], in sum_dtype(): [N]."""
        left, right = _with_adjacent_columns(left), _with_adjacent_columns(right)
        out = left.new_empty(left.shape[0], dtype=sum_dtype(left.dtype))
        dot_rows(left, right, out)
        return out

    def index_slots(
        self,
        ids: Tensor,
        weights: Tensor | None,
        counts: Tensor,
        size: Sequence[int] | int,
        *,
        first_expert: int,
        expert_alignment: int,
    ) -> tuple[SlotIndex, Tensor]:
        """Return the expert-major index over received rows, and the weight of each slot."""
        num_local, device = counts.shape[0], ids.device
        host_counts = None if isinstance(size, int) else tuple(size)
        if isinstance(size, int):
            num_slots, is_dense = size, False
        else:
            num_slots = sum(align_up(count, expert_alignment) for count in size)
            is_dense = num_slots == sum(size)

        def integers(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        row_of_slot, slots_of_row = integers(num_slots), integers(*ids.shape)
        num_tokens, first_slot = integers(num_local), integers(num_local + 1)
        has_weights = weights is not None
        slot_weights = torch.empty(
            num_slots if has_weights else 0,
            dtype=weights.dtype if has_weights else torch.float32,
            device=device,
        )
        if not is_dense:
            row_of_slot.fill_(-1)
            slot_weights.zero_()
        number_slots(
            _with_adjacent_columns(ids),
            None if weights is None else _with_adjacent_columns(weights),
            counts,
            (row_of_slot, slots_of_row, slot_weights, num_tokens, first_slot),
            first_expert=first_expert,
            expert_alignment=expert_alignment,
        )
        index = SlotIndex(
            row_of_slot=row_of_slot,
            slots_of_row=slots_of_row,
            num_tokens_per_expert=num_tokens,
            first_slot=first_slot,
            host_num_tokens_per_expert=host_counts,
            expert_alignment=expert_alignment,
            is_dense=is_dense,
        )
        return index, slot_weights

    def order_sends(
        self, topk_ids: Tensor, header: Tensor, *, rows_at: int, num_local: int
    ) -> Tensor:
        """Return the rows that carry each token to each rank, [T, W]."""
        shape = (topk_ids.shape[0], header.shape[0])
        row_of_rank = torch.empty(shape, dtype=torch.int32, device=topk_ids.device)
        order_sends(topk_ids, header, row_of_rank, rows_at=rows_at, num_local=num_local)
        return row_of_rank


def _with_adjacent_columns(rows: Tensor) -> Tensor:
    return rows if rows.shape[1] <= 1 or rows.stride(1) == 1 else rows.contiguous()
