"""Measure the NVLink buffer in low latency on the GPUs of one host.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.bench_nvlink_low_latency \
        --tokens 128 --wire fp8 --output nvlink.json

Variants: --quantised sends rows that are quantised already, --masked hands out slabs by expert, and
--returns-slots has router weights come with combine, as programs written for deep_ep do.

Random batches, T differing by rank, are compared with the collective buffer first: indices, rows
and scales bit-equal, sums within their roundings; on a difference the program ends without a
number. On a CPU the kernels are interpreted: a dry run, whose times mean nothing.

Each iteration replays a dispatch and a combine that nobody times, so that all GPUs begin together,
then a dispatch and a combine between events; it takes as long as its slowest rank. Then come graphs
of many pairs in which y of one is x of the next.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from epcomm import EPGroup
from epcomm.bench.check import CheckError
from epcomm.bench.machine import describe_hardware, describe_versions
from epcomm.bench.ranks import COLLECTIVE_TIMEOUT, of_all_ranks
from epcomm.bench.timing import Percentiles, captured, clock_for
from epcomm.bench.turns import wait_for_all
from epcomm.buffers.base import Buffer, Dispatched, ReturnsSlots
from epcomm.buffers.nvlink.low_latency import NVLinkLowLatencyBuffer, NVLinkMaskedBuffer
from epcomm.buffers.nvlink.normal import NVLinkStaticBuffer
from epcomm.calls.call import DispatchCall
from epcomm.protocol import BatchFlags
from epcomm.quantization import (
    FP8_FLOAT32_SCALES,
    FP8_POWER_OF_TWO_SCALES,
    INT8_PER_TOKEN,
    dequantize,
    quantizer_for,
)
from epcomm.spec import BufferSpec
from epcomm.testing.oracle import relative_error
from epcomm.types import RowsPer, WireFormat, WireTensor

BF16 = WireFormat.of(torch.bfloat16)
# A sum and each rank's part of it are cast once, in an order that may differ: half a unit each,
# and as much again where a half goes the other way.
SUM_TOLERANCE = 2 * torch.finfo(torch.bfloat16).eps

LowLatencyBuffers = NVLinkLowLatencyBuffer | NVLinkMaskedBuffer
NVLinkBuffers = LowLatencyBuffers | NVLinkStaticBuffer


class WireName(StrEnum):
    """Elements towards the experts; home they are bfloat16."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP8_POWERS_OF_TWO = "fp8_powers_of_two"
    INT8 = "int8"


