"""Measure DeepEP V1's calls through the drop-in, between the GPUs of one host.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_deep_ep --output deep_ep.json

Low latency with FP8 slabs and router weights in combine, as chains of pairs in a graph; normal mode
with the layout, FP8 and BF16, and a combine of rows that are summed; the host time of eager calls
in units of torch's one-element `add_`; and what a product beside them hides, or between their
halves. What each call hands out is checked first, a graph also with other routing than it was
captured with; on a difference the program ends without a number. On a CPU it is a dry run: pass
small sizes.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from benchmarks.bench_nvlink_low_latency import init_process_group
from benchmarks.bench_overlap import Product
from benchmarks.measuring.deep_ep_overlap import (
    Halves,
    Hidden,
    LowLatencyPair,
    Timed,
    normal_halves,
    timed_hidden,
)
from benchmarks.measuring.eager_rows import eager_row
from epcomm.bench.check import CheckError
from epcomm.bench.machine import describe_hardware, describe_versions
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.timing import Percentiles, captured, clock_for
from epcomm.bench.turns import wait_for_all
from epcomm.integrations.deep_ep import Buffer
from epcomm.quantization import FP8_FLOAT32_SCALES, quantize

# Pairs of a chain, in which host and launch of a graph do not count.
_CHAIN = 20
# Columns of the product beside normal mode, whose rows are the tokens of a rank.
_COLUMNS = 8192
# Rows, columns and inner size of those beside low latency, and how many: 50 us together on an H200,
# and small, for what they read takes the place of what communication reads in the cache of a GPU.
_SMALL, _NUM_SMALL = 2048, 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """The sizes of a layer; rounds: times that each call is timed."""

    hidden: int
    experts: int
    top_k: int
    num_sms: int
    rounds: int
    burst: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Tokens x [T, H] of numbers that bfloat16 and FP8 hold, and their routing."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def of(cls, options: Options, num_tokens: int, device: torch.device, seed: int) -> Batch:
        """Make another batch for each seed and rank."""
        generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        x = torch.randint(-4, 5, (num_tokens, options.hidden), generator=generator)
        scores = torch.rand(num_tokens, options.experts, generator=generator)
        ids = scores.topk(options.top_k, dim=1).indices
        weights = torch.full(ids.shape, 1 / options.top_k)
        return cls(
            x=x.to(torch.bfloat16).to(device), ids=ids.to(device), weights=weights.to(device)
        )


class LowLatency:
    """Pairs of low latency whose experts return ones: y is the sum of the weights."""

    def __init__(self, options: Options, buffer: Buffer, batch: Batch, max_tokens: int) -> None:
        """Open the buffer by a first pair."""
        self._options, self._buffer, self._batch = options, buffer, batch
        self._max_tokens = max_tokens
        capacity = buffer.group_size * max_tokens
        shape = (options.experts // buffer.group_size, capacity, options.hidden)
        self._rows = torch.ones(shape, dtype=torch.bfloat16, device=batch.x.device)
        self.y = self.pair()

    def pair(self) -> Tensor:
        """Make a dispatch, its hook, and a combine of ones."""
        *_, handle, _, hook = self._buffer.low_latency_dispatch(
            self._batch.x,
            self._batch.ids,
            self._max_tokens,
            self._options.experts,
            return_recv_hook=True,
        )
        assert hook is not None, "asked for"
        hook()
        y, _, _ = self._buffer.low_latency_combine(
            self._rows, self._batch.ids, self._batch.weights, handle
        )
        return y

    def halves(self) -> dict[str, Halves]:
        """Return a pair with hooks, and one of asynchronous calls, which is checked."""
        batch = self._batch
        pair = LowLatencyPair(
            buffer=self._buffer,
            x=batch.x,
            ids=batch.ids,
            weights=batch.weights,
            sizes=(self._max_tokens, self._options.experts),
            rows=self._rows,
        )
        halves = {
            "before the hooks": pair.halves(is_async=False),
            "beside them": pair.halves(is_async=True),
        }
        for name, each in halves.items():
            each.alone()
            assert pair.y is not None, "just combined"
            require(f"low latency, products {name}", pair.y, self.pair())
        return halves

    def hidden(self, timed: Timed) -> dict[str, Hidden]:
        """Time both kinds of pairs with products between their halves."""
        (num_tokens, hidden_size), device = self._batch.x.shape, self._batch.x.device
        side = min(_SMALL, hidden_size)
        one = Product(m=side, n=side, k=side).on(device)

        def work() -> None:
            for _ in range(_NUM_SMALL):
                one()

        found = {}
        for is_async, (name, halves) in enumerate(self.halves().items()):
            num_sms = self._options.num_sms if is_async else 0
            found[f"low latency, T={num_tokens}, products {name}"] = timed_hidden(
                halves, work, timed, device, num_sms=num_sms, is_graph=True
            )
        return found

    def check(self) -> None:
        """Compare slabs and y with what was sent."""
        batch, capacity = self._batch, self._rows.shape[1]
        slabs, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            batch.x, batch.ids, self._max_tokens, self._options.experts, use_fp8=False
        )
        assert isinstance(slabs, Tensor), "without scales"
        is_row = torch.arange(capacity, device=counts.device) < counts[:, None]
        rows = slabs.masked_fill(~is_row[..., None], float("nan"))
        y, _, _ = self._buffer.low_latency_combine(rows, batch.ids, batch.weights, handle)
        require("low latency, BF16 there and back", y, batch.x)
        require("low latency, sums of weights", self.pair(), torch.ones_like(batch.x))

    def check_graph(self) -> None:
        """Replay a pair with other routing than it was captured with."""
        if self._batch.x.device.type != "cuda":
            return
        kept: list[Tensor] = []
        graph = captured(lambda: kept.append(self.pair()))
        self._batch.ids.copy_((self._batch.ids + 1) % self._options.experts)
        self._batch.ids[: len(self._batch.ids) // 2, 0] = -1
        graph.replay()
        half = (self._batch.ids >= 0).sum(1, keepdim=True) / self._options.top_k
        require("a graph with other routing", kept[-1], half.expand_as(kept[-1]).bfloat16())

    def chain(self) -> None:
        """Make _CHAIN pairs."""
        for _ in range(_CHAIN):
            self.pair()


class Normal:
    """Calls of normal mode."""

    def __init__(self, options: Options, buffer: Buffer, batch: Batch) -> None:
        """Open the buffers by a first dispatch of each kind, and check them."""
        self._options, self._buffer, self._batch = options, buffer, batch
        wire = quantize(batch.x, FP8_FLOAT32_SCALES)
        assert wire.scales is not None, "FP8 has scales"
        self._fp8 = (wire.data, wire.scales)
        self._layout = self.layout()
        rows, self._handle = self.dispatch(batch.x)
        assert isinstance(rows, Tensor), "unquantised"
        self._rows = rows
        num_ranks = self._layout[1].sum(1, keepdim=True)
        require("normal mode, BF16 there and back", self.combine(), batch.x * num_ranks)
        quantized, handle = self.dispatch(self._fp8)
        assert isinstance(quantized, tuple), "with scales"
        data = quantized[0].view(torch.uint8)
        again, _ = self._buffer.dispatch(self._fp8, handle=handle)[0]
        require("normal mode, FP8 along a handle", again.view(torch.uint8), data)

    def layout(self) -> tuple[Tensor, Tensor]:
        """Return tokens per expert, and which token goes to which rank."""
        _, _, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
            self._batch.ids, self._options.experts
        )
        return per_expert, is_in_rank

    def dispatch(
        self, x: Tensor | tuple[Tensor, Tensor]
    ) -> tuple[Tensor | tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        """Make a dispatch with the layout that was made last; return rows and handle."""
        per_expert, is_in_rank = self._layout
        rows, _, _, _, handle, _ = self._buffer.dispatch(
            x,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self._batch.ids,
            topk_weights=self._batch.weights,
        )
        assert handle is not None, "no handle came"
        return rows, handle

    def dispatch_with_layout(self, x: Tensor | tuple[Tensor, Tensor]) -> None:
        """Make a layout and a dispatch."""
        self._layout = self.layout()
        self.dispatch(x)

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return what is timed on the device, by name."""
        return {
            "dispatch FP8": lambda: self.dispatch_with_layout(self._fp8),
            "dispatch BF16": lambda: self.dispatch_with_layout(self._batch.x),
            "combine": self.combine,
        }

    def eager_calls(self) -> dict[str, Callable[[], object]]:
        """Return what is timed on the host, by name: each call of a program on its own."""
        return {
            "layout": self.layout,
            "dispatch FP8": lambda: self.dispatch(self._fp8),
            "dispatch BF16": lambda: self.dispatch(self._batch.x),
            "combine": self.combine,
        }

    def halves(self) -> dict[str, Halves]:
        """Return a dispatch along the handle, FP8, and a combine, as asynchronous calls.

        Raises:
            CheckError: a combine that nobody waited for at once is another one.
        """
        halves = normal_halves(self._buffer, self._fp8, self._rows, self._handle)
        found = [self.combine()]
        halves["combine"].around(lambda: found.append(self.combine()))
        require("normal mode, beside an asynchronous combine", found[1], found[0])
        return dict(halves)

    def hidden(self, timed: Timed) -> dict[str, Hidden]:
        """Time both calls with a product beside them."""
        (num_tokens, hidden_size), device = self._batch.x.shape, self._batch.x.device
        work = Product(m=num_tokens, n=_COLUMNS, k=hidden_size).on(device)
        num_sms = self._options.num_sms
        return {
            f"{name}, T={num_tokens}, a product beside it": timed_hidden(
                halves, work, timed, device, num_sms=num_sms, is_graph=False
            )
            for name, halves in self.halves().items()
        }

    def combine(self) -> Tensor:
        """Return the rows of the first dispatch."""
        return self._buffer.combine(self._rows, self._handle)[0]


