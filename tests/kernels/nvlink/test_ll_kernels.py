"""The NVLink kernels in one process, by the worked examples of their docstrings.

A process plays all ranks, one after another: every word is stored before it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
    METADATA_ARRIVALS,
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

    def words_of_lines(self, name: str, num_lines: int) -> Tensor:
        """The words of the first part of a row in lines, of one plane after another."""
        words = self.region(name, torch.int32).view(-1, LINE_BYTES // 4)[:num_lines].cpu()
        return (words[:, :5:2] if launch.IS_INTERPRETED else words[:, :3]).T.flatten()

    def record(self, row: int) -> list[list[float]]:
        """Return experts, positions and weights of the K entries of a row."""
        top_k, words = self.layout.top_k, self.layout.metadata_words
        begin = row * 3 * words
        parts = self.region("metadata", torch.int32)[begin : begin + 3 * words].view(3, words)
        return [*parts[:2, :top_k].tolist(), parts[2, :top_k].view(torch.float32).tolist()]


def spec_of(top_k: int, max_tokens: int) -> BufferSpec:
    return BufferSpec(
        hidden_size=HIDDEN,
        top_k=top_k,
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
    top_k: int = 2,
    max_tokens: int = MAX_TOKENS,
    line_tokens: int = MAX_TOKENS,
    num_programs: int | None = None,
    returns_slots: bool = False,
) -> list[Rank]:
    spec = replace(spec_of(top_k, max_tokens), returns_slots=returns_slots)
    layout = low_latency_layout(spec, world_size, 1, line_tokens)
    # Memory is shared, because an interpreter computes in int32 with addresses below 2**31, such as
    # those of a heap.
    blocks = [
        torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device).share_memory_()
        for _ in range(world_size)
    ]
    programs = num_programs or world_size
    return [
        Rank(
            exchange=LowLatencyExchange.of(
                peer_blocks(rank, blocks, layout, num_programs=programs, max_polls=3), 0
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


def test_sender_stores_a_row_and_a_record_where_the_experts_are(device: torch.device) -> None:
    ranks = make_ranks(2, device)
    x = send(ranks[1], [[0, 3], [3, -1]], [[0.6, 0.4], [1, 0]])
    six, four = torch.tensor([0.6, 0.4]).tolist()
    assert ranks[0].record(MAX_TOKENS) == [[0, -1], [0, 0], [six, four]]
    assert ranks[1].record(MAX_TOKENS) == [[-1, 1], [0, 0], [six, four]]
    assert ranks[1].record(MAX_TOKENS + 1) == [[1, -1], [1, 0], [1, 0]]
    received = [rank.region("data", torch.bfloat16)[: 4 * HIDDEN].view(4, HIDDEN) for rank in ranks]
    assert torch.equal(received[0][2], x[0])
    assert torch.equal(received[1][2:], x)
    # The second row is not written, because rank 0 has no expert of the second token.
    assert not received[0][3].any()
    assert ranks[1].is_sent.tolist() == [[1, 1], [0, 1]]
    assert [rank.lines("count_lines")[2:4] for rank in ranks] == [
        [(1, 1), (0, 1)],
        [(0, 1), (2, 1)],
    ]
    # Two tokens, in bulk, and no fault, in epoch 1.
    assert [rank.lines("header_lines")[2:4] for rank in ranks] == [[(4, 1), (0, 1)]] * 2
    for name in ("arrived_metadata", "arrived_rows"):
        assert [rank.region(name, torch.int32)[:2].tolist() for rank in ranks] == [[0, 1]] * 2
    # One row, two records and a header to the other rank.
    assert ranks[1].exchange.peers.counters[:3].tolist() == [1, 2, 1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Index:
    """The index that a receiver writes, 77 elsewhere; `memory` of row_of_slot has a guard."""

    memory: Tensor
    slots_of_row: Tensor
    weights: Tensor
    counts: Tensor
    first: Tensor


def receive(
    rank: Rank, slabs: SlabMemory = NO_SLABS, *, num_slots: int = 8, num_tokens: int = 4
) -> Index:
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
        num_tokens=num_tokens,
        is_captured=False,
        slabs=slabs,
    )
    return index


def combine(rank: Rank, rows: Tensor, slots_of_row: Tensor, weights: Tensor | None = None) -> None:
    """Send the results of a rank."""
    # Groups of experts are one, or have five slots each.
    first_slot = 5 * torch.arange(3, dtype=torch.int32, device=rows.device)
    ll_combine_send.send_combine(
        rank.exchange,
        rows,
        weights,
        slots_of_row,
        first_slot,
        num_tokens=MAX_TOKENS,
        per_row=False,
        batch=0,
        status=0,
    )


def receive_sums(
    rank: Rank, num_tokens: int, weights: Tensor | None = None, *, in_lines: bool = False
) -> Tensor:
    """Receive the sums of the first tokens of a rank, NaN before."""
    y = torch.full((num_tokens, HIDDEN), float("nan"), dtype=torch.bfloat16)
    y = y.to(rank.block.device)
    ll_combine_recv.receive_combine(
        rank.exchange,
        y,
        rank.is_sent,
        weights,
        wanted_tokens=num_tokens,
        in_lines=in_lines,
        batch=0,
    )
    return y


def say_that_sums_have_come(rank: Rank, epoch: int = 1) -> None:
    """Set the signals of all ranks, and their lines, which say that they do not refuse."""
    rank.region("arrived_sums", torch.int32)[: rank.layout.world_size] = epoch
    lines = rank.region("combined_lines", torch.int32).view(-1, 2)
    lines[: rank.layout.world_size, 1] = epoch


def arrivals_of(rank: Rank) -> list[int]:
    """Return the counters of metadata, rows and sums that are not yet signalled."""
    return rank.exchange.state[METADATA_ARRIVALS : SUM_ARRIVALS + 1].tolist()


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
    ranks = make_ranks(3, device, num_programs=3)
    for rank in ranks:
        orders.append([])
        send(rank, [[0, 3], [3, 5]], [[1, 1], [1, 1]], in_lines=in_lines)
    # Programs of metadata and of rows; those that send headers in lines look at all ranks too.
    turns = [torch.tensor(order).view(-1, 3) for order in orders]
    assert all(torch.equal(each.sort().values, torch.arange(3).expand_as(each)) for each in turns)
    firsts = torch.stack(turns)[:, 3 if in_lines else 0 :, 0]
    assert firsts.shape[1] == 4
    assert all(len(set(each)) == 3 for each in firsts.T.tolist())


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_signals_are_set_by_as_many_senders_as_have_something(
    num_tokens: int, device: torch.device
) -> None:
    ranks = make_ranks(2, device, num_programs=5)
    send(ranks[1], [[0, 3], [3, -1]][:num_tokens], [[0.6, 0.4], [1, 0]][:num_tokens])
    for name in ("arrived_metadata", "arrived_rows"):
        assert [rank.region(name, torch.int32)[:2].tolist() for rank in ranks] == [[0, 1]] * 2
    assert arrivals_of(ranks[1]) == [0, 0, 0]


def test_sums_go_home_in_bulk_and_in_lines_at_once(device: torch.device) -> None:
    ranks = make_ranks(2, device, num_programs=5)
    sender = ranks[0]
    # The memory is as if rank 0 had sent two tokens in bulk and rank 1 one in lines, in epoch 1.
    sender.exchange.state[SOURCES_AT:] = torch.tensor([4, 3], device=device)
    sender.exchange.state[1] = 1
    slots_of_row = torch.full((4, 2), -1, dtype=torch.int32, device=device)
    slots_of_row[:3, 0] = torch.tensor([2, 0, 1], device=device)
    rows = torch.arange(3 * HIDDEN, device=device).view(3, HIDDEN).to(torch.bfloat16)
    combine(sender, rows, slots_of_row)
    home = sender.region("returned", torch.bfloat16)[: 2 * HIDDEN].view(2, HIDDEN)
    assert torch.equal(home, rows[[2, 0]])
    words = ranks[1].words_of_lines("sum_lines", num_lines=4)
    assert torch.equal(words.view(torch.bfloat16)[:HIDDEN], rows[1].cpu())
    # Who gets lines awaits no signal; all hear that rank 0 has combined.
    arrived = [rank.region("arrived_sums", torch.int32)[:2].tolist() for rank in ranks]
    assert arrived == [[1, 0], [0, 0]]
    assert [rank.lines("combined_lines")[0] for rank in ranks] == [(0, 1)] * 2
    assert arrivals_of(sender) == [0, 0, 0]
    assert sender.exchange.peers.counters[3] == 1, "one sum for the other rank"


def test_expert_that_this_rank_does_not_have_gets_no_slot(device: torch.device) -> None:
    ranks = make_ranks(2, device)
    for rank in ranks:
        send(rank, [[0, 1]], [[1, 1]])
    # The first entry of the row from rank 1 names expert 2, but rank 0 has two experts.
    metadata = ranks[0].region("metadata", torch.int32)
    metadata[MAX_TOKENS * 3 * ranks[0].layout.metadata_words] = 2
    index = receive(ranks[0])
    assert index.slots_of_row.tolist() == [[0, 2], [-1, -1], [-1, 3], [-1, -1]]
    assert index.memory[[0, 2, 3]].tolist() == [0, 0, 2]


def test_rows_are_copied_to_the_slabs_of_their_experts(device: torch.device) -> None:
    ranks = make_ranks(2, device)
    x = send(ranks[0], [[0, -1]], [[1, 0]])
    theirs = send(ranks[1], [[0, 1], [1, -1]], [[0.5, 2], [4, 0]])

    slab = torch.full((8, HIDDEN), float("nan"), dtype=torch.bfloat16, device=device)
    slabs = SlabMemory(
        data=slab.view(torch.int32),
        scales=None,
        token_of_slot=torch.full((8,), 77, dtype=torch.int32, device=device),
        source_ranges=torch.full((2, 2), 77, device=device),
    )
    index = receive(ranks[0], slabs)
    assert index.counts.tolist() == [2, 2]
    assert index.first.tolist() == [0, 4, 8]
    assert index.slots_of_row.tolist() == [[0, -1], [-1, -1], [1, 4], [5, -1]]
    used = [0, 1, 4, 5]
    assert index.weights[used].tolist() == [1, 0.5, 2, 4]
    assert torch.equal(slab[used], torch.cat([x, theirs[:1], theirs]))
    assert slab[[2, 3, 6, 7]].isnan().all()
    assert slabs.token_of_slot.tolist() == [0, 0, 77, 77, 0, 1, 77, 77]
    # Expert 0 has a slot of each rank, expert 1 two of rank 1.
    assert slabs.source_ranges.tolist() == [[1, 2**32 + 1], [0, 2]]


def test_slots_go_home_apart_and_are_weighed_there(device: torch.device) -> None:
    ranks = make_ranks(2, device, top_k=3, returns_slots=True)
    sender, receiver = ranks
    sender.exchange.state[SOURCES_AT:] = torch.tensor([4, 4], device=device)
    sender.exchange.state[1] = 1
    slots_of_row = torch.full((4, 3), -1, dtype=torch.int32, device=device)
    slots_of_row[3] = torch.tensor([5, -1, 2], device=device)
    rows = torch.full((6, HIDDEN), float("nan"), dtype=torch.bfloat16, device=device)
    rows[5], rows[2] = 10, 2
    home = receiver.region("returned", torch.bfloat16)[: 6 * HIDDEN].view(6, HIDDEN)
    home.fill_(float("nan"))
    combine(sender, rows, slots_of_row)
    # The sums of token 1 of rank 1, from rank 0.
    assert torch.equal(home[[3, 5]], rows[[5, 2]])
    assert home[[0, 1, 2, 4]].isnan().all()
    assert sender.exchange.peers.counters[3] == 2
    receiver.is_sent[1] = torch.tensor([1, 0, 1], device=device)
    say_that_sums_have_come(receiver)
    receiver.exchange.state[1] = 1
    weights = torch.tensor([[9, 9, 9], [0.5, float("nan"), 2]], device=device)
    y = receive_sums(receiver, 2, weights)
    assert y.tolist() == [[0] * HIDDEN, [9] * HIDDEN]


def test_slots_of_a_row_go_home_as_one_sum(device: torch.device) -> None:
    ranks = make_ranks(2, device, top_k=3)
    sender = ranks[0]
    # The memory is as if both sources had sent two tokens in bulk, of which one had slots here;
    # their headers are already those of the next batch.
    sender.exchange.state[SOURCES_AT:] = torch.tensor([4, 4], device=device)
    sender.exchange.state[1] = 1
    slots_of_row = torch.full((4, 3), -1, dtype=torch.int32, device=device)
    slots_of_row[3] = torch.tensor([5, -1, 2], device=device)
    rows = torch.full((6, HIDDEN), float("nan"), dtype=torch.bfloat16, device=device)
    rows[5], rows[2] = 0, 0
    rows[5, :2] = torch.tensor([10.0, 1.0], device=device)
    rows[2, :2] = torch.tensor([2.0, 3.0], device=device)
    weights = torch.tensor([0, 0, 2, 0, 0, 0.5], device=device)
    combine(sender, rows, slots_of_row, weights)
    # Token 1 of rank 1, from rank 0.
    home = ranks[1].region("returned", torch.bfloat16)[: 4 * HIDDEN].view(4, HIDDEN)
    assert home[1, :2].tolist() == [9, 6.5]
    assert not home[[0, 2, 3]].any()
    assert ranks[1].region("arrived_sums", torch.int32)[:2].tolist() == [1, 0]


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


class Allocations(TorchDispatchMode):
    """A mode that counts allocations."""

    count = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.count += "empty" in str(func)
        return func(*args, **(kwargs or {}))


def test_sums_are_given_memory_before_they_are_sent(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The receiver may run beside kernels whose inputs the host has freed since.
    allocated: list[int] = []
    with Allocations() as seen:

        def send(exchange: object, rows: Tensor, weights: Tensor, *_: object, **__: object) -> None:
            assert weights.is_contiguous()
            allocated.append(seen.count)

        monkeypatch.setattr(ll_launchers, "send_combine", send)
        monkeypatch.setattr(
            ll_launchers, "receive_combine", lambda *_, **__: allocated.append(seen.count)
        )
        rank = make_ranks(2, device, line_tokens=0)[0]
        buffer = object.__new__(NVLinkLowLatencyBuffer)
        buffer._sum_dtype, buffer._device = torch.bfloat16, device
        buffer._kernels = ll_launchers
        buffer._spec = spec_of(2, MAX_TOKENS)
        rows = torch.zeros(4, HIDDEN, dtype=torch.bfloat16, device=device)
        received = WireTensor(data=rows, format=BF16)
        receive_buffer = ReceiveBuffer.of(rank.exchange.peers, 0, received, 8, 1)
        # A caller may pass a column of a larger tensor.
        weights = torch.zeros(8, 2, device=device)[:, 0]
        before = seen.count
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
