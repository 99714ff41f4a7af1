"""Measure which share of the exchange of a training step no computation hides, between hosts.

    python -m tests.hosts.launch --hosts 2 --ranks 1 --rate 50mbit benchmarks/hosts/bench_exposed.py
        --output benchmarks/results/cpu_overlap.json

in one line. A step is forward and backward of one layer. Every way to compute it is timed twice:
over the network, and with the messages of an earlier step, which are then there immediately.

    exposed = (time of a step - time of a step with recorded messages) / exchange alone

    none     every call waits for its rows
    chunks   EPConfig(chunks=4), and gradients of experts are computed while those of rows are sent

`exchange` is the time of the messages of a step alone, and `gloo_cpu` the share of it in which this
process computes. Shared experts are measured in forward alone, where nothing else is hidden:

    hidden = (time without overlap - time with it) / min(shared experts, exchange of dispatch)
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from benchmarks.measuring import Output, ranks_of_torchrun, report_of, write_report
from epcomm import EPConfig, EPGroup, ExpertParallelExperts
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.turns import wait_for_all
from epcomm.calls.transfers import Transfers
from epcomm.cli.records import takes_records
from epcomm.testing.data import BatchSpec, make_batch, make_weights, random_ids

Step = Callable[[], object]


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
    hidden: Annotated[int, typer.Option(min=1, help="H.")] = 512
    intermediate: Annotated[int, typer.Option(min=1, help="I, of an expert.")] = 2048
    shared: Annotated[int, typer.Option(min=1, help="I, of the shared experts.")] = 2048
    experts: Annotated[int, typer.Option(min=1, help="Of each rank.")] = 4
    top_k: Annotated[int, typer.Option(min=1, help="K, random.")] = 2
    chunks: Annotated[int, typer.Option(min=2, help="Of the chunked layer.")] = 4
    iterations: Annotated[int, typer.Option(min=1, help="Measured steps of each.")] = 10
    warm_up: Annotated[int, typer.Option(min=1, help="Steps of each before that.")] = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
    """A layer in two forms, whole and in chunks, with a batch and shared experts."""

    group: EPGroup
    layers: dict[str, ExpertParallelExperts]
    shared: torch.nn.Sequential
    x: Tensor
    dy: Tensor
    topk: Any
    sizes: Sizes
    transfers: Transfers

    @classmethod
    def of(cls, group: EPGroup, sizes: Sizes) -> Bench:
        """Make both layers. Collective: yes."""
        spec = BatchSpec(
            hidden_size=sizes.hidden,
            num_local_experts=sizes.experts,
            top_k=sizes.top_k,
            tokens_of_rank=lambda rank, world_size: sizes.tokens,
            choose_ids=random_ids,
        )
        weights = make_weights(spec, group.world_size, intermediate_size=sizes.intermediate)
        layers = {}
        for name, chunks in (("none", None), ("chunks", sizes.chunks)):
            config = EPConfig(
                mode="normal",
                backend="collective",
                chunks=chunks,
                max_tokens_per_rank=sizes.tokens,
            )
            layers[name] = ExpertParallelExperts(weights, group, config, top_k=sizes.top_k)
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
            x=batch.x.requires_grad_(),
            dy=batch.dy,
            topk=batch.topk,
            sizes=sizes,
            transfers=transfers,
        )

    def step(self, name: str) -> None:
        """Run forward and backward of a layer. Collective: yes."""
        self.group.calls.transfers = None if name == "none" else self.transfers
        with torch.enable_grad():
            self.layers[name](self.x, self.topk).backward(self.dy)

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
        for name in self.layers:
            step = partial(self.step, name)
            tape = self.tape(step)
            calls |= {name: step, f"{name}, replayed": partial(tape.replay, step)}
            # The exchange of the layer that sends it in one piece.
            calls.setdefault("exchange", tape.exchange)
        calls |= {
            "shared experts": partial(self.shared, self.x),
            "dispatch and combine": self.tape(partial(self.forward, overlaps=False)).exchange,
            "shared experts after": partial(self.forward, overlaps=False),
            "shared experts beside": partial(self.forward, overlaps=True),
        }
        seconds = self.seconds(calls)
        before = time.process_time(), time.perf_counter()
        calls["exchange"]()
        cpu, wall = time.process_time() - before[0], time.perf_counter() - before[1]
        exposed = {
            name: (seconds[name] - seconds[f"{name}, replayed"]) / seconds["exchange"]
            for name in self.layers
        }
        hidden = seconds["shared experts after"] - seconds["shared experts beside"]
        most = min(seconds["shared experts"], seconds["dispatch and combine"] / 2)
        return {
            "exposed": exposed,
            "hidden_by_shared_experts": hidden / most,
            "gloo_cpu": max(of_all_ranks(cpu / wall)),
            "ms": {name: 1e3 * each for name, each in seconds.items()},
        }


@takes_records
def main(sizes: Sizes, output: Output) -> None:
    """Measure the layer, and print the shares."""
    torch.set_num_threads(1)
    with ranks_of_torchrun() as device, EPGroup(dist.group.WORLD) as group:
        report = report_of("exposed", vars(sizes), device, "benchmarks.hosts.bench_exposed")
        report |= Bench.of(group, sizes).measure()
        write_report(report, output)
        if dist.get_rank() == 0:
            for name in ("exposed", "hidden_by_shared_experts", "gloo_cpu", "ms"):
                sys.stdout.write(f"{name}: {report[name]}\n")


if __name__ == "__main__":
    typer.run(main)
