"""Place received messages in the tensors that dispatch() returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.types import align_up
from fakes.deep_ep.v2.handle import EPHandle, topk_idx_t
from fakes.deep_ep.v2.layout import NUM_SOURCE_COLUMNS
from fakes.deep_ep.v2.poison import poisoned
from fakes.deep_ep.v2.records import Arrived, Dispatched, DispatchRequest

# 16 B of scale words: the bulk copies of a GEMM start at such a column.
SCALE_COLUMN_ALIGNMENT_WORDS = 4


@dataclass(frozen=True, kw_only=True)
class _Moves:
    """Message `messages[i]` (its expert number `ks[i]`, if expanded) goes to row `rows[i]`."""

    messages: Tensor
    ks: Tensor
    rows: Tensor
    num_rows: int


def place(request: DispatchRequest, arrived: Arrived, handle: EPHandle) -> Dispatched:
    """Copy messages to their rows; everything else stays poison, or zero where asked."""
    moves = _expanded(arrived, handle) if handle.do_expand else _as_they_came(arrived, handle)
    recv_x = poisoned((moves.num_rows, arrived.x.shape[1]), arrived.x.dtype)
    # torch cannot index eight-bit floating numbers, so they are viewed as bytes.
    x_bytes = recv_x.view(torch.uint8)
    x_bytes[moves.rows] = arrived.x.view(torch.uint8)[moves.messages]
    recv_sf = None
    if arrived.sf is not None:
        recv_sf = _poisoned_scales(arrived.sf, moves.num_rows, request.is_sf_col_major)
        recv_sf[moves.rows] = arrived.sf[moves.messages]
    recv_topk_idx = None
    if not handle.do_expand:
        recv_topk_idx = poisoned((moves.num_rows, request.num_topk), topk_idx_t)
        # Some of the garbage looks valid, as in the recording.
        recv_topk_idx[1::2] = 0
        recv_topk_idx[moves.rows] = arrived.local_idx[moves.messages]
    recv_weights = _place_weights(arrived, handle, moves)
    if request.do_zero_padding:
        gaps = _alignment_gaps(handle)
        for tensor in (x_bytes, recv_sf, recv_weights):
            if tensor is not None:
                tensor[gaps] = 0
    return Dispatched(
        recv_x=recv_x,
        recv_sf=recv_sf,
        recv_topk_idx=recv_topk_idx,
        recv_topk_weights=recv_weights,
        handle=handle,
    )


def _as_they_came(arrived: Arrived, handle: EPHandle) -> _Moves:
    rows = torch.arange(len(arrived.src_idx))
    return _Moves(messages=rows, ks=rows, rows=rows, num_rows=handle.num_recv_tokens)


def _expanded(arrived: Arrived, handle: EPHandle) -> _Moves:
    # Not from arrived.local_idx: cached routes keep the rows of the first dispatch.
    row_of = handle.recv_src_metadata[: len(arrived.src_idx), NUM_SOURCE_COLUMNS:]
    messages, ks = (row_of >= 0).nonzero(as_tuple=True)
    rows = row_of[messages, ks].long()
    return _Moves(messages=messages, ks=ks, rows=rows, num_rows=handle.num_expanded_tokens)


def _place_weights(arrived: Arrived, handle: EPHandle, moves: _Moves) -> Tensor | None:
    weights = arrived.topk_weights
    if weights is None:
        return None
    if handle.do_expand:
        placed = poisoned((moves.num_rows,), weights.dtype)
        placed[moves.rows] = weights[moves.messages, moves.ks]
    else:
        # Weights of experts on other ranks are kept too.
        placed = poisoned((moves.num_rows, weights.shape[1]), weights.dtype)
        placed[moves.rows] = weights[moves.messages]
    return placed


def _poisoned_scales(sf: Tensor, num_rows: int, is_col_major: bool) -> Tensor:
    num_words = sf.shape[1]
    column_words = align_up(num_rows, SCALE_COLUMN_ALIGNMENT_WORDS)
    stride = (1, column_words) if is_col_major else (num_words, 1)
    return poisoned((num_rows, num_words), sf.dtype, stride=stride)


def _alignment_gaps(handle: EPHandle) -> Tensor:
    """Rows between the last token of each expert and the first of the next, the last's included."""
    ends = handle.psum_num_recv_tokens_per_expert.tolist()
    gaps = [torch.arange(end, align_up(end, handle.expert_alignment)) for end in ends]
    return torch.cat(gaps)
