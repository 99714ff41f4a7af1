"""Low latency of V1 on buffers that bring sums home: a slab of rows for each expert.

V1 sends a row for each (token, expert), and so does this: each pair is a token of its own here, and
goes to one expert. So its row comes back alone, and the source weighs and sums, as V1 does. A pair
tells where it comes from by its router weight, which V1 has in combine alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, Self

import torch
from torch import Tensor

from epcomm.config import Mode
from epcomm.errors import CapacityError, EPError, HandleError
from epcomm.integrations.deep_ep.normal import (
    Received,
    Rows,
    RowWay,
    detached,
    dispatch_rows,
    return_rows,
)
from epcomm.integrations.deep_ep.ranks import Options, Ranks
from epcomm.integrations.deep_ep.v1.low_latency import (
    LowLatencyHandle,
    Receive,
    Sizes,
    Slabs,
    Wire,
)
from epcomm.quantization import FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES, quantize
from epcomm.quantization.scale_layout import pack_scales

# Bits of a layout range below its beginning.
_COUNT_BITS = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """The (token, expert) pairs of a rank by token, then k: [S] each. Masked entries are none."""

    tokens: Tensor
    experts: Tensor

    @classmethod
    def of(cls, topk_ids: Tensor) -> Self:
        """Read topk_ids [T, K]."""
        is_chosen = topk_ids != -1
        return cls(tokens=is_chosen.nonzero()[:, 0], experts=topk_ids[is_chosen])

    def places(self, topk_ids: Tensor, num_experts: int) -> Tensor:
        """Return the pair of each entry of topk_ids, [T, K]; -1 where none was dispatched."""
        pair_of = torch.full((topk_ids.shape[0], num_experts), -1, device=topk_ids.device)
        pair_of[self.tokens, self.experts] = torch.arange(
            self.tokens.shape[0], device=topk_ids.device
        )
        is_known = (topk_ids >= 0) & (topk_ids < num_experts)
        return pair_of.gather(1, topk_ids.clamp(0, num_experts - 1)).masked_fill(~is_known, -1)


@dataclass(kw_only=True, eq=False)
class Arrival:
    """Holds what a batch leaves on this rank when it is received.

    place_of_row: row of the flattened slabs that holds each received row.
    """

    way: RowWay
    place_of_row: Tensor


class PairsHandle(LowLatencyHandle):
    """A handle whose rows came pair by pair; `arrival` is None until they are received."""

    pairs: Pairs
    arrival: Arrival | None

    @classmethod
    def of(cls, ranks: Ranks, like: Tensor, pairs: Pairs, sizes: Sizes) -> Self:
        """Make the handle of a batch of tokens `like` [T, H]."""
        src_info = torch.empty(
            sizes.num_local, sizes.capacity, dtype=torch.int32, device=like.device
        )
        ranges = torch.empty(
            sizes.num_local, sizes.num_ranks, dtype=torch.int64, device=like.device
        )
        handle = cls((src_info, ranges, sizes.max_tokens, like.shape[1], sizes.num_experts))
        handle.keep(ranks, like.shape[0], sizes)
        handle.pairs, handle.arrival = pairs, None
        return handle

    def begin_combine(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Receive]:
        """Read the rows here, and topk_ids and topk_weights in the second half, as in V1."""
        arrival, where = self.arrival, self.ranks.where
        if arrival is None:
            self.refuse_combine(
                HandleError(
                    f"low_latency_combine: handle is of a batch that is not received ({where}), "
                    "expected one whose hook was called; call the hook of its dispatch first"
                )
            )
        hidden_size = x.shape[2]
        rows = x.reshape(-1, hidden_size)[arrival.place_of_row]
        y = x.new_empty(self.num_tokens, hidden_size) if out is None else out
        pending = [arrival.way]

        def receive() -> None:
            if not pending:
                raise HandleError(f"low_latency_combine: the hook was called twice ({where})")
            returned, _ = return_rows(pending.pop(), rows)
            ids = topk_ids.long()
            places = self.pairs.places(ids, self[4])
            weights = detached(topk_weights)
            detached(y).copy_(_weighted_sum(returned, places, ids, weights))

        return y, receive

    def refuse_combine(self, error: EPError) -> NoReturn:
        self.ranks.refuse_combine(Mode.LOW_LATENCY, error)


def begin_dispatch(
    ranks: Ranks, x: Tensor, topk_ids: Tensor, sizes: Sizes, wire: Wire
) -> tuple[Slabs, Receive]:
    """Begin a dispatch of x [T, H]; what is returned beside the slabs receives them.

    x and topk_ids are read here, the exchange is in the second half: a send waits for nobody.
    """
    topk_ids = topk_ids.long()
    pairs = Pairs.of(topk_ids)
    rows = _rows_on(wire, x)
    handle = PairsHandle.of(ranks, x, pairs, sizes)
    slabs = _new_slabs(rows, sizes, handle)
    error = _overflow_of(pairs, sizes, ranks)
    weights = (pairs.tokens + ranks.rank * sizes.max_tokens).float()
    scales = None if rows.scales is None else _rows_of(rows.scales, pairs.tokens)
    sent = Rows(x=_rows_of(rows.x, pairs.tokens), scales=scales)

    def receive() -> None:
        _check_once(handle, ranks)
        received = dispatch_rows(
            ranks,
            sent,
            pairs.experts[:, None],
            weights[:, None],
            sizes.num_experts,
            options=Options(num_max_tokens_per_rank=sizes.max_tokens),
            error=error,
        )
        handle.arrival = Arrival(way=received.way, place_of_row=_write(slabs, received, sizes))

    return slabs, receive


def _rows_on(wire: Wire, x: Tensor) -> Rows:
    """Return x [T, H] as it travels, in new memory; scales have 4 bytes."""
    if not wire.fp8:
        return Rows(x=x.clone())
    quantized = quantize(x, FP8_POWER_OF_TWO_SCALES if wire.power_of_two else FP8_FLOAT32_SCALES)
    assert quantized.scales is not None, "FP8 has scales"
    scales = pack_scales(quantized.scales) if wire.packed else quantized.scales.float()
    return Rows(x=quantized.data, scales=scales)


def _check_once(handle: PairsHandle, ranks: Ranks) -> None:
    if handle.arrival is not None:
        raise HandleError(f"low_latency_dispatch: the hook was called twice ({ranks.where})")


def _overflow_of(pairs: Pairs, sizes: Sizes, ranks: Ranks) -> EPError | None:
    """Return the error of a rank that names an expert so often that its slab could be too small."""
    num_experts = sizes.num_experts
    is_known = (pairs.experts >= 0) & (pairs.experts < num_experts)
    most = torch.bincount(pairs.experts[is_known], minlength=1).max()
    if int(most) <= sizes.max_tokens:
        return None
    return CapacityError(
        f"low_latency_dispatch: topk_idx names an expert {int(most)} times, expected at most "
        f"num_max_dispatch_tokens_per_rank = {sizes.max_tokens} ({ranks.where}); name each expert "
        "once in a row"
    )


def _rows_of(rows: Tensor, places: Tensor) -> Tensor:
    """Return rows of a tensor of any dtype; indexing knows no 8-bit floats."""
    return rows.contiguous().view(torch.uint8)[places].view(rows.dtype)


def _new_slabs(rows: Rows, sizes: Sizes, handle: PairsHandle) -> Slabs:
    device, scales = rows.x.device, None
    if rows.scales is not None:
        shape = (sizes.num_local, rows.scales.shape[1], sizes.capacity)
        # Column-major: a GEMM reads the scales of neighbouring rows together.
        scales = torch.empty(shape, dtype=rows.scales.dtype, device=device).transpose(1, 2)
    shape = (sizes.num_local, sizes.capacity, rows.x.shape[1])
    return Slabs(
        x=torch.empty(shape, dtype=rows.x.dtype, device=device),
        scales=scales,
        counts=torch.empty(sizes.num_local, dtype=torch.int32, device=device),
        handle=handle,
    )


def _write(slabs: Slabs, received: Received, sizes: Sizes) -> Tensor:
    """Write the slabs; return the place of each received row in them."""
    slots_of_row, first_slot = (
        received.dispatched.index.slots_of_row,
        received.dispatched.index.first_slot,
    )
    assert slots_of_row is not None, "an index over rows has its inverse"
    experts = received.topk_ids[:, 0]
    position = (slots_of_row[:, 0] - first_slot[experts]).long()
    place = experts * sizes.capacity + position
    source = received.topk_weights[:, 0].long()
    data = slabs.x.view(torch.uint8).flatten(0, 1)
    data[place] = received.rows.x.view(torch.uint8)
    if slabs.scales is not None and received.rows.scales is not None:
        slabs.scales[experts, position] = received.rows.scales
    slabs.counts.copy_(received.dispatched.index.num_tokens_per_expert)
    src_info, layout_range = slabs.handle[:2]
    src_info.flatten()[place] = (source % sizes.max_tokens).to(torch.int32)
    num_pairs = sizes.num_local * sizes.num_ranks
    from_source = torch.bincount(
        experts * sizes.num_ranks + source // sizes.max_tokens, minlength=num_pairs
    ).view(sizes.num_local, sizes.num_ranks)
    first = from_source.cumsum(1) - from_source
    layout_range.copy_(first << _COUNT_BITS | from_source)
    return place


def _weighted_sum(
    returned: Tensor, places: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """Sum rows [S, H] by token in float32, in the order of k; what was not sent is NaN."""
    num_tokens, top_k = topk_ids.shape
    total = returned.new_zeros(num_tokens, returned.shape[1], dtype=torch.float32)
    for k in range(top_k):
        place = places[:, k]
        is_sent, is_chosen = place >= 0, topk_ids[:, k] != -1
        total[is_sent] += returned[place[is_sent]].float() * topk_weights[is_sent, k].unsqueeze(1)
        total[is_chosen & ~is_sent] = float("nan")
    return total.to(returned.dtype)
