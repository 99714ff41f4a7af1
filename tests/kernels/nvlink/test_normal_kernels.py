"""The index of normal mode over NVLink in one process, which plays what two ranks have sent."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.buffers.nvlink.normal_plans import ExchangePlanMemory
from epcomm.kernels.nvlink.common.epochs import DISPATCH_EPOCH
from epcomm.kernels.nvlink.common.exchange import PeerBlocks
from epcomm.kernels.nvlink.normal_dispatch_recv import index_rows
from epcomm.kernels.nvlink.normal_exchange import NormalExchange
from epcomm.protocol import HEADER_WORDS, BatchFlags, FaultCode, pack_status
from epcomm.spec import BufferSpec
from epcomm.types import WireFormat

BF16 = WireFormat.of(torch.bfloat16)
WORLD_SIZE, MAX_TOKENS = 2, 2
# Of each rank: one token for expert 0 of rank 0.
SPEC = BufferSpec(
    hidden_size=8,
    top_k=1,
    num_local_experts=1,
    dispatch_format=BF16,
    hidden_format=BF16,
    max_tokens_per_rank=MAX_TOKENS,
)


@pytest.mark.parametrize(
    ("has_budget", "flags_of_rank_1", "code"),
    [
        pytest.param(False, BatchFlags.NONE, FaultCode.NONE, id="the host has looked"),
        pytest.param(True, BatchFlags.NONE, FaultCode.GRAD_MODE, id="nobody has looked"),
        pytest.param(True, BatchFlags.GRAD_ENABLED, FaultCode.FROZEN, id="other experts train"),
    ],
)
def test_gradients_may_differ_where_the_host_reads_headers(
    has_budget: bool, flags_of_rank_1: BatchFlags, code: FaultCode, device: torch.device
) -> None:
    layout = NVLinkBuffer.layout_for(SPEC, WORLD_SIZE)
    blocks = [
        torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device) for _ in range(WORLD_SIZE)
    ]
    faults = torch.zeros(WORLD_SIZE, 2, dtype=torch.int64, device=device)
    addresses = [block.data_ptr() for block in blocks]
    peers = PeerBlocks(
        rank=0,
        num_programs=2,
        max_polls=3,
        own_address=addresses[0],
        table=torch.tensor(addresses, dtype=torch.int64, device=device),
        layout=layout,
        excluded=torch.zeros(WORLD_SIZE, dtype=torch.int32, device=device),
        counters=torch.zeros(5, dtype=torch.int64, device=device),
        faults=faults,
        report=torch.zeros(4 + WORLD_SIZE, dtype=torch.int32, device=device),
    )
    exchange = NormalExchange.of(peers)
    exchange.state[DISPATCH_EPOCH] = 1
    words = blocks[0].view(torch.int32)
    got = layout.offsets["rows_ready"] // 4
    words[got : got + WORLD_SIZE] = peers.num_programs
    trains = BatchFlags.GRAD_ENABLED | BatchFlags.of_experts([True, True])
    for rank, flags in enumerate((trains, flags_of_rank_1)):
        begin = (layout.buffers_at + layout.offsets["header"] + rank * layout.header_bytes) // 4
        # Fault and flags, T, rows for each rank, slots of each expert.
        header = [pack_status(FaultCode.NONE, flags), 1, 1, 0, 1, 0]
        assert len(header) == HEADER_WORDS + 2 * WORLD_SIZE
        words[begin : begin + len(header)] = torch.tensor(header, device=device)
        # Its only row is of expert 0, at position 0, with a weight of 1: all zeros but that.
        row = (
            layout.buffers_at
            + layout.offsets["metadata"]
            + rank * MAX_TOKENS * layout.metadata_bytes
        )
        words.view(torch.float32)[row // 4 + 2 * layout.metadata_words] = 1
    memory = ExchangePlanMemory(spec=SPEC, world_size=WORLD_SIZE, device=device)
    index, arrivals = memory.received(4, 2, None, is_dense=True)
    slot_weights = torch.zeros(2, device=device)
    index_rows(
        exchange,
        index,
        slot_weights,
        arrivals,
        buffer_index=0,
        is_compact=False,
        has_budget=has_budget,
    )
    assert faults[:, 0].tolist() == [0, int(code)]
    assert arrivals.has_failed.tolist() == [int(code != FaultCode.NONE)]
    if not has_budget:
        assert index.num_tokens_per_expert.tolist() == [2]
        assert index.row_of_slot is not None
        assert index.row_of_slot.tolist() == [0, MAX_TOKENS]
        assert slot_weights.tolist() == [1, 1]
