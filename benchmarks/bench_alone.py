"""Time the NVLink kernels of one rank alone, on one GPU, where all that its peers send is there.

    python -m benchmarks.bench_alone --output benchmarks/results/h100_alone.json
    PYTHONPATH=../before python benchmarks/bench_alone.py

The second command measures another checkout: run both in turn. Contention between GPUs does not
show: the memory of all ranks is on one GPU, and one rank runs at a time. First the ranks run one
after another, which stores what they send, and the sums of rank 0 are compared with torch. On the
clock rank 0 runs alone, each time from the same state and signals. A call lasts from the start of
its first kernel to the end of its last one, as CUPTI reports them for a graph.

    combine, combine_without_weights, dispatch    normal mode, W = 2, T = 4096
    ..._of_8_ranks_1_token                        likewise, W = 8, T = 1, M = 4096
    low_latency_T                                 all four kernels, W = 8, M = 128, FP8 rows
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import Output, gpu_of, report_of, write_report
from epcomm.bench.check import CheckError
from epcomm.bench.timing import captured
from epcomm.buffers.nvlink import base
from epcomm.buffers.nvlink.low_latency import NVLinkLowLatencyBuffer
from epcomm.buffers.nvlink.memory import SymmetricMemory
from epcomm.buffers.nvlink.normal import NVLinkStaticBuffer
from epcomm.calls.call import DispatchCall
from epcomm.errors import RankNames
from epcomm.kernels.nvlink.common.exchange import first_state
from epcomm.kernels.nvlink.common.layout import ANEW
from epcomm.protocol import BatchFlags
from epcomm.quantization import FP8_FLOAT32_SCALES, dequantize
from epcomm.records import SlotIndex
from epcomm.spec import BufferSpec
from epcomm.types import RowsPer, WireFormat

HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
# M of normal mode and of low latency.
MAX_TOKENS, MAX_LOW_LATENCY_TOKENS = 4096, 128
# The signals of peers in normal mode, which are compared by order.
AHEAD = 2**20
BF16 = WireFormat.of(torch.bfloat16)
# Replays of a call, and those of them that count no time.
_CALLS, _WARM_UP = 100, 10
# The kernels of normal mode; the names of those of low latency begin with _.
_NORMAL_KERNELS = ("dispatch_rows", "combine_rows")


class Ranks:
    """Buffers and batches of all ranks on this GPU; values are powers of two, so sums are exact."""

    def __init__(
        self,
        kind: type[NVLinkStaticBuffer | NVLinkLowLatencyBuffer],
        wire: WireFormat,
        max_tokens: int,
        shape: tuple[int, int],
        device: torch.device,
    ) -> None:
        """Open buffers of one batch for `shape`, W and T."""
        self.size, num_tokens = shape
        spec = BufferSpec(
            hidden_size=HIDDEN,
            top_k=TOP_K,
            num_local_experts=EXPERTS // self.size,
            dispatch_format=wire,
            hidden_format=BF16,
            max_tokens_per_rank=max_tokens,
            batches_in_flight=1,
        )
        layout: Any = kind.layout_for(spec, self.size)
        # A line more, for the signals of a barrier.
        num_bytes = layout.num_bytes + 1024
        self.layout, zeros = layout, partial(torch.zeros, dtype=torch.uint8, device=device)
        self.blocks = [zeros(num_bytes) for _ in range(self.size)]
        self.buffers = [self._open(kind, spec, rank) for rank in range(self.size)]
        torch.manual_seed(0)
        self.calls = [
            DispatchCall(
                hidden_states=self._powers(3, num_tokens, HIDDEN).bfloat16(),
                topk_ids=torch.rand(num_tokens, EXPERTS, device=device).topk(TOP_K).indices,
                topk_weights=self._powers(2, num_tokens, TOP_K),
                flags=BatchFlags.NONE,
            )
            for _ in range(self.size)
        ]

    def _open(self, kind: type, spec: BufferSpec, rank: int) -> Any:  # noqa: ANN401 - of both modes
        """Open the buffer of a rank, whose peers are not processes."""
        collectives = SimpleNamespace(
            rank=rank,
            world_size=self.size,
            device=self.blocks[rank].device,
            names=RankNames.of_all(rank, self.size),
            streams=SimpleNamespace(follow=lambda device: None),
            kernel_timeout_s=1.0,
        )
        memory = SymmetricMemory(
            block=self.blocks[rank],
            addresses=tuple(block.data_ptr() for block in self.blocks),
            keeps=None,
        )
        with (
            patch.object(base, "open_symmetric_memory", lambda *_, **__: memory),
            patch.object(kind, "_warm_up", lambda _: None),
        ):
            calls = SimpleNamespace(
                collectives=collectives, gather_records=lambda mine, **_: [mine]
            )
            buffer = kind(calls, spec)
            buffer.prepare()
        return buffer

    def _powers(self, count: int, *shape: int) -> Tensor:
        return 2.0 ** torch.randint(0, count, shape, device=self.blocks[0].device)

    def region(self, name: str, rank: int, sizes: dict[str, int], begin: int = 0) -> Tensor:
        """View a region of a block by the rank of which its words are."""
        begin += self.layout.offsets[name]
        return self.blocks[rank][begin : begin + sizes[name]].view(torch.int32).view(self.size, -1)

    def results(self, rank: int, index: SlotIndex) -> Tensor:
        """Multiply the row of each slot by a factor of its expert, 1 or 2."""
        rows = dequantize(self.buffers[rank].received_rows()[0], torch.bfloat16)
        counts = index.num_tokens_per_expert
        experts = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        assert index.row_of_slot is not None
        return rows[index.row_of_slot[: len(experts)]] * (1 + experts % 2).unsqueeze(1)

    def check(self, y: Tensor, *, is_weighted: bool = True) -> None:
        """Compare the sums of rank 0 with torch."""
        call = self.calls[0]
        assert isinstance(call.hidden_states, Tensor)
        factors = (1 + call.topk_ids % 2) * (call.topk_weights if is_weighted else 1.0)
        if not torch.equal(y, (call.hidden_states * factors.sum(1, keepdim=True)).bfloat16()):
            raise CheckError("the sums of rank 0 are wrong; nothing was measured")


def time_normal(world_size: int, num_tokens: int, device: torch.device) -> dict[str, list[float]]:
    """Check normal mode, and return microseconds of the calls of each kernel."""
    ranks = Ranks(NVLinkStaticBuffer, BF16, MAX_TOKENS, (world_size, num_tokens), device)
    layout, exchanges = ranks.layout, [buffer._exchange for buffer in ranks.buffers]
    for rank in range(world_size):
        for name in ("dispatch_begin", "counts_ready", "rows_ready", "combine_begin", "sums_ready"):
            words = ranks.region(name, rank, layout.shared_sizes())
            # That of an item of sums is the number of its combine.
            words.fill_(1 if name == "sums_ready" else AHEAD)
            words[rank] = 0
    signals = [block[: layout.offsets["returned"]] for block in ranks.blocks]
    kept = [each.clone() for each in signals]
    states = [torch.zeros_like(each.state) for each in exchanges]

    def reset(rank: int = 0) -> None:
        signals[rank].copy_(kept[rank])
        exchanges[rank].state.copy_(states[rank])
        exchanges[rank].counted.zero_()

    def dispatch(rank: int = 0) -> Any:  # noqa: ANN401 - as the buffer returns it
        return ranks.buffers[rank].dispatch(ranks.calls[rank])

    def combine(rank: int = 0, *, is_weighted: bool = True) -> Tensor:
        weights = sent[rank].slot_weights if is_weighted else None
        plan, buffer = sent[rank].exchange_plan, ranks.buffers[rank]
        return buffer.combine(results[rank], plan, rows_per=RowsPer.SLOT, slot_weights=weights)[0]

    sent: dict[int, Any] = {}
    # In the second round all that the others send is there.
    for rank in 2 * [*range(world_size)]:
        reset(rank)
        sent[rank] = dispatch(rank)
    results = [ranks.results(rank, each.index) for rank, each in sent.items()]
    # Combine compares the mark of the receive buffer, which dispatch has set.
    states = [each.state.clone() for each in exchanges]
    calls = {"combine": combine, "combine_without_weights": partial(combine, is_weighted=False)}
    for name, call in calls.items():
        for rank in range(1, world_size):
            reset(rank)
            call(rank)
        reset()
        ranks.check(call(), is_weighted=name == "combine")
    results[0].normal_()
    found = {name: time_call(call, reset) for name, call in calls.items()}
    states[0].zero_()
    return {**found, "dispatch": time_call(dispatch, reset)}


def time_low_latency(world_size: int, num_tokens: int, device: torch.device) -> list[float]:
    """Check low latency with FP8 rows; return microseconds of its four kernels together."""
    shape, wire = (world_size, num_tokens), FP8_FLOAT32_SCALES
    ranks = Ranks(NVLinkLowLatencyBuffer, wire, MAX_LOW_LATENCY_TOKENS, shape, device)
    layout, buffers = ranks.layout, ranks.buffers

    def combine(rank: int, sent: Any) -> Any:  # noqa: ANN401 - as the buffer returns them
        plan, weights = sent.exchange_plan, sent.slot_weights
        slots = RowsPer.SLOT
        return buffers[rank].combine_async(
            results[rank], plan, rows_per=slots, slot_weights=weights
        )

    dispatching = [
        buffer.dispatch_async(call) for buffer, call in zip(buffers, ranks.calls, strict=True)
    ]
    sent = [each.wait() for each in dispatching]
    results = [ranks.results(rank, each.index) for rank, each in enumerate(sent)]
    combining = [combine(rank, each) for rank, each in enumerate(sent)]
    ranks.check(combining[0].wait())
    begin = layout.buffer_offset(0)
    for name in ANEW:
        # What rank 0 has sent to itself is not there yet.
        ranks.region(name, 0, layout.buffer_sizes(), begin)[0] = 0
    words = ranks.blocks[0][: begin + layout.offsets["metadata"]]
    kept, first = words.clone(), first_state(world_size, device)
    state = buffers[0]._receive_buffers[0].exchange.state

    def reset() -> None:
        words.copy_(kept)
        state.copy_(first)

    return time_call(lambda: combine(0, buffers[0].dispatch(ranks.calls[0])).wait(), reset, 4)


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
