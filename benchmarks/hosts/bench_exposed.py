"""Measure which share of the exchange of a training step no computation hides, between hosts.

    python -m tests.hosts.launch --hosts 2 --ranks 1 --rate 22mbit benchmarks/hosts/bench_exposed.py
        --output benchmarks/results/cpu_overlap.json

in one line. A step is forward and backward, of one layer of experts or of decoder layers with
attention on two micro-batches. Every step is timed twice: over the network, and with the messages
of an earlier step, which are then there immediately.

    exposed = (time of a step - time of a step with recorded messages) / exchange alone

    none            one layer; every call waits for its rows
    chunks          EPConfig(chunks=4), and gradients of experts are computed while those of rows
                    are sent
    one by one      decoder layers of Qwen3-MoE; every call waits for its rows
    micro_batches   the same by interleave()

Attention and experts of a decoder layer have about the same FLOPs a token, as in Qwen3-30B-A3B with
sequences of 4,096 tokens: 38 MFLOP of projections and 34 of causal attention, 76 of experts.

The exchange is that of the step in which every call waits, and `balance` the time of that step with
recorded messages over the exchange: at 1, computation could hide all of it. `gloo_cpu` is the share
of the exchange in which this process computes. Shared experts are measured in forward alone, where
nothing else is hidden:

    hidden = (time without overlap - time with it) / min(shared experts, exchange of dispatch)
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from benchmarks.hosts.bench_hosts import command_of_hosts
from benchmarks.measuring import Output, ranks_of_torchrun, report_of, rounded, write_report
from benchmarks.tables import render
from epcomm import EPConfig, EPGroup, ExpertParallelExperts, interleave
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.turns import wait_for_all
from epcomm.calls.transfers import Transfers
from epcomm.cli.records import takes_records
from epcomm.testing.data import BatchSpec, make_batch, make_weights, random_ids
from examples.two_micro_batches import Part, make_model, run_layers

Step = Callable[[], object]
# Each case, and the step without overlap that has its exchange.
CASES = {"none": "none", "chunks": "none", "micro_batches": "one by one"}


@dataclass(kw_only=True, eq=False)
class Tape:
    """The exchanges of one step: records them, repeats them, or returns what they received.

    number: Calls.next_batch before the step, so that recorded headers are valid again.
    """

    group: EPGroup
    number: int = 0
    exchanges: list[tuple[Callable[[], Tensor], Tensor]] = field(default_factory=list)

    def record(self, step: Step) -> None:
        """Run the step and keep its exchanges. Collective: yes."""
        self.number = self.group.calls.next_batch
        self._run(step, self._record)

    def replay(self, step: Step) -> None:
        """Run the step with the recorded messages. Local."""
        calls = self.group.calls
        number, calls.next_batch = calls.next_batch, self.number
        received = iter([found for _, found in self.exchanges])

        def give(name: str, *_: Tensor, out: Tensor | None = None, **__: object) -> Tensor:
            found = next(received)
            return found if out is None else out.copy_(found)

        self._run(step, give)
        calls.next_batch = number

    def exchange(self) -> None:
        """Make the exchanges of the step alone. Collective: yes."""
        for send, _ in self.exchanges:
            send()

    def _record(self, name: str, send: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
        method = getattr(type(self.group.collectives), name)
        found = method(self.group.collectives, send, **options)
        again = {key: each for key, each in options.items() if key != "out"}
        kept = send.clone()
        repeat = lambda: method(self.group.collectives, kept, **again)  # noqa: E731
        self.exchanges.append((repeat, found.clone()))
        return found

    def _run(self, step: Step, exchange: Callable[..., Tensor]) -> None:
        collectives = self.group.collectives
        for name in ("all_to_all", "all_gather"):

            def call(*args: Tensor, _name: str = name, **options: Any) -> Tensor:  # noqa: ANN401
                return exchange(_name, *args, **options)

            setattr(collectives, name, call)
        try:
            step()
        finally:
            del collectives.all_to_all, collectives.all_gather  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The options of a run."""

    tokens: Annotated[int, typer.Option(min=1, help="T, on each rank.")] = 512
    hidden: Annotated[int, typer.Option(min=8, help="H.")] = 256
    intermediate: Annotated[int, typer.Option(min=1, help="I, of an expert.")] = 9728
    shared: Annotated[int, typer.Option(min=1, help="I, of the shared experts.")] = 45056
    experts: Annotated[int, typer.Option(min=1, help="Of each rank.")] = 4
    top_k: Annotated[int, typer.Option(min=1, help="K, random.")] = 4
    chunks: Annotated[int, typer.Option(min=2, help="Of the chunked layer.")] = 4
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers, on T / 2 tokens each.")] = 4
    heads: Annotated[int, typer.Option(min=1, help="Of 128, in the attention of a layer.")] = 62
    layer_intermediate: Annotated[int, typer.Option(min=1, help="I, of its experts.")] = 4320
    mbit_per_s: Annotated[float, typer.Option(help="The rate of a host.")] = 22.0
    iterations: Annotated[int, typer.Option(min=1, help="Measured steps of each.")] = 8
    warm_up: Annotated[int, typer.Option(min=1, help="Steps of each before that.")] = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
    """A layer in two forms, whole and in chunks, with a batch and shared experts; a model.

    halves: two micro-batches of the model, [1, T / 2, H].
    """

    group: EPGroup
    layers: dict[str, ExpertParallelExperts]
    shared: torch.nn.Sequential
    model: Part
    halves: list[Tensor]
    x: Tensor
    dy: Tensor
    topk: Any
    sizes: Sizes
    transfers: Transfers

    @classmethod
    def of(cls, group: EPGroup, sizes: Sizes) -> Bench:
        """Make the layers and the model. Collective: yes."""
        spec = BatchSpec(
            hidden_size=sizes.hidden,
            num_local_experts=sizes.experts,
            top_k=sizes.top_k,
            tokens_of_rank=lambda rank, world_size: sizes.tokens,
            choose_ids=random_ids,
        )
        weights = make_weights(spec, group.world_size, intermediate_size=sizes.intermediate)
        layers = {}
        config = EPConfig(mode="normal", backend="collective", max_tokens_per_rank=sizes.tokens)
        for name, chunks in (("none", None), ("chunks", sizes.chunks)):
            chunked = replace(config, chunks=chunks)
            layers[name] = ExpertParallelExperts(weights, group, chunked, top_k=sizes.top_k)
        model_sizes = {
            "hidden_size": sizes.hidden,
            "head_dim": 128,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.heads,
            "moe_intermediate_size": sizes.layer_intermediate,
            "num_hidden_layers": sizes.layers,
            "num_experts": sizes.experts * group.world_size,
            "num_experts_per_tok": sizes.top_k,
        }
        batch, transfers = make_batch(spec, group.rank, group.world_size), group.calls.transfers
        assert transfers is not None, "calls over gloo are asynchronous"
        shared = torch.nn.Sequential(
            torch.nn.Linear(sizes.hidden, sizes.shared, bias=False),
            torch.nn.SiLU(),
            torch.nn.Linear(sizes.shared, sizes.hidden, bias=False),
        )
        return cls(
            group=group,
            layers=layers,
            shared=shared,
            model=make_model("qwen3_moe", group, config, model_sizes),
            halves=[x.unsqueeze(0).requires_grad_() for x in batch.x.clone().chunk(2)],
            x=batch.x.requires_grad_(),
            dy=batch.dy,
            topk=batch.topk,
            sizes=sizes,
            transfers=transfers,
        )

    @torch.enable_grad()
    def step(self, name: str) -> None:
        """Run forward and backward of a layer. Collective: yes."""
        self.group.calls.transfers = None if name == "none" else self.transfers
        self.layers[name](self.x, self.topk).backward(self.dy)

    @torch.enable_grad()
    def step_model(self, *, overlaps: bool) -> None:
        """Run forward and backward of the model on both micro-batches. Collective: yes."""
        self.group.calls.transfers = self.transfers if overlaps else None
        for xs in [self.halves] if overlaps else [[x] for x in self.halves]:
            ys = interleave(*(run_layers(self.model, x) for x in xs))
            torch.stack([y.square().mean() for y in ys]).sum().backward()

    def forward(self, *, overlaps: bool) -> Tensor:
        """Run forward of the whole layer with shared experts. Collective: yes."""
        self.group.calls.transfers = self.transfers if overlaps else None
        found: list[Tensor] = []
        y = self.layers["none"](
            self.x, self.topk, meanwhile=lambda: found.append(self.shared(self.x))
        )
        return y + (found[0] if found else self.shared(self.x))

    def seconds(self, calls: Mapping[str, Step]) -> dict[str, float]:
        """Return the median times of calls in turn, on the slowest rank. Collective: yes."""
        laps: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.sizes.warm_up + self.sizes.iterations):
            for name, call in calls.items():
                wait_for_all(self.x.device)
                start = time.perf_counter()
                call()
                laps[name].append(max(of_all_ranks(time.perf_counter() - start)))
        return {name: statistics.median(each[self.sizes.warm_up :]) for name, each in laps.items()}

    def tape(self, step: Step) -> Tape:
        """Return the exchanges of a step. Collective: yes."""
        tape = Tape(group=self.group)
        step()
        tape.record(step)
        return tape

    def measure(self) -> dict[str, object]:
        """Return the shares and the times behind them. Collective: yes."""
        calls: dict[str, Step] = {}
        steps: dict[str, Step] = {name: partial(self.step, name) for name in self.layers}
        steps["one by one"] = partial(self.step_model, overlaps=False)
        steps["micro_batches"] = partial(self.step_model, overlaps=True)
        for name, step in steps.items():
            tape = self.tape(step)
            calls |= {name: step, f"{name}, replayed": partial(tape.replay, step)}
            if name in CASES.values():
                calls[f"{name}, exchange"] = tape.exchange
        calls |= {
            "shared experts": partial(self.shared, self.x),
            "dispatch and combine": self.tape(partial(self.forward, overlaps=False)).exchange,
            "shared experts after": partial(self.forward, overlaps=False),
            "shared experts beside": partial(self.forward, overlaps=True),
        }
        seconds = self.seconds(calls)
        before = time.process_time(), time.perf_counter()
        calls["one by one, exchange"]()
        cpu, wall = time.process_time() - before[0], time.perf_counter() - before[1]
        exposed = {
            name: (seconds[name] - seconds[f"{name}, replayed"]) / seconds[f"{of}, exchange"]
            for name, of in CASES.items()
        }
        balance = {
            of: seconds[f"{of}, replayed"] / seconds[f"{of}, exchange"] for of in CASES.values()
        }
        hidden = seconds["shared experts after"] - seconds["shared experts beside"]
        most = min(seconds["shared experts"], seconds["dispatch and combine"] / 2)
        return {
            "exposed": exposed,
            "balance": balance,
            "hidden_by_shared_experts": hidden / most,
            "gloo_cpu": max(of_all_ranks(cpu / wall)),
            "ms": {name: 1e3 * each for name, each in seconds.items()},
        }


def keep_freed_memory() -> None:
    """Let the C library keep freed memory.

    Otherwise a step that follows a smaller one takes up to 1.3 times as long, because all its
    tensors are on new pages.
    """
    # M_MMAP_MAX and M_TRIM_THRESHOLD of mallopt(3).
    for option, value in ((-4, 0), (-1, -1)):
        ctypes.CDLL(None).mallopt(option, value)


@takes_records
def main(sizes: Sizes, output: Output) -> None:
    """Measure the layer, and print the shares."""
    torch.set_num_threads(1)
    keep_freed_memory()
    with ranks_of_torchrun() as device, EPGroup(dist.group.WORLD) as group:
        report = report_of("exposed", vars(sizes), device, "benchmarks.hosts.bench_exposed")
        report["command"] = command_of_hosts(__file__, f"{sizes.mbit_per_s:g}mbit")
        report |= Bench.of(group, sizes).measure()
        write_report(report, output)
        if dist.get_rank() == 0:
            sys.stdout.write(render(rounded(report)))


if __name__ == "__main__":
    typer.run(main)