WIRES = {
    WireName.BF16: BF16,
    WireName.FP8: FP8_FLOAT32_SCALES,
    WireName.FP8_POWERS_OF_TWO: FP8_POWER_OF_TWO_SCALES,
    WireName.INT8: INT8_PER_TOKEN,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of a run, equal on all ranks; see main()."""

    tokens: int
    hidden: int
    top_k: int
    experts: int
    wire: WireName
    programs: int
    line_tokens: int = NVLinkLowLatencyBuffer.line_tokens
    quantised: bool = False
    masked: bool = False
    returns_slots: bool = False
    iterations: int
    warm_up: int
    pairs: int
    checked: int
    seed: int

    def spec(self, world_size: int, *, returns_slots: bool = False) -> BufferSpec:
        """Return the specification of the buffer that is measured, or of the reference."""
        return BufferSpec(
            hidden_size=self.hidden,
            top_k=self.top_k,
            num_local_experts=self.experts // world_size,
            dispatch_format=WIRES[self.wire],
            hidden_format=BF16,
            max_tokens_per_rank=self.tokens,
            returns_slots=returns_slots,
        )

    def make_call(self, number: int, rank: int, device: torch.device) -> DispatchCall:
        """Batch `number` of a rank: all T tokens if it is 0, else fewer, and holes."""
        generator = torch.Generator().manual_seed(self.seed + 7919 * (rank + 101 * number))
        num_tokens = self.tokens
        if number:
            num_tokens = int(torch.randint(0, self.tokens + 1, (), generator=generator))
        scores = torch.rand(num_tokens, self.experts, generator=generator)
        ids = scores.topk(self.top_k, dim=1).indices
        if number % 2:
            ids[torch.rand(ids.shape, generator=generator) < 0.25] = -1
        weights = torch.rand(num_tokens, self.top_k, generator=generator) + 0.1
        x = torch.randn(num_tokens, self.hidden, generator=generator).to(torch.bfloat16)
        hidden_states = x.to(device)
        wire = WIRES[self.wire]
        return DispatchCall(
            hidden_states=quantizer_for(device)(hidden_states, wire)
            if self.quantised
            else hidden_states,
            topk_ids=ids.to(device),
            topk_weights=weights.to(device),
            flags=BatchFlags.NONE,
        )


def open_buffer(options: Options, group: EPGroup) -> LowLatencyBuffers:
    """The buffer, with the programs and the tokens in lines that are asked for. Collective: yes."""

    class TunedRows(NVLinkLowLatencyBuffer):
        max_programs: ClassVar[int] = options.programs or NVLinkLowLatencyBuffer.max_programs
        line_tokens: ClassVar[int] = options.line_tokens

    class TunedSlabs(NVLinkMaskedBuffer):
        max_programs: ClassVar[int] = TunedRows.max_programs
        line_tokens: ClassVar[int] = options.line_tokens

    kind = TunedSlabs if options.masked else TunedRows
    spec = options.spec(group.world_size, returns_slots=options.returns_slots)
    buffer = kind(group.calls, spec)
    buffer.prepare()
    return buffer


def check(options: Options, group: EPGroup, buffer: NVLinkBuffers) -> dict[str, float]:
    """Compare with the collective buffer, batch by batch; the largest errors.

    Collective: yes.
    Raises:
        CheckError: on all ranks, with the fault of each.
    """
    reference = group.open_buffer("StaticCollectiveBuffer", options.spec(group.world_size))
    worst = 0.0
    for number in range(options.checked):
        if number < buffer.num_buffers:
            poison(buffer, group)
        call = options.make_call(number, group.rank, group.device)
        fault, error = compare(call, reference, buffer, factor=1 + number % 3)
        worst = max(worst, error)
        faults = [f"rank {r}: {f}" for r, f in enumerate(of_all_ranks(fault)) if f]
        if faults:
            raise CheckError(f"batch {number}: {'; '.join(faults)}; nothing was measured")
    buffer.check()
    return {"batches": options.checked, "largest_error_of_sums": worst, "allowed": SUM_TOLERANCE}


def poison(buffer: NVLinkBuffers, group: EPGroup) -> None:
    """Fill what was received before, and what is received next, with NaN. Collective: yes."""
    wait_for_all(group.device)
    for rows in buffer.received_rows():
        rows.data.view(torch.uint8).fill_(0xFF)
    wait_for_all(group.device)


def compare(
    call: DispatchCall, reference: Buffer, buffer: Buffer, *, factor: int
) -> tuple[str, float]:
    """Return the fault of this rank's part of a batch, '' if none, and the error of its sums."""
    wanted, found = reference.dispatch(call), buffer.dispatch(call)
    fault = find_fault(wanted, found)
    sums = [
        combine(each, out, results_of(out, factor), call.topk_weights)
        for each, out in ((reference, wanted), (buffer, found))
    ]
    error = relative_error(sums[1], sums[0].double()) if len(sums[0]) else 0.0
    if not error <= SUM_TOLERANCE:
        fault = fault or f"sums are off by {error:.2e}, allowed {SUM_TOLERANCE:.2e}"
    return fault, error


def combine(buffer: Buffer, out: Dispatched, results: Tensor, topk_weights: Tensor) -> Tensor:
    """Combine results of slots [C, H], by the weights that came with dispatch, or by these."""
    plan, weights = out.exchange_plan, out.slot_weights
    if weights is None:
        assert isinstance(buffer, ReturnsSlots), "a dispatch without weights"
        return buffer.combine_slots(results, plan, topk_weights)
    return buffer.combine(results, plan, rows_per=RowsPer.SLOT, slot_weights=weights)[0]


def find_fault(wanted: Dispatched, found: Dispatched) -> str:
    """Counts, order, elements, scales and weights must be the same bits."""
    counts = wanted.index.num_tokens_per_expert.tolist()
    came = found.index.num_tokens_per_expert.tolist()
    if came != counts:
        return f"slots are {came}, expected {counts}"
    used = [used_slots(out, counts) for out in (wanted, found)]
    rows = [flat_rows(out) for out in (wanted, found)]
    parts = {"elements": [each.data for each in rows]}
    if rows[0].scales is not None and rows[1].scales is not None:
        parts["scales"] = [rows[0].scales, rows[1].scales]
    for name, (right, mine) in parts.items():
        bits = [
            part[row_of_slot(out)[slots].long()].contiguous().view(torch.uint8)
            for out, part, slots in ((wanted, right, used[0]), (found, mine, used[1]))
        ]
        if not torch.equal(*bits):
            return f"{name} of slots differ"
    assert wanted.slot_weights is not None
    if found.slot_weights is not None and not torch.equal(
        wanted.slot_weights[used[0]], found.slot_weights[used[1]]
    ):
        return "weights of slots differ"
    if found.index.row_of_slot is not None:
        is_padding = torch.ones(len(found.index.row_of_slot), dtype=torch.bool)
        is_padding[used[1].cpu()] = False
        if not bool((found.index.row_of_slot.cpu()[is_padding] == -1).all()):
            return "padding has rows"
    return ""


def used_slots(out: Dispatched, counts: list[int]) -> Tensor:
    """Return the slots that hold a token."""
    first = out.index.first_slot.tolist()
    slots = [
        s for start, count in zip(first, counts, strict=False) for s in range(start, start + count)
    ]
    return torch.tensor(slots, dtype=torch.int64, device=out.index.first_slot.device)


def flat_rows(out: Dispatched) -> WireTensor:
    """Return received rows of either layout as [R, H]."""
    rows = out.rows
    scales = None if rows.scales is None else rows.scales.flatten(0, -2)
    return replace(rows, data=rows.data.flatten(0, -2), scales=scales)


def row_of_slot(out: Dispatched) -> Tensor:
    """Return the row of each slot, [C]: of slabs, slot s is row s."""
    if out.index.row_of_slot is not None:
        return out.index.row_of_slot
    data = flat_rows(out).data
    return torch.arange(len(data), device=data.device)


def results_of(out: Dispatched, factor: int) -> Tensor:
    """Return results [C, H] of experts that multiply by a whole number, NaN for padding."""
    rows, received = row_of_slot(out), flat_rows(out)
    used = used_slots(out, out.index.num_tokens_per_expert.tolist())
    picked = replace(
        received,
        data=received.data[rows[used].long()],
        scales=None if received.scales is None else received.scales[rows[used].long()],
    )
    results = torch.full(
        (len(rows), received.data.shape[1]), float("nan"), dtype=torch.bfloat16, device=rows.device
    )
    results[used] = (dequantize(picked, torch.float32) * factor).to(torch.bfloat16)
    return results


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """One batch, and experts' results that are there already."""

    buffer: LowLatencyBuffers
    call: DispatchCall
    results: Tensor

    @classmethod
    def of(cls, options: Options, group: EPGroup, buffer: LowLatencyBuffers) -> Work:
        """The batch in which every rank has all its tokens."""
        call = options.make_call(0, group.rank, group.device)
        out = buffer.dispatch(call)
        combine(buffer, out, results_of(out, 1), call.topk_weights)
        size = len(row_of_slot(out)), options.hidden
        generator = torch.Generator(group.device).manual_seed(group.rank)
        results = torch.randn(size, generator=generator, device=group.device)
        return cls(buffer=buffer, call=call, results=results.to(torch.bfloat16))

    def dispatch(self, hidden_states: Tensor | None = None) -> Dispatched:
        """Dispatch the batch, or other hidden states with its routing."""
        if hidden_states is None:
            return self.buffer.dispatch(self.call)
        return self.buffer.dispatch(replace(self.call, hidden_states=hidden_states))

    def combine(self, out: Dispatched) -> Tensor:
        """Combine and return y."""
        return combine(self.buffer, out, self.results, self.call.topk_weights)

    def pairs(self, count: int) -> Tensor | None:
        """Run `count` dispatches and combines, each on the y of the pair before.

        Rows that are quantised already are the same in all pairs.
        """
        y = None
        for _ in range(count):
            y = self.combine(
                self.dispatch(y if isinstance(self.call.hidden_states, Tensor) else None)
            )
        return y


def measure(options: Options, work: Work, device: torch.device) -> dict[str, list[float]]:
    """Microseconds of each iteration on this rank, by what is timed. Collective: yes."""
    if device.type != "cuda":
        return measure_eagerly(options, work, device)
    # A half must not run but in its place, so nothing warms it up. Slot 0 is captured by the first
    # graphs alone, and the pairs end as they began.
    halves: list[Dispatched] = []
    dispatching = captured(lambda: halves.append(work.dispatch()), warm_up=False)
    combining = captured(lambda: work.combine(halves[-1]), warm_up=False)
    aligning = captured(lambda: work.pairs(2))
    chain = captured(lambda: work.pairs(options.pairs))
    clock = clock_for(device)
    spans: dict[str, list[float]] = {"dispatch": [], "combine": [], "pair": [], "pair_in_chain": []}
    for number in range(-options.warm_up, options.iterations):
        aligning.replay()
        clock.mark()
        dispatching.replay()
        clock.mark()
        combining.replay()
        clock.mark()
        dispatch, combine = clock.take()
        aligning.replay()
        clock.mark()
        chain.replay()
        clock.mark()
        (all_pairs,) = clock.take()
        if number >= 0:
            spans["dispatch"].append(1e3 * dispatch)
            spans["combine"].append(1e3 * combine)
            spans["pair"].append(1e3 * (dispatch + combine))
            spans["pair_in_chain"].append(1e3 * all_pairs / options.pairs)
    return spans | measure_eagerly(options, work, device)


def measure_eagerly(options: Options, work: Work, device: torch.device) -> dict[str, list[float]]:
    """The same, launched one by one."""
    clock = clock_for(device)
    spans: dict[str, list[float]] = {"eager_dispatch": [], "eager_combine": []}
    for number in range(-options.warm_up, options.iterations):
        wait_for_all(device)
        clock.mark()
        out = work.dispatch()
        clock.mark()
        work.combine(out)
        clock.mark()
        dispatch, combine = clock.take()
        if number >= 0:
            spans["eager_dispatch"].append(1e3 * dispatch)
            spans["eager_combine"].append(1e3 * combine)
    return spans


def slowest(spans: dict[str, list[float]]) -> dict[str, Percentiles]:
    """Return percentiles over iterations, each as long as its slowest rank. Collective: yes."""
    by_rank = of_all_ranks(spans)
    return {
        name: Percentiles.of(max(each) for each in zip(*(r[name] for r in by_rank), strict=True))
        for name in spans
    }


def sent_bytes(work: Work) -> dict[str, int]:
    """Return the bytes of one pair on the rank that sends most. Collective: yes."""
    before = work.buffer.traffic()
    work.pairs(1)
    after = work.buffer.traffic()
    sent = {name: value - asdict(before)[name] for name, value in asdict(after).items()}
    return {name: max(rank[name] for rank in of_all_ranks(sent)) for name in sent}


def init_process_group() -> None:
    """nccl where there is a GPU for each rank, else gloo, under an interpreter."""
    if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=COLLECTIVE_TIMEOUT, device_id=device)
    else:
        # Read when triton is imported, which has not happened yet.
        os.environ["TRITON_INTERPRET"] = "1"
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)


