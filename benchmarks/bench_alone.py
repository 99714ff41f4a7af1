"""Time the NVLink kernels of one rank alone, on one GPU, where all that its peers send is there.

    python -m benchmarks.bench_alone --output benchmarks/results/h200_alone.json
    PYTHONPATH=../before python benchmarks/bench_alone.py

The second command measures another checkout: run both in turn. Contention between GPUs does not
show: the memory of all ranks is on one GPU, and one rank runs at a time. First the ranks run one
after another, which stores what they send, and the sums of rank 0 are compared with torch. On the
clock rank 0 runs alone, each time from the same state and signals. A call lasts from the start of
its first kernel to the end of its last one, as CUPTI reports them for a graph.

    combine, combine_without_weights      normal mode, W = 2, T = 4096, with slot weights or none
    dispatch, dispatch_with_budget        likewise, by exact sizes or with a budget of slots
    ..._of_8_ranks_1_token                likewise, W = 8, T = 1, M = 4096
    low_latency_T                         the four kernels of low latency, W = 8, M = 128, FP8
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Generic

import torch
import typer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import Output, gpu_of, report_of, write_report
from epcomm.bench.check import CheckError
from epcomm.bench.timing import captured
from epcomm.buffers.nvlink.low_latency import NVLinkLowLatencyBuffer
from epcomm.buffers.nvlink.low_latency_state import LowLatencyKernels, ReceiveBuffer, kind_of
from epcomm.buffers.nvlink.memory import received_rows
from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.buffers.nvlink.normal_counts import IndexSizes
from epcomm.buffers.nvlink.normal_plans import ExchangePlanMemory
from epcomm.buffers.nvlink.plan_blocks import PlanBlockParts
from epcomm.kernels.nvlink.common.exchange import LayoutT, PeerBlocks, first_state
from epcomm.kernels.nvlink.common.layout import ANEW
from epcomm.kernels.nvlink.normal.combine import combine_rows
from epcomm.kernels.nvlink.normal.dispatch import dispatch_rows
from epcomm.kernels.nvlink.normal.exchange import NormalExchange
from epcomm.protocol import FaultCode
from epcomm.quantization import FP8_FLOAT32_SCALES, dequantize
from epcomm.records import SlotIndex
from epcomm.spec import BufferSpec
from epcomm.types import RowsPer, WireFormat

HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
# M of normal mode and of low latency; their blocks and programs, as buffers have them by default.
MAX_TOKENS, MAX_LOW_LATENCY_TOKENS = 4096, 128
NUM_SMS, NUM_PROGRAMS = 32, 128
# The signals of peers in normal mode, which are compared by order.
AHEAD = 2**20
BF16 = WireFormat.of(torch.bfloat16)
# Replays of a call, and those of them that count no time.
_CALLS, _WARM_UP = 100, 10
# The kernels of normal mode; the names of those of low latency begin with _.
_NORMAL_KERNELS = ("dispatch_rows", "combine_rows")


def spec_of(world_size: int, max_tokens: int, wire: WireFormat) -> BufferSpec:
    """Return the specification of one receive buffer."""
    return BufferSpec(
        hidden_size=HIDDEN,
        top_k=TOP_K,
        num_local_experts=EXPERTS // world_size,
        dispatch_format=wire,
        hidden_format=BF16,
        max_tokens_per_rank=max_tokens,
        batches_in_flight=1,
    )


class Ranks(Generic[LayoutT]):
    """The blocks of all ranks, on this GPU, and their batches: powers of two, so sums are exact."""

    def __init__(
        self,
        layout: LayoutT,
        num_programs: int,
        num_tokens: int,
        device: torch.device,
    ) -> None:
        """Allocate them."""
        self.layout, self.size, self.device = layout, layout.world_size, device
        self.blocks = [
            torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
            for _ in range(self.size)
        ]
        table = torch.tensor([block.data_ptr() for block in self.blocks], device=device)
        zeros = partial(torch.zeros, device=device)
        self.peers = [
            PeerBlocks(
                rank=rank,
                num_programs=num_programs,
                max_polls=1000,
                own_address=block.data_ptr(),
                table=table,
                layout=layout,
                excluded=zeros(self.size, dtype=torch.int32),
                counters=zeros(5, dtype=torch.int64),
                faults=zeros(self.size, 2, dtype=torch.int64),
                report=zeros(4 + self.size, dtype=torch.int32),
            )
            for rank, block in enumerate(self.blocks)
        ]
        torch.manual_seed(0)
        shape = (self.size, num_tokens)
        self.x = 2.0 ** torch.randint(0, 3, (*shape, HIDDEN), device=device, dtype=torch.bfloat16)
        self.ids = (
            torch.rand(*shape, EXPERTS, device=device).argsort(dim=2)[..., :TOP_K].contiguous()
        )
        self.weights = 2.0 ** torch.randint(0, 2, (*shape, TOP_K), device=device).float()

    def region(self, name: str, rank: int, sizes: dict[str, int], begin: int = 0) -> Tensor:
        """View a region of a block by the rank of which its words are."""
        begin += self.layout.offsets[name]
        return self.blocks[rank][begin : begin + sizes[name]].view(torch.int32).view(self.size, -1)

    def run_experts(self, rank: int, spec: BufferSpec, index: SlotIndex) -> Tensor:
        """Multiply the row of each slot by a factor of its expert, 1 or 2."""
        rows = dequantize(received_rows(self.blocks[rank], self.layout, 0, spec), torch.bfloat16)
        counts = index.num_tokens_per_expert
        experts = torch.arange(len(counts), device=self.device).repeat_interleave(counts)
        assert index.row_of_slot is not None
        return rows[index.row_of_slot[: len(experts)]] * (1 + experts % 2).unsqueeze(1)

    def check(self, y: Tensor, *, is_weighted: bool = True) -> None:
        """Compare the sums of rank 0 with torch."""
        factors = (1 + self.ids[0] % 2) * (self.weights[0] if is_weighted else 1.0)
        if not torch.equal(y, (self.x[0] * factors.sum(dim=1, keepdim=True)).bfloat16()):
            raise CheckError("the sums of rank 0 are wrong; nothing was measured")


def time_normal(world_size: int, num_tokens: int, device: torch.device) -> dict[str, list[float]]:
    """Check normal mode, and return microseconds of the calls of each kernel."""
    spec = spec_of(world_size, MAX_TOKENS, BF16)
    layout = NVLinkBuffer.layout_for(spec, world_size)
    ranks = Ranks(layout, NUM_SMS, num_tokens, device)
    exchanges = [NormalExchange.of(peers) for peers in ranks.peers]
    most = layout.num_rows * TOP_K
    sizes = IndexSizes(num_rows=layout.num_rows, num_slots=most, per_expert=None, is_dense=False)
    memory = ExchangePlanMemory(spec=spec, world_size=world_size, device=device)
    for rank in range(world_size):
        for name in ("dispatch_begin", "counts_ready", "rows_ready", "combine_begin", "sums_ready"):
            words = ranks.region(name, rank, layout.shared_sizes())
            # That of an item of sums is the number of its combine.
            words.fill_(1 if name == "sums_ready" else AHEAD)
            words[rank] = 0
    signals = [block[: layout.offsets["returned"]] for block in ranks.blocks]
    kept = [each.clone() for each in signals]

    def reset(rank: int = 0) -> None:
        signals[rank].copy_(kept[rank])
        exchanges[rank].state.zero_()
        exchanges[rank].counted.zero_()

    def dispatch(rank: int = 0, *, has_budget: bool = True) -> PlanBlockParts:
        block = memory.block(
            num_tokens, sizes, has_budget=has_budget, is_compact=False, wants_row_topk=False
        )
        dispatch_rows(
            exchanges[rank],
            ranks.x[rank],
            None,
            None,
            buffer_index=0,
            topk=(ranks.ids[rank], ranks.weights[rank]),
            received=block.received,
            wanted_tokens=num_tokens,
        )
        return block.parts(sizes)

    def combine(rank: int = 0, *, is_weighted: bool = True) -> Tensor:
        plan = plans[rank]
        return combine_rows(
            exchanges[rank],
            results[rank],
            plan.sends,
            plan.arrivals,
            plan.index.slots_of_row,
            num_tokens,
            slot_weights=plan.slot_weights if is_weighted else None,
        )

    plans: dict[int, PlanBlockParts] = {}
    # In the second round all that the others send is there.
    for rank in 2 * [*range(world_size)]:
        reset(rank)
        plans[rank] = dispatch(rank)
    results = [ranks.run_experts(rank, spec, plan.index) for rank, plan in plans.items()]
    calls: dict[str, Callable[[], object]] = {
        "dispatch": partial(dispatch, has_budget=False),
        "dispatch_with_budget": dispatch,
    }
    for name, is_weighted in (("combine", True), ("combine_without_weights", False)):
        calls[name] = call = partial(combine, is_weighted=is_weighted)
        for rank in range(1, world_size):
            reset(rank)
            call(rank)
        reset()
        ranks.check(call(), is_weighted=is_weighted)
    results[0].normal_()
    return {name: time_call(call, reset) for name, call in calls.items()}


def time_low_latency(world_size: int, num_tokens: int, device: torch.device) -> list[float]:
    """Check low latency with FP8 rows; return microseconds of its four kernels together."""
    spec = spec_of(world_size, MAX_LOW_LATENCY_TOKENS, FP8_FLOAT32_SCALES)
    layout = NVLinkLowLatencyBuffer.layout_for(spec, world_size)
    ranks, kernels = Ranks(layout, NUM_PROGRAMS, num_tokens, device), LowLatencyKernels.load()
    most = layout.num_rows * TOP_K
    buffers = [
        ReceiveBuffer.of(peers, 0, received_rows(block, layout, 0, spec), most, 1)
        for peers, block in zip(ranks.peers, ranks.blocks, strict=True)
    ]
    y = torch.empty_like(ranks.x[0])
    for each in buffers:
        each.batch, each.num_tokens = 0, num_tokens
        each.is_in_lines = num_tokens <= layout.line_tokens

    def send(rank: int) -> None:
        kernels.send_dispatch(
            buffers[rank].exchange,
            ranks.x[rank],
            ranks.ids[rank],
            ranks.weights[rank],
            buffers[rank].is_sent,
            status=0,
            batch=0,
            is_captured=False,
            kind=kind_of(spec.dispatch_format),
            scale_block=spec.dispatch_format.scale_block,
            profile="rint127",
            in_lines=buffers[rank].is_in_lines,
        )

    def receive(rank: int) -> None:
        mine = buffers[rank]
        kernels.receive_dispatch(
            mine.exchange,
            mine.row_of_slot,
            mine.slots_of_row,
            mine.slot_weights,
            mine.index.num_tokens_per_expert,
            mine.index.first_slot,
            expert_alignment=1,
            is_captured=False,
        )

    def send_results(rank: int) -> None:
        weights = buffers[rank].slot_weights
        buffers[rank].send_results(kernels, results[rank], weights, RowsPer.SLOT, FaultCode.NONE)

    for step in (send, receive):
        for rank in range(world_size):
            step(rank)
    results = [ranks.run_experts(rank, spec, each.index) for rank, each in enumerate(buffers)]
    for rank in range(world_size):
        send_results(rank)
    buffers[0].take_sums(kernels, y, None)
    ranks.check(y)
    begin = layout.buffer_offset(0)
    for name in ANEW:
        # What rank 0 has sent to itself is not there yet.
        ranks.region(name, 0, layout.buffer_sizes(), begin)[0] = 0
    words = ranks.blocks[0][: begin + layout.offsets["metadata"]]
    kept, state = words.clone(), first_state(world_size, device)

    def reset() -> None:
        words.copy_(kept)
        buffers[0].exchange.state.copy_(state)

    def run() -> None:
        for step in (send, receive, send_results):
            step(0)
        buffers[0].take_sums(kernels, y, None)

    return time_call(run, reset, 4)


def time_call(
    call: Callable[[], object], reset: Callable[[], None], kernels: int = 1
) -> list[float]:
    """Return microseconds of calls, each of `kernels` kernels."""
    graph = captured(lambda: (reset(), call()))
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_CALLS):
            graph.replay()
        torch.cuda.synchronize()
    spans = sorted(
        (each.time_range.start, each.time_range.end)
        for each in found.events() or ()
        if each.name in _NORMAL_KERNELS or each.name.startswith("_")
    )
    assert len(spans) == _CALLS * kernels, f"CUPTI reported {len(spans)} kernels"
    starts = range(_WARM_UP * kernels, len(spans), kernels)
    return [spans[first + kernels - 1][1] - spans[first][0] for first in starts]


def main(output: Annotated[Path | None, typer.Option(help="Of the report.")] = None) -> None:
    """Check, measure, and print medians in microseconds."""
    device = gpu_of("bench_alone")
    sys.stderr.write("contention between GPUs does not show: rank 0 runs alone on one GPU\n")
    report = report_of("alone", {}, device, "benchmarks.bench_alone")
    try:
        with torch.no_grad():
            found = time_normal(2, 4096, device)
            for name, us in time_normal(8, 1, device).items():
                found[f"{name}_of_8_ranks_1_token"] = us
            for tokens in (1, 32, 128):
                found[f"low_latency_{tokens}"] = time_low_latency(8, tokens, device)
    except CheckError as error:
        sys.exit(str(error))
    us = {f"{name}_us": median(values) for name, values in found.items()}
    sys.stdout.write(f"{json.dumps(us)}\n")
    write_report({**report, **us}, Output(output=output))


if __name__ == "__main__":
    typer.run(main)
