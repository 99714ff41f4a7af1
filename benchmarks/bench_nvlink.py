"""Measure the NVLink buffers on the GPUs of one host, beside NCCL, by tokens and by SMs.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.bench_nvlink \
        --output benchmarks/results/h200_dispatch_combine_x8.json
    python -m benchmarks.plot_nvlink benchmarks/results/h200_dispatch_combine_x8.json

Every buffer is compared with the collective one first (bench_nvlink_low_latency.check); on a
difference the program ends without a number. Then everything is a captured graph: no launch from
Python counts. All GPUs begin an iteration together, and it takes as long as its slowest rank.

    low_latency_pair           one dispatch and combine;   ..._in_chain: of so many dependent pairs
    dispatch_fp8, dispatch     normal mode, index over the rows included; FP8 rows come quantised,
                               and `quantize` says what that takes
    dispatch_again             along the same exchange plan;   pack: rows to slots, as a copy
    combine                    one result a slot, weighted, summed on both sides
    all_to_all                 NCCL, one row for each (token, expert), gathered and summed around it
    all_gather                 NCCL, all tokens to all ranks, and a reduce-scatter of sums
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from benchmarks import bench_nvlink_low_latency as low_latency
from benchmarks.bench_nvlink_low_latency import WireName, init_process_group
from epcomm import EPGroup
from epcomm.bench.check import CheckError
from epcomm.bench.contenders.base import Experts
from epcomm.bench.contenders.expert_rows import combine_expert_rows, dispatch_expert_rows
from epcomm.bench.machine import describe_hardware, describe_versions
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.timing import Percentiles, captured, clock_for
from epcomm.bench.turns import time_launch
from epcomm.buffers.base import Dispatched
from epcomm.buffers.nvlink.normal import NVLinkStaticBuffer
from epcomm.buffers.row_layout import wire_tensor_of
from epcomm.calls.call import DispatchCall
from epcomm.ops.slots import pack
from epcomm.protocol import BatchFlags
from epcomm.quantization import quantizer_for
from epcomm.types import RowsPer, WireFormat, WireTensor

# Most tokens of a rank in low latency: beyond them rows fill the wire for longer than waits last.
LOW_LATENCY_TOKENS = 512
# Iterations that are not counted.
_WARM_UP = 3

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The arguments of a run, equal on all ranks; see main()."""

    tokens: tuple[int, ...]
    sms: tuple[int, ...]
    sms_tokens: int
    hidden: int
    top_k: int
    experts: int
    iterations: int
    pairs: int
    seed: int

    def options(self, tokens: int, wire: WireName) -> low_latency.Options:
        """Return the options that make batches and checks."""
        return low_latency.Options(
            tokens=tokens,
            hidden=self.hidden,
            top_k=self.top_k,
            experts=self.experts,
            wire=wire,
            programs=0,
            iterations=self.iterations,
            warm_up=1,
            pairs=self.pairs,
            checked=2 if tokens > LOW_LATENCY_TOKENS else 4,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class NormalWork:
    """One batch in normal mode, whose rows come as they travel.

    out: of the dispatch along whose exchange plan rows are sent again.
    kept: of one that may be combined at any time.
    """

    buffer: NVLinkStaticBuffer
    wire: WireFormat
    call: DispatchCall
    out: Dispatched
    kept: Dispatched
    results: Tensor

    @classmethod
    def of(cls, options: low_latency.Options, group: EPGroup, num_sms: int | None) -> NormalWork:
        """Open, check and dispatch once.   Collective: yes.

        Raises:
            CheckError: the buffer moves something wrong.
        """
        spec = replace(
            options.spec(group.world_size),
            max_recv_slots=_budget(options, group.world_size),
            num_sms=num_sms,
        )
        buffer = NVLinkStaticBuffer(group.calls, spec)
        buffer.prepare()
        low_latency.check(options, group, buffer)
        call = options.make_call(0, group.rank, group.device)
        rows = wire_tensor_of(call, spec.dispatch_format)
        call = replace(call, quantize=lambda *_, **__: rows)
        # A batch with rows of its own: the rows of `out` are overwritten, which ends its batch.
        kept = buffer.dispatch(replace(call, flags=BatchFlags.GRAD_ENABLED))
        out = buffer.dispatch(call)
        num_slots = low_latency.row_of_slot(out).shape[0]
        results = torch.randn(num_slots, options.hidden, device=group.device)
        return cls(
            buffer=buffer,
            wire=spec.dispatch_format,
            call=call,
            out=out,
            kept=kept,
            results=results.to(torch.bfloat16),
        )

    def dispatch(self) -> Dispatched:
        """Dispatch along a new exchange plan."""
        return self.buffer.dispatch(self.call)

    def dispatch_again(self) -> Tensor:
        """Dispatch along the exchange plan of the first dispatch."""
        data = wire_tensor_of(self.call, self.wire).data
        return self.buffer.cached_dispatch(data, self.out.exchange_plan)

    def combine(self) -> Tensor:
        """Combine and return y."""
        return self.buffer.combine(
            self.results,
            self.kept.exchange_plan,
            rows_per=RowsPer.SLOT,
            slot_weights=self.kept.slot_weights,
        )[0]

    def pack(self) -> Tensor:
        """The rows of the first dispatch, by slots; codes as bytes, for torch cannot index them."""
        data = self.out.rows.data
        return pack(data.view(torch.uint8) if data.itemsize == 1 else data, self.out.index)


def _budget(options: low_latency.Options, world_size: int) -> int:
    """Slots of a rank: a quarter more than evenly routed tokens need, and some for few tokens."""
    spec, most = options.spec(world_size), world_size * options.tokens * options.top_k
    even = options.tokens * options.top_k * 5 // 4 + 64 * spec.num_local_experts
    return min(even, most)


def normal_calls(work: NormalWork, wire: WireName) -> dict[str, Call]:
    """Return the calls of normal mode that are timed, by name."""
    if wire is WireName.FP8:
        x = work.call.unquantized
        return {
            "dispatch_fp8": work.dispatch,
            # A cached dispatch moves codes alone: its rows have no scales.
            "dispatch_fp8_again": work.dispatch_again,
            "pack_fp8": work.pack,
            "quantize": lambda: quantized(x, work.wire),
        }
    return {
        "dispatch": work.dispatch,
        "dispatch_again": work.dispatch_again,
        "pack": work.pack,
        "combine": work.combine,
    }


def quantized(x: Tensor, wire: WireFormat) -> WireTensor:
    """Rows as they travel, by the kernel that dispatchers use."""
    return quantizer_for(x.device)(x, wire)


def low_latency_calls(work: low_latency.Work, pairs: int) -> dict[str, Call]:
    """Pairs alone, and pairs in which y of one is x of the next."""
    return {"pair": lambda: work.pairs(2), "pair_in_chain": lambda: work.pairs(pairs)}


def nccl_calls(call: DispatchCall, experts: Experts) -> dict[str, Call]:
    """NCCL with the routing known already: gathers, exchanges and sums."""
    x, group_size = call.unquantized, experts.world_size
    batch = dispatch_expert_rows(x, call.topk_ids, call.topk_weights, experts)
    order = call.topk_ids.flatten().argsort(stable=True) // call.topk_ids.shape[1]
    rows, results = torch.empty_like(batch.rows), torch.randn_like(batch.rows)

    def all_to_all() -> None:
        sent = x.index_select(0, order)
        dist.all_to_all_single(rows, sent, list(batch.recv_splits), list(batch.send_splits))

    everything = x.new_empty(group_size * x.shape[0], x.shape[1])
    y = torch.empty_like(x)
    return {
        "all_to_all_dispatch": all_to_all,
        "all_to_all_combine": lambda: combine_expert_rows(results, batch),
        "all_gather": lambda: dist.all_gather_into_tensor(everything, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(y, everything),
    }


def replays_of(calls: Mapping[str, Call], device: torch.device) -> Mapping[str, Call]:
    """Return the timed calls: graphs, or on a CPU the calls themselves.   Collective: yes."""
    if device.type != "cuda":
        return calls
    return {name: captured(call).replay for name, call in calls.items()}


def timed(
    calls: Mapping[str, Call], iterations: int, device: torch.device
) -> dict[str, list[float]]:
    """Microseconds of each iteration on this rank.   Collective: yes."""
    replays = replays_of(calls, device)
    clock = clock_for(device)
    spans: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-_WARM_UP, iterations):
        for name, replay in replays.items():
            ms = time_launch(replay, device, clock)
            if number >= 0:
                spans[name].append(1e3 * ms)
    return spans


def slowest(spans: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Percentiles of iterations, each as long as its slowest rank.   Collective: yes."""
    by_rank = of_all_ranks(spans)
    return {
        name: asdict(
            Percentiles.of(max(each) for each in zip(*(r[name] for r in by_rank), strict=True))
        )
        for name in spans
    }


def remote_bytes(work: NormalWork) -> dict[str, int]:
    """Return the bytes of one dispatch and one combine on the rank that sends most."""
    before = work.buffer.traffic()
    work.dispatch()
    work.combine()
    after = work.buffer.traffic()
    mine = {
        "dispatch": after.dispatch_bytes - before.dispatch_bytes,
        "combine": after.combine_bytes - before.combine_bytes,
    }
    return {name: max(rank[name] for rank in of_all_ranks(mine)) for name in mine}


def by_tokens(sweep: Sweep, tokens: int, group: EPGroup) -> dict[str, object]:
    """All contenders at one T.   Collective: yes."""
    us: dict[str, dict[str, float]] = {}
    sent: dict[str, dict[str, int]] = {}
    for wire in (WireName.FP8, WireName.BF16):
        options = sweep.options(tokens, wire)
        work = NormalWork.of(options, group, None)
        us |= slowest(timed(normal_calls(work, wire), sweep.iterations, group.device))
        sent[wire.value] = remote_bytes(work)
        work.buffer.check()
        work.buffer.close()
        if tokens <= LOW_LATENCY_TOKENS:
            us |= {f"{k}_{wire.value}": v for k, v in pair_times(sweep, options, group).items()}
    call = sweep.options(tokens, WireName.BF16).make_call(0, group.rank, group.device)
    experts = Experts(
        rank=group.rank,
        world_size=group.world_size,
        num_local=sweep.experts // group.world_size,
    )
    us |= slowest(timed(nccl_calls(call, experts), sweep.iterations, group.device))
    if group.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"tokens": tokens, "us": us, "remote_bytes": sent}


def pair_times(
    sweep: Sweep, options: low_latency.Options, group: EPGroup
) -> dict[str, dict[str, float]]:
    """Time a pair of low latency; a graph replays two pairs at least, as buffers alternate."""
    buffer = low_latency.open_buffer(options, group)
    low_latency.check(options, group, buffer)
    work = low_latency.Work.of(options, group, buffer)
    calls = low_latency_calls(work, sweep.pairs)
    spans = timed(calls, sweep.iterations, group.device)
    buffer.check()
    buffer.close()
    lengths = {"pair": 2, "pair_in_chain": sweep.pairs}
    return slowest({name: [us / lengths[name] for us in spans[name]] for name in calls})


def by_sms(sweep: Sweep, num_sms: int, group: EPGroup) -> dict[str, object]:
    """Normal mode on so many SMs, in microseconds and remote GB/s.   Collective: yes."""
    us: dict[str, dict[str, float]] = {}
    rates: dict[str, float] = {}
    for wire in (WireName.FP8, WireName.BF16):
        work = NormalWork.of(sweep.options(sweep.sms_tokens, wire), group, num_sms)
        calls = normal_calls(work, wire)
        chosen = {name: calls[name] for name in calls if not name.startswith(("pack", "quant"))}
        found = slowest(timed(chosen, sweep.iterations, group.device))
        sent = remote_bytes(work)
        for name, span in found.items():
            num_bytes = sent["combine" if name == "combine" else "dispatch"]
            if name.endswith("again"):
                num_bytes = num_bytes * work.wire.data_bytes(sweep.hidden) // row_bytes(work, sweep)
            rates[name] = num_bytes / span["p50"] / 1e3
        us |= found
        work.buffer.check()
        work.buffer.close()
    return {"num_sms": num_sms, "us": us, "remote_gb_per_s": rates}


def row_bytes(work: NormalWork, sweep: Sweep) -> int:
    """Return the bytes of a row in dispatch with its scales, which a cached dispatch lacks."""
    return work.wire.data_bytes(sweep.hidden) + work.wire.scale_bytes(sweep.hidden)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def main(
    tokens: Annotated[str, typer.Option(help="T, on each rank.")] = (
        "1,8,32,128,512,1024,2048,4096,8192"
    ),
    sms: Annotated[str, typer.Option(help="SMs of the other sweep.")] = "8,16,24,32,132",
    sms_tokens: Annotated[int, typer.Option(min=1, help="T of the other sweep.")] = 4096,
    hidden: Annotated[int, typer.Option(min=1, help="H.")] = 7168,
    top_k: Annotated[int, typer.Option(min=1, help="K, distinct and uniformly random.")] = 8,
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 256,
    iterations: Annotated[int, typer.Option(min=1, help="Measured.")] = 50,
    pairs: Annotated[int, typer.Option(min=2, help="In the chain; even.")] = 20,
    seed: Annotated[int, typer.Option(help="Of tokens and routing.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the report there, as JSON.")] = None,
) -> None:
    """Check, measure, and print what came of it."""
    sweep = Sweep(
        tokens=_numbers(tokens),
        sms=_numbers(sms),
        sms_tokens=sms_tokens,
        hidden=hidden,
        top_k=top_k,
        experts=experts,
        iterations=iterations,
        pairs=pairs + pairs % 2,
        seed=seed,
    )
    init_process_group()
    console = Console(quiet=dist.get_rank() != 0, highlight=False, markup=False, soft_wrap=True)
    try:
        with EPGroup(dist.group.WORLD) as group, torch.no_grad():
            report: dict[str, object] = {
                "benchmark": "nvlink",
                "configuration": {**asdict(sweep), "ranks": group.world_size},
                "hardware": describe_hardware(group.device),
                "versions": describe_versions(group.device),
                "command": shlex.join(["python", "-m", "benchmarks.bench_nvlink", *sys.argv[1:]]),
            }
            findings: dict[str, list[dict[str, object]]] = {"by_tokens": [], "by_sms": []}
            steps = [("by_tokens", by_tokens, each) for each in sweep.tokens]
            steps += [("by_sms", by_sms, each) for each in sweep.sms]
            for name, measure, each in steps:
                findings[name].append(measure(sweep, each, group))
                console.print(summary(findings[name][-1]))
                # Each time anew: a run that is cut short has measured something.
                if output is not None and group.rank == 0:
                    write(report | findings, output)
    except CheckError as error:
        sys.exit(str(error))
    finally:
        dist.destroy_process_group()


def write(report: Mapping[str, object], path: Path) -> None:
    """Write a report as JSON, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(report), indent=2) + "\n", encoding="utf-8")


def summary(finding: Mapping[str, object]) -> str:
    """Format the medians on one line."""
    us = finding["us"]
    assert isinstance(us, dict)
    head = [f"{key} {finding[key]}" for key in ("tokens", "num_sms") if key in finding]
    return ": ".join([*head, ", ".join(f"{name} {span['p50']:.1f}" for name, span in us.items())])


def rounded(value: object) -> object:
    """Numbers as a reader wants them: hundredths."""
    if isinstance(value, float):
        return round(value, 2)
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value


if __name__ == "__main__":
    typer.run(main)