def main(
    tokens: Annotated[int, typer.Option(min=1, help="T, on each rank, and M.")] = 128,
    hidden: Annotated[int, typer.Option(min=1, help="H.")] = 7168,
    top_k: Annotated[int, typer.Option(min=1, help="K, distinct and uniformly random.")] = 8,
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 256,
    wire: Annotated[WireName, typer.Option(help="Towards the experts.")] = WireName.BF16,
    programs: Annotated[
        int, typer.Option(min=0, help="Most programs of a kernel that sends; 0: the buffer's.")
    ] = 0,
    line_tokens: Annotated[
        int, typer.Option(min=0, help="Most tokens of a rank that travel in lines; 0: none do.")
    ] = NVLinkLowLatencyBuffer.line_tokens,
    quantised: Annotated[
        bool, typer.Option(help="Rows are quantised before they are dispatched.")
    ] = False,
    masked: Annotated[bool, typer.Option(help="Rows are handed out as slabs by expert.")] = False,
    returns_slots: Annotated[
        bool, typer.Option(help="Weights come with combine, so slots come home apart.")
    ] = False,
    iterations: Annotated[int, typer.Option(min=1, help="Measured.")] = 200,
    warm_up: Annotated[int, typer.Option(min=1, help="Before that.")] = 20,
    pairs: Annotated[int, typer.Option(min=2, help="In the graph of dependent pairs; even.")] = 20,
    checked: Annotated[int, typer.Option(min=1, help="Batches that are compared.")] = 8,
    seed: Annotated[int, typer.Option(help="Of tokens and routing.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the report there, as JSON.")] = None,
) -> None:
    """Check, measure, and print what came of it."""
    options = Options(
        tokens=tokens,
        hidden=hidden,
        top_k=top_k,
        experts=experts,
        wire=wire,
        programs=programs,
        line_tokens=line_tokens,
        quantised=quantised,
        masked=masked,
        returns_slots=returns_slots,
        iterations=iterations,
        warm_up=warm_up,
        # Two slots are used in turn: a graph ends in the one in which it began.
        pairs=pairs + pairs % 2,
        checked=checked,
        seed=seed,
    )
    init_process_group()
    console = Console(quiet=dist.get_rank() != 0, highlight=False, markup=False)
    try:
        with EPGroup(dist.group.WORLD) as group, torch.no_grad():
            buffer = open_buffer(options, group)
            report = {
                "configuration": {**asdict(options), "ranks": group.world_size},
                "hardware": describe_hardware(group.device),
                "versions": describe_versions(group.device),
                "command": shlex.join([Path(__file__).name, *sys.argv[1:]]),
                "check": check(options, group, buffer),
            }
            console.print(f"checked: {report['check']}", soft_wrap=True)
            work = Work.of(options, group, buffer)
            report["sent_bytes"] = sent_bytes(work)
            spans = slowest(measure(options, work, group.device))
            buffer.check()
            report["us"] = {name: asdict(each) for name, each in spans.items()}
            buffer.close()
        for name, each in spans.items():
            console.print(f"{name:>16}: {each.p50:9.1f} {each.p95:9.1f} {each.p99:9.1f} us")
        console.print(f"sent: {report['sent_bytes']}", soft_wrap=True)
        if output is not None and dist.get_rank() == 0:
            output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except CheckError as error:
        sys.exit(str(error))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
