"""Dispatch and combine of one rank, in a process that writes the data of the other rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.kernels.nvlink.common.plan_parts import IndexSizes, NVLinkNormalExchangePlan, PlanBlock
from epcomm.kernels.nvlink.normal.combine import SUM_FORMATS, combine_rows
from epcomm.kernels.nvlink.normal.dispatch import dispatch_rows
from epcomm.kernels.nvlink.normal.exchange import NormalExchange, State
from epcomm.protocol import (
    HEADER_WORDS,
    REPORT_EPOCH,
    REPORT_WAIT,
    BatchFlags,
    FaultCode,
    Wait,
    pack_status,
)
from epcomm.quantization import dequantize, quantize
from epcomm.spec import BufferSpec
from epcomm.types import WireFormat
from tests.kernels.nvlink.peers import peer_blocks

BF16 = WireFormat.of(torch.bfloat16)
WORLD_SIZE, MAX_TOKENS, NUM_BLOCKS = 2, 2, 2
# Polls of a millisecond: enough for this rank's own work, and few for a rank that does not arrive.
PATIENT, IMPATIENT = 10_000, 3
# One expert a rank, top-1.
SPEC = BufferSpec(
    hidden_size=8,
    top_k=1,
    num_local_experts=1,
    dispatch_format=BF16,
    hidden_format=BF16,
    max_tokens_per_rank=MAX_TOKENS,
)


class Rank0:
    """Rank 0 of two, and the words of the blocks of both."""

    def __init__(self, device: torch.device, max_polls: int) -> None:
        self.device, self.layout = device, NVLinkBuffer.layout_for(SPEC, WORLD_SIZE)
        num_bytes = self.layout.num_bytes
        blocks = [
            torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(WORLD_SIZE)
        ]
        self.peers = peer_blocks(
            0, blocks, self.layout, num_programs=NUM_BLOCKS, max_polls=max_polls
        )
        self.exchange = NormalExchange.of(self.peers)
        self.words, self.theirs = [block.view(torch.int32) for block in blocks]

    def receive(self, region: str, values: list[int], *, at: int = 0) -> None:
        """Store the words of rank 1 in a region, `at` words after its beginning."""
        begin = self.layout.offsets[region] // 4 + at
        if region in self.layout.buffer_sizes():
            begin += self.layout.buffers_at // 4
        self.words[begin : begin + len(values)] = torch.tensor(
            values, dtype=torch.int32, device=self.device
        )

    def receive_signals(self, *, rows_ready: int = NUM_BLOCKS) -> None:
        self.receive("dispatch_begin", [1], at=1)
        self.receive("counts_ready", [NUM_BLOCKS], at=1)
        self.receive("rows_ready", [rows_ready], at=1)

    def receive_header(self, header: list[int]) -> None:
        """Store the header of rank 1: fault and flags, T, rows for each rank, slots by expert."""
        assert len(header) == HEADER_WORDS + 2 * WORLD_SIZE
        self.receive("header", header, at=self.layout.header_bytes // 4)

    def dispatch(
        self, num_tokens: int, *, status: int = 0, has_budget: bool = True
    ) -> NVLinkNormalExchangePlan:
        """Send tokens to the expert of this rank; indices begin as 77."""
        num_rows = WORLD_SIZE * MAX_TOKENS
        sizes = IndexSizes(num_rows=num_rows, num_slots=num_rows, per_expert=None, is_dense=False)
        block = PlanBlock.of(
            *(SPEC, WORLD_SIZE, self.device, num_tokens, sizes),
            has_budget=has_budget,
            is_compact=False,
        )
        block.memory.fill_(77)
        dispatch_rows(
            self.exchange,
            torch.ones(num_tokens, SPEC.hidden_size, dtype=torch.bfloat16, device=self.device),
            None,
            None,
            buffer_index=0,
            topk=(
                torch.zeros(num_tokens, 1, dtype=torch.int64, device=self.device),
                torch.ones(num_tokens, 1, device=self.device),
            ),
            received=block,
            status=status,
            wanted_tokens=num_tokens,
        )
        return block.exchange_plan(sizes)


def plan_of(
    spec: BufferSpec, places: Tensor, rows_from: Tensor, row_base: Tensor, has_failed: Tensor
) -> NVLinkNormalExchangePlan:
    """Return the plan of a dispatch whose tokens went to some places."""
    world_size, device = len(rows_from), places.device
    sizes = IndexSizes(num_rows=0, num_slots=0, per_expert=None, is_dense=True)
    block = PlanBlock.of(
        *(spec, world_size, device, len(places) // world_size, sizes),
        has_budget=False,
        is_compact=True,
    )
    return replace(
        block.exchange_plan(sizes),
        places=places,
        rows_from=rows_from,
        row_base=row_base,
        has_failed=has_failed,
    )


def values(tensor: Tensor | None) -> list[float]:
    return tensor.flatten().tolist()


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
    rank = Rank0(device, PATIENT)
    rank.receive_signals()
    rank.receive_header([pack_status(FaultCode.NONE, flags_of_rank_1), 1, 1, 0, 1, 0])
    # The only row of the rank is of expert 0, at position 0, with a weight of 1: zeros and the bits
    # of 1.0.
    metadata_words = rank.layout.metadata_bytes // 4
    at = MAX_TOKENS * metadata_words + 2 * rank.layout.metadata_words
    rank.receive("metadata", [0x3F800000], at=at)
    trains = BatchFlags.GRAD_ENABLED | BatchFlags.of_experts([True, True])
    parts = rank.dispatch(1, status=pack_status(FaultCode.NONE, trains), has_budget=has_budget)
    assert rank.peers.faults[:, 0].tolist() == [0, int(code)]
    assert parts.has_failed.tolist() == [int(code != FaultCode.NONE), 1]
    if not has_budget:
        assert values(parts.index.num_tokens_per_expert) == [2]
        assert values(parts.index.row_of_slot)[:2] == [0, MAX_TOKENS]
        assert values(parts.slot_weights)[:2] == [1, 1]


def test_index_is_emptied_where_rows_do_not_come(device: torch.device) -> None:
    rank = Rank0(device, IMPATIENT)
    # One of the blocks of rank 1 is late.
    rank.receive_signals(rows_ready=NUM_BLOCKS - 1)
    rank.receive_header([0, 1, 1, 0, 1, 0])
    parts = rank.dispatch(2)
    assert rank.peers.report[REPORT_WAIT] in (Wait.ROWS, Wait.DISPATCH_BEGIN)
    assert rank.peers.report[REPORT_EPOCH] == 1, "of dispatches, not of their blocks"
    assert rank.theirs[0] != 0, "the other rank is aborted"
    assert parts.has_failed[0] == 1
    assert values(parts.index.num_tokens_per_expert) == [0]
    assert values(parts.index.first_slot) == [0, 0]
    assert values(parts.index.row_of_slot) == [-1] * 4
    assert values(parts.index.slots_of_row) == [-1] * 4
    assert values(parts.rows_from) == [0, 0]


def test_nothing_is_stored_beyond_the_index_whatever_a_rank_has_sent(device: torch.device) -> None:
    rank = Rank0(device, PATIENT)
    rank.receive_signals()
    # Rank 1 reports five rows, where it may send two, of an expert that this rank does not have.
    rank.receive_header([0, 5, 5, 0, 5, 0])
    num_words = WORLD_SIZE * MAX_TOKENS * rank.layout.metadata_bytes // 4
    rank.receive("metadata", [3] * num_words)
    parts = rank.dispatch(0, has_budget=False)
    assert values(parts.index.slots_of_row) == [-1] * 4
    assert values(parts.index.row_of_slot) == [77] * 4
    assert values(parts.slot_weights.view(torch.int32)) == [77] * 4
    assert values(parts.rows_from) == [0, MAX_TOKENS]


# Epochs after 2**31 combines, and the combine whose number is 0.
@pytest.mark.parametrize("epoch", [-(2**31) + 1, 0])
@pytest.mark.parametrize("is_there", [False, True])
def test_sums_that_nobody_sent_are_not_taken_for_arrived(
    epoch: int, is_there: bool, device: torch.device
) -> None:
    rank = Rank0(device, PATIENT if is_there else IMPATIENT)
    layout = rank.layout
    rank.exchange.state[State.COMBINE_EPOCH] = epoch - 1
    rank.receive("combine_begin", [epoch - 1, epoch])
    # The only token of this rank went to rank 1, and this rank received no row.
    numbers = torch.zeros(3, WORLD_SIZE, dtype=torch.int32, device=device)
    places = torch.tensor([-1, 0], dtype=torch.int32, device=device)
    if is_there:
        # Set the signal of the first item as rank 1 would.
        rank.receive("sums_ready", [epoch or -(2**31)], at=layout.num_items)
    rows = torch.zeros(0, SPEC.hidden_size, dtype=torch.bfloat16, device=device)
    status = layout.offsets["combine_status"] // 4
    rank.theirs[status : status + 2 * WORLD_SIZE] = 77
    plan = plan_of(SPEC, places, numbers[0], numbers[1], numbers[2])
    y = combine_rows(rank.exchange, rows, plan, is_per_row=True)
    # The status of rank 1 is in the half of this epoch, in the block of the other rank.
    sent = rank.theirs[status : status + 2 * WORLD_SIZE].view(2, WORLD_SIZE)
    assert sent[epoch & 1].tolist() == [0, 77]
    assert (rank.peers.report[0] == 0) == is_there
    assert y.isnan().any() != is_there
    assert rank.exchange.state[State.COMBINE_EPOCH] == epoch


# Each combination is a kernel to compile: every dtype, and both kinds of sizes; codes of one
# column, and of several pieces of a row, of which the last one is short.
@pytest.mark.parametrize(
    ("dtype", "hidden_size", "sums"),
    [
        (torch.bfloat16, 3, None),
        (torch.float16, 8, None),
        (torch.float32, 3, None),
        (torch.bfloat16, 2353, SUM_FORMATS[0]),
        (torch.bfloat16, 1, SUM_FORMATS[1]),
        (torch.float32, 1353, SUM_FORMATS[1]),
        (torch.bfloat16, 2354, SUM_FORMATS[2]),
        (torch.float32, 1354, SUM_FORMATS[2]),
        pytest.param(torch.float16, 2, SUM_FORMATS[2], marks=pytest.mark.slow),
        pytest.param(torch.float32, 1353, SUM_FORMATS[0], marks=pytest.mark.slow),
        pytest.param(torch.float16, 2353, SUM_FORMATS[1], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sums_are_those_of_torch_to_the_bit(
    dtype: torch.dtype, hidden_size: int, sums: WireFormat | None, device: torch.device
) -> None:
    wire = WireFormat.of(dtype)
    spec = BufferSpec(
        hidden_size=hidden_size,
        top_k=2,
        num_local_experts=2,
        dispatch_format=wire,
        hidden_format=wire,
        combine_format=sums,
        max_tokens_per_rank=MAX_TOKENS,
    )
    layout = NVLinkBuffer.layout_for(spec, 1)
    block = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    peers = peer_blocks(0, [block], layout, num_programs=NUM_BLOCKS, max_polls=PATIENT)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, hidden_size, generator=generator)
    # Blocks of zeros, of subnormal numbers, and with an infinity.
    rows[:, 256:384], rows[:, 384:512] = 0.0, rows[:, 384:512] * 2.0**-126
    rows[2, 700:701] = float("inf")
    rows = rows.to(dtype).to(device)
    bias = torch.randn(2, hidden_size, generator=generator).to(device)
    weights = torch.rand(4, generator=generator).to(device)
    slots = torch.tensor([[2, 0], [-1, 3]], dtype=torch.int32, device=device)
    numbers = torch.tensor([[2], [0]], dtype=torch.int32, device=device)
    has_failed = torch.zeros(2, dtype=torch.int32, device=device)
    places = torch.tensor([0, 1], dtype=torch.int32, device=device)
    plan = plan_of(spec, places, numbers[0], numbers[1], has_failed)
    y = combine_rows(
        NormalExchange.of(peers),
        rows,
        replace(plan, index=replace(plan.index, slots_of_row=slots)),
        slot_weights=weights,
        bias=bias,
        sums=sums,
    )
    parts = rows.float() * weights.unsqueeze(1)
    sent = quantize(torch.stack([parts[2] + parts[0], parts[3]]).to(dtype), sums or wire)
    expected = (bias + dequantize(sent, torch.float32)).to(dtype)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(), expected.nan_to_num())
    assert y.shape == (2, hidden_size)
    assert y.is_contiguous()
