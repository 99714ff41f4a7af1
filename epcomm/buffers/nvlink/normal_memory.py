"""The memory of normal mode over NVLink, as kernels are given it and as callers see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from epcomm.buffers.nvlink.normal_layout import NormalLayout
from epcomm.types import WireFormat, WireTensor

if TYPE_CHECKING:
    from epcomm.kernels.nvlink.normal_exchange import NormalExchange


def exchange_of(
    layout: NormalLayout,
    addresses: Sequence[int],
    rank: int,
    *,
    num_programs: int,
    max_polls: int,
    masked: Tensor,
    counters: Tensor,
    faults: Tensor,
    report: Tensor,
) -> NormalExchange:
    """What kernels are given: blocks at `addresses`, words that begin anew.

    masked, counters, faults, report: see NormalExchange; the device is that of counters.
    """
    from epcomm.kernels.launch import next_power_of_two
    from epcomm.kernels.nvlink.common.epochs import STATE_WORDS
    from epcomm.kernels.nvlink.common.exchange import ExchangeDims
    from epcomm.kernels.nvlink.normal_exchange import NormalExchange, NormalTuning
    from epcomm.kernels.nvlink.normal_plan import GROUP_TOKENS, GROUP_WORDS

    spec, size, device = layout.spec, layout.world_size, counters.device
    rank_lanes, local_lanes = next_power_of_two(size), next_power_of_two(spec.num_local_experts)
    expert_lanes = next_power_of_two(size * spec.num_local_experts)
    run = -(-layout.max_tokens // num_programs)
    num_groups = max(1, -(-run // GROUP_TOKENS))

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return NormalExchange(
        rank=rank,
        num_programs=num_programs,
        max_polls=max_polls,
        own_address=addresses[rank],
        table=torch.tensor(addresses, dtype=torch.int64, device=device),
        dims=ExchangeDims(
            world_size=size,
            max_tokens=layout.max_tokens,
            top_k=spec.top_k,
            num_local_experts=spec.num_local_experts,
        ),
        tuning=NormalTuning(item_rows=layout.item_rows),
        regions=layout.offsets,
        slots_at=layout.slots_at,
        slot_bytes=layout.slot_bytes,
        num_items=layout.num_items,
        num_groups=num_groups,
        record_words=layout.record_words,
        data_bytes=layout.data_bytes,
        scale_bytes=layout.scale_bytes,
        header_bytes=layout.header_bytes,
        back_bytes=layout.back_bytes,
        state=zeros(STATE_WORDS),
        scratch=zeros(num_programs, expert_lanes + rank_lanes + 1),
        bits=zeros(num_programs, num_groups, expert_lanes + rank_lanes, GROUP_WORDS),
        counted=zeros(num_programs),
        bases=zeros(num_programs, rank_lanes * local_lanes),
        masked=masked,
        counters=counters,
        faults=faults,
        report=report,
    )


def received_data(layout: NormalLayout, block: Tensor, slot: int, dtype: torch.dtype) -> Tensor:
    """[W * M, H]: the elements of the rows of a slot, where they lie."""
    return _region(layout, block, slot, "data").view(dtype)[:, : layout.spec.hidden_size]


def received_rows(layout: NormalLayout, block: Tensor, slot: int, wire: WireFormat) -> WireTensor:
    """[W * M, H]: the rows of a slot as they travelled, and their scales, where they lie."""
    hidden_size, scales = layout.spec.hidden_size, None
    data = received_data(layout, block, slot, wire.dtype.torch_dtype)
    if wire.scale_dtype is not None:
        scales = _region(layout, block, slot, "scales").view(wire.scale_dtype)
        scales = scales[:, : wire.num_scales(hidden_size)]
    return WireTensor(data=data, format=wire, scales=scales)


def forget_rows(layout: NormalLayout, block: Tensor, slot: int, rank: int) -> None:
    """What came from a rank is 0."""
    rows = _region(layout, block, slot, "data")
    rows[rank * layout.max_tokens : (rank + 1) * layout.max_tokens].zero_()


def _region(layout: NormalLayout, block: Tensor, slot: int, region: str) -> Tensor:
    """[W * M, bytes of a row]: a view of a region of a slot."""
    row_bytes = layout.data_bytes if region == "data" else layout.scale_bytes
    begin = layout.slots_at + slot * layout.slot_bytes + layout.offsets[region]
    return block[begin : begin + layout.num_rows * row_bytes].view(layout.num_rows, row_bytes)


def as_words(rows: Tensor) -> Tensor:
    """[n, words]: rows as the widest integers that fit, for kernels that only move them."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    # Where a row begins and ends; the first one may begin anywhere in a larger tensor.
    places = (rows.storage_offset(), rows.stride(0), rows.shape[1])
    for dtype in (torch.int32, torch.int16):
        if all(place * rows.itemsize % dtype.itemsize == 0 for place in places):
            return rows.view(dtype)
    return rows.view(torch.uint8)