def require(what: str, found: Tensor, wanted: Tensor) -> None:
    """Refuse results that differ."""
    if not torch.equal(found, wanted):
        raise CheckError(f"{what}: {found.flatten()[:4].tolist()}..., expected other elements")


def times_us(call: Callable[[], object], device: torch.device, rounds: int, share: int) -> float:
    """Return the median over rounds of the slowest rank, of one of `share` equal parts.

    Devices begin together, behind a small sum of all ranks: who begins first waits for nobody.
    """
    clock, spans, one = clock_for(device), [], torch.ones(1, device=device)
    call()
    for _ in range(rounds):
        wait_for_all(device)
        dist.all_reduce(one)
        clock.mark()
        call()
        clock.mark()
        spans.append(clock.take()[0] * 1e3 / share)
    return Percentiles.of(map(max, zip(*of_all_ranks(spans), strict=True))).p50


def main(
    hidden: Annotated[int, typer.Option(min=128, help="H.")] = 7168,
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 256,
    top_k: Annotated[int, typer.Option(min=1, help="K.")] = 8,
    tokens: Annotated[str, typer.Option(help="T of low latency, with commas.")] = "1,32,128",
    normal_tokens: Annotated[int, typer.Option(min=1, help="T of normal mode.")] = 4096,
    num_sms: Annotated[int, typer.Option(min=2, help="Of the kernels of normal mode.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="Times that a call is timed.")] = 20,
    burst: Annotated[int, typer.Option(min=1, help="Eager calls without a wait.")] = 20,
    output: Annotated[Path | None, typer.Option(help="Write the report there, as JSON.")] = None,
) -> None:
    """Check the calls, then time them, and print the slowest rank's."""
    options = Options(
        hidden=hidden,
        experts=experts,
        top_k=top_k,
        num_sms=num_sms,
        rounds=rounds,
        burst=burst,
    )
    init_process_group()
    try:
        report = measured(options, [int(each) for each in tokens.split(",")], normal_tokens)
        if output is not None and dist.get_rank() == 0:
            output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    finally:
        dist.destroy_process_group()


def measured(options: Options, tokens: list[int], normal_tokens: int) -> dict[str, object]:
    """Return the report. Collective: yes."""
    console = Console(quiet=dist.get_rank() != 0)
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    assert dist.group.WORLD is not None, "it was just made"
    Buffer.set_num_sms(options.num_sms)
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    found_us: dict[str, float] = {}
    units: dict[str, float] = {}

    def tell(name: str, us: float) -> None:
        found_us[name] = us
        console.print(f"{name:>32}: {us:8.1f} us", soft_wrap=True)

    def timed(call: Callable[[], object], share: int) -> float:
        return times_us(call, device, options.rounds, share)

    eager_calls: dict[str, Callable[[], object]] = {}
    hidden: dict[str, Hidden] = {}
    for number, num_tokens in enumerate(tokens):
        batch = Batch.of(options, num_tokens, device, number)
        pairs = LowLatency(options, buffer, batch, max(tokens))
        pairs.check()
        call = pairs.chain if device.type == "cpu" else captured(pairs.chain).replay
        tell(f"low latency, T={num_tokens}, a pair of {_CHAIN}", timed(call, _CHAIN))
        pairs.check_graph()
        hidden |= pairs.hidden(timed)
        eager_calls["low-latency pair"] = pairs.pair
    normal = Normal(options, buffer, Batch.of(options, normal_tokens, device, 99))
    for name, call in normal.calls().items():
        tell(f"{name}, T={normal_tokens}", timed(call, 1))
    hidden |= normal.hidden(timed)
    for name, each in hidden.items():
        console.print(f"{name}: {asdict(each)}", soft_wrap=True)
    eager_calls |= Normal(options, buffer, Batch.of(options, 1, device, 7)).eager_calls()
    for name, call in eager_calls.items():
        row = eager_row(call, device, rounds=options.rounds, burst=options.burst)
        units[name] = max(of_all_ranks(row.units))
        console.print(f"{name:>32}: {units[name]:8.1f} units of {row.unit_us:.2f} us on the host")
        if dist.get_rank() == 0:
            console.print(row.profile, soft_wrap=True)
    buffer.destroy()
    return {
        "benchmark": "deep_ep",
        "configuration": {**asdict(options), "ranks": dist.get_world_size()},
        "hardware": describe_hardware(device),
        "versions": describe_versions(device),
        "command": shlex.join(["python", "-m", "benchmarks.bench_deep_ep", *sys.argv[1:]]),
        "slowest_rank_us": found_us,
        "slowest_rank_units": units,
        "hidden": {name: asdict(each) for name, each in hidden.items()},
    }


if __name__ == "__main__":
    typer.run(main)
