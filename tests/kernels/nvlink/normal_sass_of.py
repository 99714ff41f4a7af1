"""Compile the kernels of normal mode over NVLink for sm_90, as ll_sass_of.py does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.kernels.nvlink import (
    normal_combine,
    normal_dispatch_copy_out,
    normal_dispatch_recv,
    normal_dispatch_send,
)
from epcomm.kernels.nvlink.common.plan_parts import Arrivals, Sends
from epcomm.kernels.nvlink.normal_exchange import NormalExchange
from epcomm.quantization import FP8_FLOAT32_SCALES
from epcomm.records import SlotIndex
from epcomm.spec import BufferSpec
from epcomm.types import WireFormat
from tests.kernels.nvlink.ll_sass_of import PLAIN, blocks_of, print_compiled, recorded


def exchange_for(wire: WireFormat, hidden_size: int, world_size: int) -> NormalExchange:
    """As a rank of an H200 has it; its addresses are never used."""
    spec = BufferSpec(
        hidden_size=hidden_size,
        top_k=8,
        num_local_experts=256 // world_size,
        dispatch_format=wire,
        hidden_format=PLAIN,
    )
    layout = replace(NVLinkBuffer.layout_for(spec, world_size, 4096), item_rows=32)
    return NormalExchange.of(blocks_of(layout, num_programs=32, num_counters=5))


def integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def sends_of(world_size: int) -> Sends:
    return Sends(places=integers(2, world_size), positions=integers(2, 8))


def arrivals_of(world_size: int) -> Arrivals:
    return Arrivals(
        rows_from=integers(world_size), row_base=integers(world_size), has_failed=integers(2)
    )


def pushed(
    wire: WireFormat, hidden_size: int = 7168, world_size: int = 8, *, is_planned: bool = True
) -> dict[str, str]:
    recorder = recorded(normal_dispatch_send, "_push_kernel")
    num_scales = wire.num_scales(hidden_size) if wire.scale_dtype else 0
    topk = (torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8))
    normal_dispatch_send.push_rows(
        exchange_for(wire, hidden_size, world_size),
        integers(2, wire.data_bytes(hidden_size) // 4),
        torch.zeros(2, num_scales) if num_scales else None,
        sends_of(world_size),
        buffer_index=0,
        topk=topk if is_planned else None,
        totals=integers(3 * world_size + 256 // world_size) if is_planned else None,
    )
    return recorder.compiled()


def indexed(*, has_budget: bool) -> dict[str, str]:
    recorder = recorded(normal_dispatch_recv, "_index_kernel")
    index = SlotIndex(
        row_of_slot=integers(64),
        slots_of_row=integers(64, 8),
        num_tokens_per_expert=integers(32),
        first_slot=integers(33),
        host_num_tokens_per_expert=None,
        is_dense=not has_budget,
    )
    normal_dispatch_recv.index_rows(
        exchange_for(PLAIN, 7168, 8),
        index,
        torch.zeros(64),
        arrivals_of(8),
        buffer_index=0,
        is_compact=not has_budget,
        has_budget=has_budget,
    )
    return recorder.compiled()


def collected() -> dict[str, str]:
    recorder = recorded(normal_dispatch_copy_out, "_collect_kernel")
    normal_dispatch_copy_out.collect_rows(
        exchange_for(PLAIN, 7168, 8),
        arrivals_of(8),
        buffer_index=0,
        out=integers(2, 3584),
    )
    return recorder.compiled()


def combined(
    hidden_size: int = 7168, world_size: int = 8, *, is_backward: bool = False
) -> dict[str, str]:
    recorder = recorded(normal_combine, "_combine_kernel")
    normal_combine.combine_rows(
        exchange_for(PLAIN, hidden_size, world_size),
        torch.zeros(2, hidden_size, dtype=torch.bfloat16),
        sends_of(world_size),
        arrivals_of(world_size),
        None if is_backward else integers(2, 8),
        torch.zeros(2, hidden_size, dtype=torch.bfloat16),
        slot_weights=None if is_backward else torch.zeros(2),
        row_scalars=torch.zeros(2, 8) if is_backward else None,
        out_scalars=torch.zeros(2, 8) if is_backward else None,
    )
    return recorder.compiled()


def main() -> None:
    variants = {
        "push bf16": partial(pushed, PLAIN),
        # Two ranks wherever the number changes nothing but time: code is unrolled over them.
        "push fp8": partial(pushed, FP8_FLOAT32_SCALES, world_size=2),
        # Three ranks, and rows of 16 bytes more than a power of two.
        "push odd": partial(pushed, PLAIN, 2056, 3),
        "push again": partial(pushed, PLAIN, world_size=2, is_planned=False),
        "index": partial(indexed, has_budget=False),
        "index budget": partial(indexed, has_budget=True),
        "collect": collected,
        "combine": combined,
        "combine odd": partial(combined, 2056, 3),
        "combine backward": partial(combined, world_size=2, is_backward=True),
    }
    print_compiled(variants)


if __name__ == "__main__":
    main()
