"""Time the NVLink kernels of one rank on one GPU, which already holds the data of its peers.

    python -m benchmarks.bench_alone --output benchmarks/results/h200_alone.json
    PYTHONPATH=../before python benchmarks/bench_alone.py

The second command measures another checkout: run both in turn. Contention between GPUs is not
measured. First all ranks run one after another on this GPU, so that their data is stored, and the
sums of rank 0 are compared with torch. Then only rank 0 is timed, each time from the same state and
signals. A call lasts from the start of its first kernel to the end of its last one, as
CUPTI reports them for a graph: in normal mode one kernel, in low latency all four.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated
from unittest.mock import Mock, patch

import torch
import typer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import Output, gpu_of, report_of, write_report
from epcomm.bench.check import CheckError
from epcomm.bench.timing import captured
from epcomm.buffers.base import Dispatched
from epcomm.buffers.nvlink import base
from epcomm.buffers.nvlink.low_latency import NVLinkLowLatencyBuffer
from epcomm.buffers.nvlink.memory import SymmetricMemory
from epcomm.buffers.nvlink.normal import NVLinkStaticBuffer
from epcomm.calls.call import DispatchCall
from epcomm.errors import RankNames
from epcomm.kernels.nvlink.common.exchange import first_state
from epcomm.protocol import BatchFlags
from epcomm.quantization import FP8_FLOAT32_SCALES, dequantize, quantize
from epcomm.records import Pending, SlotIndex
from epcomm.spec import BufferSpec
from epcomm.types import RowsPer, WireDtype, WireFormat

HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
# M of normal mode.
MAX_TOKENS = 4096
# The signals of peers in normal mode, which are compared by order.
AHEAD = 2**20
# The formats of quantised sums, by their names in the report.
SUMS = {"fp8": FP8_FLOAT32_SCALES, "nvfp4": WireFormat(dtype=WireDtype.NVFP4)}
# Number of replays of a call; the median is reported.
_CALLS = 100
# The kernels of normal mode; the names of those of low latency end with _kernel.
_NORMAL_KERNELS = ("dispatch_rows", "combine_rows")


def spec_of(
    world_size: int,
    max_tokens: int,
    wire: WireFormat | None = None,
    sums: WireFormat | None = None,
) -> BufferSpec:
    """Return the specification of one receive buffer; rows and sums are BF16 by default."""
    plain = WireFormat.of(torch.bfloat16)
    return BufferSpec(
        hidden_size=HIDDEN,
        top_k=TOP_K,
        num_local_experts=EXPERTS // world_size,
        dispatch_format=wire or plain,
        hidden_format=plain,
        combine_format=sums,
        max_tokens_per_rank=max_tokens,
        batches_in_flight=1,
    )


class Ranks:
    """Buffers and batches of all ranks on this GPU; values are powers of two, so sums are exact."""

    def __init__(self, kind: type, spec: BufferSpec, num_tokens: int, device: torch.device) -> None:
        """Open buffers for T tokens of each rank."""
        self.size = world_size = EXPERTS // spec.num_local_experts
        self.sums = spec.combine_format
        self.layout = kind.layout_for(spec, world_size)
        # The signals of a barrier are stored after the layout.
        num_bytes = self.layout.num_bytes + 1024
        blocks = torch.zeros(world_size, num_bytes // 128 * 128, dtype=torch.uint8, device=device)
        self.blocks, addresses = list(blocks), tuple(block.data_ptr() for block in blocks)
        self.buffers, self.calls = [], []
        torch.manual_seed(0)
        for rank, block in enumerate(blocks):
            own = SimpleNamespace(rank=rank, world_size=world_size, device=device)
            own.names, own.streams = RankNames.of_all(rank, world_size), Mock()
            own.kernel_timeout_s = 1.0
            memory = SymmetricMemory(block=block, addresses=addresses, keeps=None)
            calls = SimpleNamespace(collectives=own, gather_records=lambda mine, **_: [mine])
            # The peers are not processes, and do not answer.
            with (
                patch.object(base, "open_symmetric_memory", Mock(return_value=memory)),
                patch.object(kind, "_warm_up"),
            ):
                self.buffers.append(kind(calls, spec))
                self.buffers[rank].prepare()
            powers = 2.0 ** torch.randint(0, 3, (num_tokens, HIDDEN), device=device)
            call = DispatchCall(
                hidden_states=powers.bfloat16(),
                topk_ids=torch.rand(num_tokens, EXPERTS, device=device).topk(TOP_K).indices,
                topk_weights=powers[:, :TOP_K].contiguous(),
                flags=BatchFlags.NONE,
            )
            self.calls.append(call)

    def region(self, name: str, rank: int, sizes: dict[str, int], begin: int = 0) -> Tensor:
        """View a region of a block by the rank that writes it."""
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
        owners, total = call.topk_ids // (EXPERTS // self.size), torch.zeros_like(y).float()
        for rank in range(self.size):
            factor = torch.where(owners == rank, factors, 0).sum(1, keepdim=True)
            part = (call.hidden_states * factor).bfloat16()
            total += (
                part if self.sums is None else dequantize(quantize(part, self.sums), torch.float32)
            )
        if not torch.equal(y, total.bfloat16()):
            raise CheckError("the sums of rank 0 are wrong; nothing was measured")


def time_normal(
    world_size: int, num_tokens: int, device: torch.device, sums: WireFormat | None = None
) -> dict[str, list[float]]:
    """Check normal mode, and return microseconds of the calls of each kernel."""
    spec = spec_of(world_size, MAX_TOKENS, sums=sums)
    ranks = Ranks(NVLinkStaticBuffer, spec, num_tokens, device)
    layout, exchanges = ranks.layout, [buffer._exchange for buffer in ranks.buffers]
    for rank in range(world_size):
        for name in ("dispatch_begin", "counts_ready", "rows_ready", "combine_begin", "sums_ready"):
            words = ranks.region(name, rank, layout.shared_sizes())
            # The signal of an item of sums is the number of its combine.
            words.fill_(1 if name == "sums_ready" else AHEAD)
            words[rank] = 0
    signals = [block[: layout.offsets["returned"]] for block in ranks.blocks]
    kept = [each.clone() for each in signals]
    states = [torch.zeros_like(each.state) for each in exchanges]

    def reset(rank: int = 0) -> None:
        signals[rank].copy_(kept[rank])
        exchanges[rank].state.copy_(states[rank])
        exchanges[rank].counted.zero_()

    def dispatch(rank: int = 0) -> Dispatched:
        return ranks.buffers[rank].dispatch(ranks.calls[rank])

    def combine(rank: int = 0, *, is_weighted: bool = True) -> Tensor:
        weights = sent[rank].slot_weights if is_weighted else None
        plan, buffer = sent[rank].exchange_plan, ranks.buffers[rank]
        return buffer.combine(results[rank], plan, rows_per=RowsPer.SLOT, slot_weights=weights)[0]

    sent: dict[int, Dispatched] = {}
    # In the second round all data from the other ranks is present.
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


def time_low_latency(
    world_size: int, num_tokens: int, device: torch.device, sums: WireFormat | None = None
) -> list[float]:
    """Check low latency with FP8 rows; return microseconds of its four kernels together."""
    spec = spec_of(world_size, 128, FP8_FLOAT32_SCALES, sums)
    ranks = Ranks(NVLinkLowLatencyBuffer, spec, num_tokens, device)
    layout, buffers = ranks.layout, ranks.buffers

    def combine(rank: int, sent: Dispatched) -> Pending[Tensor]:
        rows, plan, weights = results[rank], sent.exchange_plan, sent.slot_weights
        return buffers[rank].combine_async(rows, plan, rows_per=RowsPer.SLOT, slot_weights=weights)

    dispatching = [buffers[rank].dispatch_async(call) for rank, call in enumerate(ranks.calls)]
    sent = [each.wait() for each in dispatching]
    results = [ranks.results(rank, each.index) for rank, each in enumerate(sent)]
    combining = [combine(rank, each) for rank, each in enumerate(sent)]
    ranks.check(combining[0].wait())
    begin = layout.buffer_offset(0)
    names = list(layout.buffer_sizes())
    # Signals and lines are stored before the rest.
    for name in names[: names.index("data")]:
        # The data that rank 0 sends to itself is not present yet.
        ranks.region(name, 0, layout.buffer_sizes(), begin)[0] = 0
    words = ranks.blocks[0][: begin + layout.offsets["data"]]
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
        if each.name in _NORMAL_KERNELS or each.name.endswith("_kernel")
    )
    assert len(spans) == _CALLS * kernels, f"CUPTI reported {len(spans)} kernels"
    starts = range(0, len(spans), kernels)
    return [spans[first + kernels - 1][1] - spans[first][0] for first in starts]


def main(output: Annotated[Path | None, typer.Option(help="Of the report.")] = None) -> None:
    """Check the kernels, measure them, and print medians in microseconds."""
    device = gpu_of("bench_alone")
    sys.stderr.write("contention between GPUs does not show: rank 0 runs alone on one GPU\n")
    with torch.no_grad():
        found = time_normal(2, 4096, device)
        for name, us in time_normal(8, 1, device).items():
            found[f"{name}_of_8_ranks_1_token"] = us
        for world_size in (2, 8):
            for name, sums in SUMS.items():
                times = time_normal(world_size, MAX_TOKENS, device, sums)
                found[f"combine_{name}_of_{world_size}_ranks"] = times["combine"]
            found[f"combine_of_{world_size}_ranks"] = time_normal(world_size, MAX_TOKENS, device)[
                "combine"
            ]
        for tokens in (1, 32, 128):
            found[f"low_latency_{tokens}"] = time_low_latency(8, tokens, device)
            for name, sums in SUMS.items():
                with_sums = time_low_latency(8, tokens, device, sums)
                found[f"low_latency_{tokens}_{name}_sums"] = with_sums
    us = {f"{name}_us": median(values) for name, values in found.items()}
    sys.stdout.write(f"{json.dumps(us)}\n")
    report = report_of("alone", {}, device, "benchmarks.bench_alone")
    write_report({**report, **us}, Output(output=output))


if __name__ == "__main__":
    typer.run(main)
