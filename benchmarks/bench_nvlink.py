"""Measure the NVLink buffers on the GPUs of one host, beside NCCL, by tokens and by SMs.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.bench_nvlink \
        --output benchmarks/results/h200_dispatch_combine_x8.json

Adds to `epcomm bench` normal mode with static sizes, so that it is replayed from graphs too, the
SMs that it may take, chains of dependent pairs, and NCCL with the routing known already. Every
contender is checked as there, or the program ends without a number. On a CPU it is a dry run over
the backend collective, launched from Python: pass small sizes.

    pair, pair_in_chain        low latency: a dispatch and combine, independent or each on the y of
                               the one before; FP8 rows are quantised in dispatch
    dispatch_fp8, dispatch     normal mode, index over the rows included; FP8 rows are quantised
                               before
    combine                    one result a slot, weighted, summed on both sides
    all_to_all                 NCCL, one row for each (token, expert), gathered and summed around it
    all_gather                 NCCL, all tokens to all ranks, and a reduce-scatter of sums
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from benchmarks.measuring import Output, ranks_of_torchrun, report_of, write_report
from epcomm import EPConfig, EPGroup, Mode, MoESpec, WireDtype
from epcomm.bench.check import check_contender, run_experts
from epcomm.bench.contenders.all_gather import all_gather, reduce_scatter
from epcomm.bench.contenders.backends import Epcomm
from epcomm.bench.contenders.expert_rows import ExpertRows
from epcomm.bench.options import BenchOptions, read_numbers
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.timing import Percentiles, captured
from epcomm.bench.turns import Timed, call_of, time_all, time_launch
from epcomm.buffers.traffic import BufferTraffic
from epcomm.cli.records import takes_records
from epcomm.quantization import quantizer_for
from epcomm.records import DispatchOutput
from epcomm.testing.data import RankBatch

# Most tokens of a rank in low latency: beyond them rows fill the wire for longer than waits last.
_LOW_LATENCY_TOKENS = 512
# Rows towards the experts; None: as the hidden states.
WIRES: Mapping[str, WireDtype | None] = {"fp8": WireDtype.FP8_E4M3, "bf16": None}


class NormalRows(Epcomm):
    """Normal mode with static sizes, whose rows are quantised before they are dispatched."""

    def __init__(self, group: EPGroup, spec: MoESpec, config: EPConfig, batch: RankBatch) -> None:
        """Quantise the rows of `batch`, the only one that may be dispatched. Collective: yes."""
        super().__init__(group, spec, config)
        wire = self.plan.buffer_spec.dispatch_format
        is_quantized = wire.dtype.is_quantized
        self._rows = quantizer_for(batch.x.device)(batch.x, wire) if is_quantized else batch.x

    def dispatch(self, batch: RankBatch) -> DispatchOutput:
        return self._dispatcher.dispatch(self._rows, batch.topk)


def open_normal(
    options: BenchOptions, group: EPGroup, num_sms: int | None, batches: list[RankBatch]
) -> NormalRows:
    """Open normal mode at one T, and check it. Collective: yes.

    Raises:
        CheckError: it moves something wrong.
    """
    (tokens,), num_local = options.tokens, options.experts // group.world_size
    # Slots: a quarter more than evenly routed tokens need, and a constant for few tokens.
    even = tokens * options.top_k * 5 // 4 + 64 * num_local
    config = replace(
        options.config(Mode.NORMAL, tokens, _backend(group)),
        max_recv_slots=min(even, group.world_size * tokens * options.top_k),
        num_sms=num_sms if group.device.type == "cuda" else None,
    )
    normal = NormalRows(group, options.moe_spec(), config, batches[group.rank])
    check_contender(normal, batches[group.rank], group.rank * num_local)
    return normal


def open_low_latency(options: BenchOptions, group: EPGroup, batches: list[RankBatch]) -> Epcomm:
    """Open low latency at one T, and check it. Collective: yes.

    Raises:
        CheckError: it moves something wrong.
    """
    config = options.config(Mode.LOW_LATENCY, options.tokens[0], _backend(group))
    contender = Epcomm(group, options.moe_spec(), config)
    first_expert = group.rank * (options.experts // group.world_size)
    check_contender(contender, batches[group.rank], first_expert)
    return contender


def _backend(group: EPGroup) -> str:
    return "nvlink" if group.device.type == "cuda" else "collective"


def chain_call(contender: Epcomm, batch: RankBatch, first_expert: int, pairs: int) -> Timed:
    """Return the call of a graph in which y of each pair is x of the next. Collective: yes."""
    dispatched = contender.dispatch(batch)
    results = run_experts(contender.group(dispatched), first_expert)
    contender.combine(results, dispatched)

    def chain() -> None:
        x = batch.x
        for _ in range(pairs):
            x = contender.combine(results, contender.dispatch(replace(batch, x=x)))

    timed = launched(chain, batch.x.device)
    return lambda clock: {name: ms / pairs for name, ms in timed(clock).items()}


def launched(call: Callable[[], object], device: torch.device, *, is_graph: bool = True) -> Timed:
    """Return a function that times a call as the span `call`, as a graph on a GPU.

    Collective: as the call.
    """
    launch = captured(call).replay if is_graph and device.type == "cuda" else call
    return lambda clock: {"call": time_launch(launch, device, clock)}


def nccl_calls(batch: RankBatch, num_experts: int) -> dict[str, Timed]:
    """Return the calls of NCCL for a known routing: gathers, exchanges and sums."""
    x, contender = batch.x, ExpertRows(num_experts)
    exchanged = contender.dispatch(batch)
    rows, results = torch.empty_like(exchanged.rows), torch.randn_like(exchanged.rows)
    everything, y = x.new_empty(dist.get_world_size() * x.shape[0], x.shape[1]), torch.empty_like(x)

    def all_to_all() -> None:
        sent = x.index_select(0, exchanged.token_of_row)
        recv_splits, send_splits = list(exchanged.recv_splits), list(exchanged.send_splits)
        dist.all_to_all_single(rows, sent, recv_splits, send_splits)

    calls: dict[str, Callable[[], object]] = {
        "all_to_all_dispatch": all_to_all,
        "all_to_all_combine": lambda: contender.combine(results, exchanged),
        "all_gather": lambda: all_gather(everything, x),
        "reduce_scatter": lambda: reduce_scatter(y, everything),
    }
    return {name: launched(call, x.device) for name, call in calls.items()}


def by_tokens(options: BenchOptions, pairs: int) -> dict[str, object]:
    """Measure all contenders at one T.   Collective: yes."""
    us: dict[str, Percentiles] = {}
    for wire in WIRES:
        # Each case has its own group, whose buffers are closed before the next are opened.
        with EPGroup(dist.group.WORLD) as group:
            us |= of_epcomm(options, wire, pairs, group)
    (tokens,) = options.tokens
    with EPGroup(dist.group.WORLD) as group:
        batches = options.make_batches(tokens, group.world_size, group.device)
        found = time_all(nccl_calls(batches[group.rank], options.experts), group.device, options)
        us |= {name: spans["call"] for name, spans in found.items()}
    return {"tokens": tokens, "us": {name: asdict(each) for name, each in us.items()}}


def of_epcomm(
    options: BenchOptions, wire: str, pairs: int, group: EPGroup
) -> dict[str, Percentiles]:
    """Measure both modes with rows of one format.   Collective: yes."""
    options, (tokens,) = replace(options, wire=WIRES[wire]), options.tokens
    batches = options.make_batches(tokens, group.world_size, group.device)
    batch, first_expert = batches[group.rank], group.rank * options.experts // group.world_size
    normal = open_normal(options, group, None, batches)
    contenders: list[Epcomm] = [normal]
    calls: dict[str, Timed] = {"normal": call_of(normal, batch, first_expert)}
    if tokens <= _LOW_LATENCY_TOKENS:
        low_latency = open_low_latency(options, group, batches)
        contenders.append(low_latency)
        calls["pair"] = call_of(low_latency, batch, first_expert)
        calls["chain"] = chain_call(low_latency, batch, first_expert, pairs)
    found = time_all(calls, group.device, options)
    for each in contenders:
        each.check()
    us = {"dispatch_fp8": found["normal"]["dispatch"]}
    if wire == "bf16":
        us = {name: found["normal"][name] for name in ("dispatch", "combine")}
    if "pair" in found:
        us[f"pair_{wire}"] = found["pair"]["pair"]
        us[f"pair_in_chain_{wire}"] = found["chain"]["call"]
    return us


def by_sms(options: BenchOptions, num_sms: int) -> dict[str, object]:
    """Measure normal mode on some SMs, in microseconds and remote GB/s.   Collective: yes."""
    us: dict[str, Percentiles] = {}
    num_bytes: dict[str, int] = {}
    for wire in WIRES:
        with EPGroup(dist.group.WORLD) as group:
            spans, sent = on_sms(replace(options, wire=WIRES[wire]), num_sms, group)
        name = "dispatch_fp8" if wire == "fp8" else "dispatch"
        us |= {name: spans["dispatch"], "combine": spans["combine"]}
        num_bytes |= {name: sent.dispatch_bytes, "combine": sent.combine_bytes}
    return {
        "num_sms": num_sms,
        "us": {name: asdict(each) for name, each in us.items()},
        "remote_gb_per_s": {name: num_bytes[name] / us[name].p50 / 1e3 for name in us},
    }


def on_sms(
    options: BenchOptions, num_sms: int, group: EPGroup
) -> tuple[dict[str, Percentiles], BufferTraffic]:
    """Return times of normal mode, and the bytes of the rank that sends most.   Collective: yes."""
    batches = options.make_batches(options.tokens[0], group.world_size, group.device)
    batch, first_expert = batches[group.rank], group.rank * options.experts // group.world_size
    normal = open_normal(options, group, num_sms, batches)
    sent = max(of_all_ranks(normal.sent_bytes(batch)), key=lambda each: each.total_bytes)
    found = time_all({"normal": call_of(normal, batch, first_expert)}, group.device, options)
    normal.check()
    return found["normal"], sent


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The options of a run."""

    tokens: Annotated[str, typer.Option(help="T, on each rank.")] = (
        "1,8,32,128,512,1024,2048,4096,8192"
    )
    sms: Annotated[str, typer.Option(help="SMs of the other sweep.")] = "8,16,24,32,132"
    sms_tokens: Annotated[int, typer.Option(min=1, help="T of the other sweep.")] = 4096
    hidden: Annotated[int, typer.Option(min=1, help="H.")] = 7168
    top_k: Annotated[int, typer.Option(min=1, help="K, distinct and uniformly random.")] = 8
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 256
    iterations: Annotated[int, typer.Option(min=1, help="Measured.")] = 50
    pairs: Annotated[int, typer.Option(min=2, help="In the chain; even.")] = 20
    seed: Annotated[int, typer.Option(help="Of tokens and routing.")] = 0

    def options(self) -> BenchOptions:
        """Return the sizes of the sweep by tokens."""
        return BenchOptions(
            tokens=read_numbers(self.tokens),
            hidden=self.hidden,
            top_k=self.top_k,
            experts=self.experts,
            iterations=self.iterations,
            seed=self.seed,
        )


@takes_records
def main(sweep: Sweep, output: Output) -> None:
    """Check the buffers, measure them, and print the results."""
    options = sweep.options()
    # Receive buffers are used in turn: a graph must end in the one in which it began.
    pairs = sweep.pairs + sweep.pairs % 2
    with ranks_of_torchrun() as device:
        console = Console(quiet=dist.get_rank() != 0, highlight=False, markup=False, soft_wrap=True)
        report = report_of("nvlink", asdict(sweep), device, "benchmarks.bench_nvlink")
        steps = [
            ("by_tokens", partial(by_tokens, replace(options, tokens=(each,)), pairs))
            for each in options.tokens
        ]
        of_sms = replace(options, tokens=(sweep.sms_tokens,))
        steps += [("by_sms", partial(by_sms, of_sms, each)) for each in read_numbers(sweep.sms)]
        findings: dict[str, list[dict[str, object]]] = {"by_tokens": [], "by_sms": []}
        for name, measure in steps:
            findings[name].append(measure())
            console.print(findings[name][-1])
            # Write the file after each step, so that an interrupted run has some results.
            write_report(report | findings, output)


if __name__ == "__main__":
    typer.run(main)
