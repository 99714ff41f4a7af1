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
    excluded: Tensor,
    counters: Tensor,
    faults: Tensor,
    report: Tensor,
) -> NormalExchange:
    """Return the arguments of the kernels for memory at `addresses`, with signals of 0.

    excluded, counters, faults, report: see NormalExchange; the device is that of counters.
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
        buffers_at=layout.buffers_at,
        buffer_bytes=layout.buffer_bytes,
        num_items=layout.num_items,
        num_groups=num_groups,
        metadata_words=layout.metadata_words,
        data_bytes=layout.data_bytes,
        scale_bytes=layout.scale_bytes,
        header_bytes=layout.header_bytes,
        return_bytes=layout.return_bytes,
        state=zeros(STATE_WORDS),
        scratch=zeros(num_programs, expert_lanes + rank_lanes + 1),
        bits=zeros(num_programs, num_groups, expert_lanes + rank_lanes, GROUP_WORDS),
        counted=zeros(num_programs),
        bases=zeros(num_programs, rank_lanes * local_lanes),
        excluded=excluded,
        counters=counters,
        faults=faults,
        report=report,
    )


def received_data(
    layout: NormalLayout, block: Tensor, buffer_index: int, dtype: torch.dtype
) -> Tensor:
    """Return [W * M, H]: the elements of the rows of a receive buffer, where they lie."""
    return _region(layout, block, buffer_index, "data").view(dtype)[:, : layout.spec.hidden_size]


def received_rows(
    layout: NormalLayout, block: Tensor, buffer_index: int, wire: WireFormat
) -> WireTensor:
    """Return [W * M, H]: the rows of a receive buffer and their scales, where they lie."""
    hidden_size, scales = layout.spec.hidden_size, None
    data = received_data(layout, block, buffer_index, wire.dtype.torch_dtype)
    if wire.scale_dtype is not None:
        scales = _region(layout, block, buffer_index, "scales").view(wire.scale_dtype)
        scales = scales[:, : wire.num_scales(hidden_size)]
    return WireTensor(data=data, format=wire, scales=scales)


def forget_rows(layout: NormalLayout, block: Tensor, buffer_index: int, rank: int) -> None:
    """Zero the rows that came from a rank."""
    rows = _region(layout, block, buffer_index, "data")
    rows[rank * layout.max_tokens : (rank + 1) * layout.max_tokens].zero_()


def _region(layout: NormalLayout, block: Tensor, buffer_index: int, region: str) -> Tensor:
    """Return [W * M, bytes of a row], a view of a region of a receive buffer."""
    row_bytes = layout.data_bytes if region == "data" else layout.scale_bytes
    begin = layout.buffers_at + buffer_index * layout.buffer_bytes + layout.offsets[region]
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
