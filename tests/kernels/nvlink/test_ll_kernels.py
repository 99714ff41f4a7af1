"""The NVLink kernels in one process: memory that no call of tests/buffers/nvlink can prepare.

A process plays all ranks, one after another: every word is stored before it is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton.language as tl

from epcomm.buffers.nvlink.low_latency import NVLinkLowLatencyBuffer
from epcomm.buffers.nvlink.low_latency_state import ReceiveBuffer
from epcomm.buffers.nvlink.sizes import low_latency_layout
from epcomm.kernels import launch
from epcomm.kernels.nvlink import (
    ll_combine_recv,
    ll_combine_send,
    ll_dispatch_header,
    ll_dispatch_recv,
    ll_dispatch_send,
    ll_launchers,
)
from epcomm.kernels.nvlink.common.exchange import (
    NO_SLABS,
    SOURCES_AT,
    SUM_ARRIVALS,
    LowLatencyExchange,
    SlabMemory,
)
from epcomm.kernels.nvlink.common.layout import LINE_BYTES, LowLatencyLayout
from epcomm.kernels.nvlink.lines import dispatch_send
from epcomm.protocol import FLAGS_SHIFT, FaultCode, Wait, decode_abort
from epcomm.spec import BufferSpec
from epcomm.types import WireFormat, WireTensor
from tests.cases.operators import Operators
from tests.kernels.nvlink.peers import peer_blocks

BF16 = WireFormat.of(torch.bfloat16)
MAX_TOKENS, HIDDEN = 2, 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Rank:
    """One rank of several in this process; words are read from its block."""

    exchange: LowLatencyExchange
    block: Tensor
    layout: LowLatencyLayout
    is_sent: Tensor

    def region(self, name: str, dtype: torch.dtype) -> Tensor:
        begin = self.layout.buffer_offset(0) + self.layout.offsets[name]
        return self.block[begin : begin + self.layout.regions[name]].view(dtype)

    def lines(self, name: str) -> list[tuple[int, int]]:
        """Return the words and the epochs of lines."""
        words = self.region(name, torch.int32).view(-1, 2).tolist()
        return [(word, epoch) for word, epoch in words]


def spec_of(max_tokens: int) -> BufferSpec:
    return BufferSpec(
        hidden_size=HIDDEN,
        top_k=2,
        num_local_experts=2,
        dispatch_format=BF16,
        hidden_format=BF16,
        max_tokens_per_rank=max_tokens,
        batches_in_flight=1,
    )


def make_ranks(
    world_size: int,
    device: torch.device,
    *,
    max_tokens: int = MAX_TOKENS,
    line_tokens: int = MAX_TOKENS,
) -> list[Rank]:
    layout = low_latency_layout(spec_of(max_tokens), world_size, 1, line_tokens)
    # Memory is shared, because an interpreter computes in int32 with addresses below 2**31, such as
    # those of a heap.
    blocks = [
        torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device).share_memory_()
        for _ in range(world_size)
    ]
    return [
        Rank(
            exchange=LowLatencyExchange.of(
                peer_blocks(rank, blocks, layout, num_programs=world_size, max_polls=3), 0
            ),
            block=blocks[rank],
            layout=layout,
            is_sent=torch.zeros(
                max_tokens, layout.parts_of_token, dtype=torch.uint8, device=device
            ),
        )
        for rank in range(world_size)
    ]


def send(
    rank: Rank, ids: list[list[int]], weights: list[list[float]], *, in_lines: bool = False
) -> Tensor:
    """Send tokens of distinct elements, and return them."""
    device = rank.block.device
    begin = 1 + 100 * rank.exchange.peers.rank
    x = torch.arange(begin, begin + len(ids) * HIDDEN, device=device).view(-1, HIDDEN)
    x = x.to(torch.bfloat16)
    ll_dispatch_send.send_dispatch(
        rank.exchange,
        x,
        torch.tensor(ids, dtype=torch.int64, device=device).view(-1, 2),
        torch.tensor(weights, dtype=torch.float32, device=device).view(-1, 2),
        rank.is_sent,
        status=0,
        batch=0,
        is_captured=False,
        kind=ll_dispatch_header.PLAIN,
        scale_block=HIDDEN,
        profile="rint127",
        in_lines=in_lines,
    )
    return x


@dataclass(frozen=True, kw_only=True, eq=False)
class Index:
    """The index that a receiver writes, 77 elsewhere; `memory` of row_of_slot has a guard."""

    memory: Tensor
    slots_of_row: Tensor
    weights: Tensor
    counts: Tensor
    first: Tensor


def receive(rank: Rank, slabs: SlabMemory = NO_SLABS, *, num_slots: int = 8) -> Index:
    """Receive with an index of num_slots slots, or with slabs."""
    layout = rank.layout

    def integers(size: int) -> Tensor:
        return torch.full((size,), 77, dtype=torch.int32, device=rank.block.device)

    index = Index(
        memory=integers(2 * layout.num_rows * layout.top_k),
        slots_of_row=integers(layout.num_rows * layout.top_k).view(-1, layout.top_k),
        weights=integers(2 * layout.num_rows * layout.top_k).float(),
        counts=integers(2),
        first=integers(3),
    )
    ll_dispatch_recv.receive_dispatch(
        rank.exchange,
        index.memory[:num_slots] if slabs.data is None else None,
        index.slots_of_row,
        index.weights[:num_slots],
        index.counts,
        index.first,
        expert_alignment=1,
        num_tokens=4,
        is_captured=False,
        slabs=slabs,
    )
    return index


def combine(rank: Rank, rows: Tensor, slots_of_row: Tensor) -> None:
    """Send the results of a rank."""
    # Groups of experts are one, or have five slots each.
    first_slot = 5 * torch.arange(3, dtype=torch.int32, device=rows.device)
    ll_combine_send.send_combine(
        rank.exchange,
        rows,
        None,
        slots_of_row,
        first_slot,
        num_tokens=MAX_TOKENS,
        per_row=False,
        batch=0,
        status=0,
    )


def receive_sums(rank: Rank, num_tokens: int) -> Tensor:
    """Receive the sums of the first tokens of a rank, NaN before."""
    y = torch.full((num_tokens, HIDDEN), float("nan"), dtype=torch.bfloat16)
    y = y.to(rank.block.device)
    ll_combine_recv.receive_combine(
        rank.exchange, y, rank.is_sent, None, wanted_tokens=num_tokens, in_lines=False, batch=0
    )
    return y


@pytest.mark.skipif(not launch.IS_INTERPRETED, reason="compiled kernels record nothing")
@pytest.mark.parametrize("in_lines", [False, True])
def test_ranks_begin_each_token_with_different_peers(
    in_lines: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[list[int]] = []
    base_of = ll_dispatch_header.base_of

    def noted(peers: Any, peer: Any) -> Any:  # noqa: ANN401
        orders[-1].append(int(peer.handle.data[0]))
        return base_of(peers, peer)

    for module in (ll_dispatch_header, ll_dispatch_send, dispatch_send):
        monkeypatch.setattr(module, "base_of", noted)
    ranks = make_ranks(3, device)
    for rank in ranks:
        orders.append([])
        send(rank, [[0, 3], [3, 5]], [[1, 1], [1, 1]], in_lines=in_lines)
    # Programs of metadata and of rows; those that send headers in lines look at all ranks too.
    turns = [torch.tensor(order).view(-1, 3) for order in orders]
    assert all(torch.equal(each.sort().values, torch.arange(3).expand_as(each)) for each in turns)
    firsts = torch.stack(turns)[:, 3 if in_lines else 0 :, 0]
    assert firsts.shape[1] == 4
    assert all(len(set(each)) == 3 for each in firsts.T.tolist())


def test_expert_that_this_rank_does_not_have_gets_no_slot(device: torch.device) -> None:
    ranks = make_ranks(2, device)
    for rank in ranks:
        send(rank, [[0, 1]], [[1, 1]])
    # The first entry of the row from rank 1 names expert 2, but rank 0 has two experts.
    metadata = ranks[0].region("metadata_lines", torch.int32).view(-1, LINE_BYTES // 4)
    metadata[MAX_TOKENS * ranks[0].layout.metadata_words, 0] = 2
    index = receive(ranks[0])
    assert index.slots_of_row.tolist() == [[0, 2], [-1, -1], [-1, 3], [-1, -1]]
    assert index.memory[[0, 2, 3]].tolist() == [0, 0, 2]


def test_sums_are_signalled_and_awaited_by_chunk(device: torch.device) -> None:
    ranks = make_ranks(2, device, max_tokens=40, line_tokens=0)
    assert (ranks[0].layout.chunk_tokens, ranks[0].layout.num_chunks) == (32, 2)
    # As if rank 0 had sent 40 tokens and rank 1 had sent 32, all in bulk.
    sender, receiver = ranks
    sender.exchange.state[SOURCES_AT:] = torch.tensor([80, 64], device=device)
    sender.exchange.state[1] = 1
    slots_of_row = torch.full((80, 2), -1, dtype=torch.int32, device=device)
    rows = torch.ones(1, HIDDEN, dtype=torch.bfloat16, device=device)
    slots_of_row[40 + 31, 0] = 0
    combine(sender, rows, slots_of_row)
    # Those of rank 0, then those of rank 1.
    arrived = [rank.region("arrived_sums", torch.int32)[:4].tolist() for rank in ranks]
    assert arrived == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert not sender.exchange.state[SUM_ARRIVALS:SOURCES_AT].any()
    # The other chunk of rank 1 has not come, which tokens of the first one do not await.
    receiver.region("arrived_sums", torch.int32)[2] = 1
    receiver.region("combined_lines", torch.int32).view(-1, 2)[1, 1] = 1
    receiver.exchange.state[1] = 1
    receiver.is_sent[31, 0] = 1
    assert receive_sums(receiver, 32)[31].tolist() == [1] * HIDDEN
    assert not receiver.exchange.peers.report.any()
    assert receive_sums(receiver, 33)[32].isnan().all()
    assert receiver.exchange.peers.report[0] == Wait.COMBINE


def num_allocations(seen: Operators) -> int:
    return sum("empty" in name for name in seen.names)


def test_sums_are_given_memory_before_they_are_sent(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The receiver may run beside kernels whose inputs the host has freed since.
    allocated: list[int] = []
    with Operators() as seen:

        def send(exchange: object, rows: Tensor, weights: Tensor, *_: object, **__: object) -> None:
            assert weights.is_contiguous()
            allocated.append(num_allocations(seen))

        monkeypatch.setattr(ll_launchers, "send_combine", send)
        monkeypatch.setattr(
            ll_launchers,
            "receive_combine",
            lambda *_, **__: allocated.append(num_allocations(seen)),
        )
        rank = make_ranks(2, device, line_tokens=0)[0]
        buffer = object.__new__(NVLinkLowLatencyBuffer)
        buffer._sum_dtype, buffer._device = torch.bfloat16, device
        buffer._kernels = ll_launchers
        buffer._spec = spec_of(MAX_TOKENS)
        rows = torch.zeros(4, HIDDEN, dtype=torch.bfloat16, device=device)
        received = WireTensor(data=rows, format=BF16)
        receive_buffer = ReceiveBuffer.of(rank.exchange.peers, 0, received, 8, 1)
        # A caller may pass a column of a larger tensor.
        weights = torch.zeros(8, 2, device=device)[:, 0]
        before = num_allocations(seen)
        y = buffer._send_results(receive_buffer, rows, 3, slot_weights=weights)
        assert buffer._take_sums(receive_buffer, y) is y
    assert y.shape == (3, HIDDEN)
    assert allocated[0] > before
    assert allocated[1] == allocated[0]


def test_wait_in_vain_is_reported_and_told_to_all(device: torch.device) -> None:
    ranks = make_ranks(2, device)
    send(ranks[0], [[0, 1]], [[1, 1]])
    index = receive(ranks[0])
    phase, epoch, _, _, *missing = ranks[0].exchange.peers.report.tolist()
    assert (phase, epoch, missing) == (Wait.DISPATCH, 1, [0, 1])
    assert index.counts.tolist() == [0, 0]
    assert [int(rank.block[:4].view(torch.int32)) for rank in ranks] == [513, 513]
    assert decode_abort(513) == (0, [1])
    # Rank 1 only records which rank gave up and which ranks were missing, and sends nothing.
    send(ranks[1], [[0, 1]], [[1, 1]])
    assert ranks[1].exchange.peers.report.tolist() == [0, 0, 513, 0, 0, 0]
    assert ranks[0].region("arrived_rows", torch.int32)[:2].tolist() == [1, 0]


@pytest.mark.skipif(not launch.IS_INTERPRETED, reason="all programs of a GPU see the same lines")
def test_nothing_is_handed_out_where_one_program_alone_has_timed_out(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, abort_if_late = make_ranks(2, device, line_tokens=0), ll_dispatch_recv.abort_if_late
    for rank in ranks:
        send(rank, [[0, 1]], [[1, 1]])
    # Program 1 did not see the lines of rank 0 before the timeout; program 0, which counts, did.
    monkeypatch.setattr(
        ll_dispatch_recv,
        "abort_if_late",
        lambda peers, late, *rest: abort_if_late(peers, late + tl.program_id(0), *rest),
    )
    index = receive(ranks[0])
    assert ranks[0].exchange.peers.report[:1].tolist() == [Wait.DISPATCH]
    assert index.counts.tolist() == [0, 0]
    assert index.first.tolist() == [0, 0, 0]


def test_words_that_were_never_written_are_not_taken_for_arrived(device: torch.device) -> None:
    # Check both ranks, because the rank that gives up writes into the blocks of all.
    receiver, _other = make_ranks(2, device)
    # The epoch is after 2**31 combines, none of which sent a sum in bulk.
    receiver.exchange.state[1] = -(2**31) + 1
    receiver.is_sent[0] = 1
    lines = receiver.region("combined_lines", torch.int32).view(-1, 2)
    lines[:2, 1] = -(2**31) + 1
    y = receive_sums(receiver, 1)
    assert receiver.exchange.peers.report[0] == Wait.COMBINE
    assert y.isnan().all()


def test_epochs_leave_out_what_lines_hold_at_first(device: torch.device) -> None:
    ranks = make_ranks(2, device)
    ranks[0].exchange.state[:2] = -1
    ll_dispatch_recv.release_buffer(ranks[0].exchange)
    assert ranks[0].exchange.state[0] == 1
    # The credit of the last epoch before suffices, that of an earlier one does not.
    for credit, is_there in ((-1, True), (-2, False)):
        for rank in ranks:
            rank.region("combined_lines", torch.int64)[:2] = credit << 32
        send(ranks[0], [[0, 3]], [[1, 1]])
        assert (ranks[0].exchange.peers.report[0] == 0) == is_there


def test_nothing_is_stored_beyond_an_index_that_is_too_small(device: torch.device) -> None:
    ranks = make_ranks(2, device)
    for rank in ranks:
        send(rank, [[0, 0], [0, 0]], [[1, 2], [3, 4]])
    # Eight entries of one expert; the index has three slots, followed by a guard.
    num_slots = 3
    index = receive(ranks[0], num_slots=num_slots)
    for memory in (index.memory, index.weights):
        assert (memory[num_slots:] == 77).all()
    assert index.memory[:num_slots].tolist() == [-1] * num_slots
    assert index.slots_of_row.tolist() == [[-1] * 2] * 4
    assert index.counts.tolist() == index.first[:2].tolist() == [0, 0]
    # The other ranks do not know of the fault yet; the combine of this rank reports what it needs.
    assert not ranks[0].exchange.peers.faults.any()
    rows = torch.zeros(num_slots, HIDDEN, dtype=torch.bfloat16, device=device)
    combine(ranks[0], rows, index.slots_of_row)
    for rank in ranks:
        assert rank.lines("combined_lines")[0] == (FaultCode.OVERFLOW + (8 << FLAGS_SHIFT), 1)
    receiver = ranks[1]
    receiver.exchange.state[1] = 1
    receiver.region("combined_lines", torch.int32).view(-1, 2)[1, 1] = 1
    # The other rank has nothing for it.
    receiver.region("arrived_sums", torch.int32)[1] = 1
    y = receive_sums(receiver, 2)
    assert y.isnan().all()
    assert receiver.exchange.peers.faults.tolist() == [[FaultCode.OVERFLOW, 8], [0, 0]]
