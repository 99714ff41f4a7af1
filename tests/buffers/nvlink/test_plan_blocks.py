"""A block of a plan: tensors begin where the kernel writes them, and have the lengths in use."""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.buffers.nvlink.normal_counts import IndexSizes
from epcomm.buffers.nvlink.normal_plans import ExchangePlanMemory
from epcomm.kernels.nvlink.common.plan_parts import PLAN_PARTS
from epcomm.spec import BufferSpec
from epcomm.types import WireFormat

WIRE = WireFormat.of(torch.bfloat16)
SPEC = BufferSpec(
    hidden_size=8, top_k=3, num_local_experts=5, dispatch_format=WIRE, hidden_format=WIRE
)
WORLD_SIZE, NUM_TOKENS = 3, 7
MOST = IndexSizes(num_rows=30, num_slots=90, per_expert=None, is_dense=False)
USED = IndexSizes(num_rows=4, num_slots=9, per_expert=(1, 2, 1, 3, 2), is_dense=True)
SHAPES = {
    "places": (21,),
    "positions": (21,),
    "row_of_slot": (9,),
    "slots_of_row": (4, 3),
    "slot_weights": (9,),
    "num_tokens_per_expert": (5,),
    "first_slot": (6,),
    "rows_from": (3,),
    "row_base": (3,),
    "has_failed": (2,),
}


def test_every_part_is_where_the_kernel_writes_it() -> None:
    memory = ExchangePlanMemory(spec=SPEC, world_size=WORLD_SIZE, device=torch.device("cpu"))
    block = memory.block(NUM_TOKENS, MOST, has_budget=False, is_compact=True, wants_row_topk=True)
    parts = block.parts(USED)
    tensors: dict[str, Tensor] = {
        **vars(parts.sends),
        **vars(parts.arrivals),
        **vars(parts.index),
        "slot_weights": parts.slot_weights,
    }
    # Gaps belong to no part, and each part begins at a multiple of 16 bytes.
    ends = [*block.received.addresses[1:], block.memory.data_ptr() + 4 * len(block.memory)]
    for name, address, end in zip(PLAN_PARTS, block.received.addresses, ends, strict=True):
        tensor = tensors[name]
        assert (tensor.data_ptr(), tensor.shape, address % 16) == (address, SHAPES[name], 0)
        assert end - address >= 4 * tensor.numel()
    assert parts.slot_weights.dtype == torch.float32
    assert parts.index.host_num_tokens_per_expert == USED.per_expert
    topk = block.row_topk(USED)
    assert topk is not None
    assert [(each.shape, each.dtype) for each in topk] == [
        ((4, 3), torch.int64),
        ((4, 3), torch.float32),
    ]
