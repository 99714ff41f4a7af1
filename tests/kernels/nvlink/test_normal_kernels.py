"""The index of normal mode over NVLink in one process, which plays what two ranks have sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl

from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.buffers.nvlink.normal_plans import ExchangePlanMemory
from epcomm.kernels import launch
from epcomm.kernels.nvlink import normal_dispatch_recv, normal_plan
from epcomm.kernels.nvlink.common.epochs import COMBINE_EPOCH, DISPATCH_EPOCH, DISPATCH_LOST
from epcomm.kernels.nvlink.common.exchange import PeerBlocks
from epcomm.kernels.nvlink.normal_combine import combine_rows
from epcomm.kernels.nvlink.normal_dispatch_recv import index_rows
from epcomm.kernels.nvlink.normal_dispatch_send import push_rows
from epcomm.kernels.nvlink.normal_exchange import NormalExchange
from epcomm.protocol import HEADER_WORDS, BatchFlags, FaultCode, Wait, pack_status
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


def rank_0(device: torch.device) -> tuple[NormalExchange, list[torch.Tensor]]:
    """What rank 0 has, and the words of the blocks of both ranks."""
    layout = NVLinkBuffer.layout_for(SPEC, WORLD_SIZE)
    blocks = [
        torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device) for _ in range(WORLD_SIZE)
    ]
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
        faults=torch.zeros(WORLD_SIZE, 2, dtype=torch.int64, device=device),
        report=torch.zeros(4 + WORLD_SIZE, dtype=torch.int32, device=device),
    )
    return NormalExchange.of(peers), [block.view(torch.int32) for block in blocks]


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
    exchange, (words, _theirs) = rank_0(device)
    peers, layout = exchange.peers, exchange.peers.layout
    faults = peers.faults
    exchange.state[DISPATCH_EPOCH] = 1
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
    assert arrivals.has_failed.tolist() == [int(code != FaultCode.NONE), 1]
    if not has_budget:
        assert index.num_tokens_per_expert.tolist() == [2]
        assert index.row_of_slot is not None
        assert index.row_of_slot.tolist() == [0, MAX_TOKENS]
        assert slot_weights.tolist() == [1, 1]


def test_no_program_indexes_where_another_has_timed_out(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, (words, _theirs) = rank_0(device)
    layout, await_rows = exchange.peers.layout, normal_dispatch_recv.await_or_abort
    exchange.state[DISPATCH_EPOCH] = 1
    got = layout.offsets["rows_ready"] // 4
    words[got : got + WORLD_SIZE] = exchange.peers.num_programs
    header = (layout.buffers_at + layout.offsets["header"]) // 4
    # From rank 0 two rows for the only expert, from rank 1 none.
    words[header : header + 6] = torch.tensor([0, 2, 2, 0, 2, 0], device=device)
    if launch.IS_INTERPRETED:
        # Of program 1 the peer is late, and on time for program 0.
        monkeypatch.setattr(
            normal_dispatch_recv,
            "await_or_abort",
            lambda peers, address, wanted, *rest: await_rows(
                peers, address, wanted + tl.program_id(0), *rest
            ),
        )
    else:
        words[got + 1] -= 1
    memory = ExchangePlanMemory(spec=SPEC, world_size=WORLD_SIZE, device=device)
    index, arrivals = memory.received(4, 2, None, is_dense=True)
    assert index.row_of_slot is not None
    assert index.slots_of_row is not None
    index_rows(
        exchange,
        index,
        torch.zeros(2, device=device),
        arrivals,
        buffer_index=0,
        is_compact=False,
        has_budget=True,
    )
    assert exchange.peers.report[0] == Wait.ROWS
    assert arrivals.has_failed[0] == 1
    assert index.num_tokens_per_expert.tolist() == [0]
    assert index.first_slot.tolist() == [0, 0]
    assert index.row_of_slot.tolist() == [-1, -1]
    assert index.slots_of_row.flatten().tolist() == [-1] * 4
    assert arrivals.rows_from.tolist() == [0, 0]


def test_nothing_is_stored_beyond_the_index_whatever_a_rank_has_sent(
    device: torch.device,
) -> None:
    exchange, (words, _theirs) = rank_0(device)
    layout = exchange.peers.layout
    exchange.state[DISPATCH_EPOCH] = 1
    got = layout.offsets["rows_ready"] // 4
    words[got : got + WORLD_SIZE] = exchange.peers.num_programs
    header = (layout.buffers_at + layout.offsets["header"] + layout.header_bytes) // 4
    # From rank 1 five rows, where it may send two, of an expert that this rank does not have.
    words[header : header + 6] = torch.tensor([0, 5, 5, 0, 5, 0], device=device)
    records = (layout.buffers_at + layout.offsets["metadata"]) // 4
    words[records : records + WORLD_SIZE * MAX_TOKENS * layout.metadata_bytes // 4] = 3
    memory = ExchangePlanMemory(spec=SPEC, world_size=WORLD_SIZE, device=device)
    index, arrivals = memory.received(4, 2, None, is_dense=True)
    row_of_slot, slots_of_row = torch.full((2, 16), 77, dtype=torch.int32, device=device)
    index = replace(index, row_of_slot=row_of_slot[:2], slots_of_row=slots_of_row[:4].view(4, 1))
    weights = torch.full((16,), 77.0, device=device)
    index_rows(
        exchange,
        index,
        weights[:2],
        arrivals,
        buffer_index=0,
        is_compact=False,
        has_budget=False,
    )
    assert slots_of_row.tolist() == [-1] * 4 + [77] * 12
    assert (row_of_slot[2:] == 77).all()
    assert (weights[2:] == 77).all()
    assert arrivals.rows_from.tolist() == [0, MAX_TOKENS]


@pytest.mark.skipif(not launch.IS_INTERPRETED, reason="programs of a GPU run at the same time")
def test_no_program_sends_where_an_earlier_one_has_not_counted(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, (words, theirs) = rank_0(device)
    offsets, await_counts = exchange.peers.layout.offsets, normal_plan.await_at
    begun = offsets["dispatch_begin"] // 4
    words[begun : begun + WORLD_SIZE] = torch.tensor([0, 1], device=device)
    monkeypatch.setattr(
        normal_plan,
        "await_at",
        lambda first, last, needed, read, abort, wanted, *rest: await_counts(
            first, last, needed, read, abort, wanted + tl.program_id(0), *rest
        ),
    )
    memory = ExchangePlanMemory(spec=SPEC, world_size=WORLD_SIZE, device=device)
    ids = torch.ones(MAX_TOKENS, 1, dtype=torch.int64, device=device)
    push_rows(
        exchange,
        torch.ones(MAX_TOKENS, 8, dtype=torch.bfloat16, device=device),
        None,
        memory.sends(MAX_TOKENS),
        buffer_index=0,
        topk=(ids, torch.ones(MAX_TOKENS, 1, device=device)),
    )
    # Program 0 has sent its token; program 1 does not know where its own belongs.
    assert theirs[offsets["rows_ready"] // 4] == 1
    assert theirs[offsets["counts_ready"] // 4] == 0
    assert exchange.peers.report[: 4 + WORLD_SIZE].tolist() == [Wait.DISPATCH_BEGIN, 1, 0, 0, 1, 0]
    assert theirs[0] != 0, "the other rank waits"
    assert exchange.state[DISPATCH_LOST] == 1


# Behind 2**31 combines, and the one whose number is 0.
@pytest.mark.parametrize("epoch", [-(2**31) + 1, 0])
@pytest.mark.parametrize("is_there", [False, True])
def test_sums_that_nobody_sent_are_not_taken_for_arrived(
    epoch: int, is_there: bool, device: torch.device
) -> None:
    exchange, (words, theirs) = rank_0(device)
    layout = exchange.peers.layout
    exchange.state[COMBINE_EPOCH] = epoch - 1
    begun = layout.offsets["combine_begin"] // 4
    words[begun : begun + WORLD_SIZE] = torch.tensor([epoch - 1, epoch], device=device)
    memory = ExchangePlanMemory(spec=SPEC, world_size=WORLD_SIZE, device=device)
    sends, (_, arrivals) = memory.sends(1), memory.received(0, 0, None, is_dense=True)
    # The only token of this rank went to rank 1, and nothing came here.
    sends.places[:] = torch.tensor([-1, 0], device=device)
    for tensor in (arrivals.rows_from, arrivals.row_base, arrivals.has_failed):
        tensor.zero_()
    if is_there:
        # As rank 1 would announce its first item.
        ready = layout.offsets["sums_ready"] // 4
        words[ready + layout.num_items] = epoch or -(2**31)
    y = torch.zeros(1, SPEC.hidden_size, dtype=torch.bfloat16, device=device)
    rows = torch.zeros(0, SPEC.hidden_size, dtype=torch.bfloat16, device=device)
    status = layout.offsets["combine_status"] // 4
    theirs[status : status + 2 * WORLD_SIZE] = 77
    combine_rows(exchange, rows, sends, arrivals, None, y)
    # Its status, in the half of this epoch; of rank 1, in the block of which it is.
    told = theirs[status : status + 2 * WORLD_SIZE].view(2, WORLD_SIZE)
    assert told[epoch & 1].tolist() == [0, 77]
    assert (exchange.peers.report[0] == 0) == is_there
    assert y.isnan().any() != is_there
    assert exchange.state[COMBINE_EPOCH] == epoch
