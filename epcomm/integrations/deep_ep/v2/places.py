"""The places of received rows in the tensors that V2 hands out, and back.

An element is what a place holds: a slot where rows expand, else a row. V2 packs elements without
gaps between ranks, and behind the last one its tensors are undefined.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.integrations.deep_ep.normal import Rows
from epcomm.integrations.deep_ep.v2.exchange import Arrived
from epcomm.types import align_up

# 16 B of scale words: the bulk copies of a GEMM start at such a column.
_SCALE_COLUMN_ALIGNMENT_WORDS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Where elements are in the tensors of the caller; none of this reads on the host.

    num_places, num_elements: N, and the elements that a combine takes.
    element_of_place: [N], int64; None: place p holds element p. Anything behind the last one.
    row_of_message: [N'], int64, the row of each received token, which is counted once; None: all
        rows, as they lie.
    is_used: [N], bool; None: all places are.
    """

    num_places: int
    num_elements: int
    element_of_place: Tensor | None
    row_of_message: Tensor | None
    is_used: Tensor | None

    def to_elements(self, placed: Tensor) -> Tensor:
        """Bring what lies in places, [N, ...], to elements."""
        if self.element_of_place is None:
            return placed[: self.num_elements]
        elements = placed.new_zeros(self.num_elements, *placed.shape[1:])
        return elements.index_copy_(0, self.element_of_place, placed)

    def from_elements(self, elements: Tensor) -> Tensor:
        """Bring elements to their places, [N, ...]."""
        order = self.element_of_place
        return elements if order is None else _select(elements, order)


def places_of(arrived: Arrived, *, do_expand: bool) -> Places:
    """Return the places of what arrived, in the order of (source rank, token)."""
    messages, is_used, most = None, None, arrived.most_messages
    if arrived.is_row is not None:
        messages = torch.argsort(~arrived.is_row, stable=True)[:most]
        is_used = torch.arange(most, device=messages.device) < arrived.is_row.sum()
    if not do_expand:
        return Places(
            num_places=most,
            num_elements=arrived.way.num_rows,
            element_of_place=messages,
            row_of_message=messages,
            is_used=is_used,
        )
    num_slots = arrived.row_of_slot.shape[0]
    return Places(
        num_places=num_slots,
        num_elements=num_slots,
        element_of_place=None,
        row_of_message=messages,
        is_used=arrived.row_of_slot >= 0,
    )


def place_rows(
    rows: Rows, arrived: Arrived, places: Places, *, do_expand: bool, is_sf_col_major: bool
) -> Rows:
    """Return received rows [R, H] and their scales at the places of their elements, [N, H]."""
    if do_expand:
        row_of_place = places.from_elements(arrived.row_of_slot).clamp(min=0)
    else:
        row_of_place = places.element_of_place
    if row_of_place is not None:
        scales = None if rows.scales is None else _select(rows.scales, row_of_place)
        rows = Rows(x=_select(rows.x, row_of_place), scales=scales)
    if not is_sf_col_major or rows.scales is None:
        return rows
    num_rows, num_words = rows.scales.shape
    stride = (1, align_up(num_rows, _SCALE_COLUMN_ALIGNMENT_WORDS))
    by_column = rows.scales.new_empty_strided((num_rows, num_words), stride)
    return Rows(x=rows.x, scales=by_column.copy_(rows.scales))


def zero_padding(tensor: Tensor | None, places: Places) -> None:
    """Write zeros to the places, [N, ...], that hold no element."""
    if tensor is None or places.is_used is None:
        return
    tensor = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    is_empty = ~places.is_used
    tensor.masked_fill_(is_empty.unsqueeze(1) if tensor.dim() > 1 else is_empty, 0)


def _select(rows: Tensor, index: Tensor) -> Tensor:
    """Select rows; torch cannot index eight-bit floats, which are viewed as bytes."""
    if rows.shape[0] == 0:
        # No row came, and the places hold padding alone.
        return rows.new_zeros(index.shape[0], *rows.shape[1:])
    movable = rows.view(torch.uint8) if rows.itemsize == 1 else rows
    return movable.index_select(0, index).view(rows.dtype)
