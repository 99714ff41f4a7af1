"""Measure DeepEP V1's calls through the drop-in, between the GPUs of one host.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_deep_ep --output deep_ep.json

Low latency with FP8 slabs and router weights in combine, as chains of pairs in a graph; normal mode
with the layout, FP8 and BF16, and a combine of rows that are summed; the host time of eager calls
in units of torch's one-element `add_`. The results of each call are checked first; on a difference
the program ends without a number. On a CPU it is a dry run: pass small sizes.

It also measures how much calls and a matrix product overlap. Normal mode: a dispatch (or
combine) on the communication stream, and a product on the current one, which leaves free the SMs
that the call may take. A dispatch knows its sizes by a handle, because otherwise the host waits for
counts meanwhile. Low latency, captured as a graph: products between a call and its receive hook,
which share a stream, so that they hide only the wait for other ranks; or beside asynchronous calls
on the communication stream, which need free SMs too.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Self

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from benchmarks.bench_nvlink import launched
from benchmarks.bench_overlap import Product, free_sms
from benchmarks.host_time import EagerRow, eager_row
from benchmarks.measuring import Output, ranks_of_torchrun, report_of, write_report
from epcomm.bench.check import CheckError
from epcomm.bench.options import read_numbers
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.timing import Percentiles
from epcomm.bench.turns import percentiles_of, take_turns
from epcomm.cli.records import takes_records
from epcomm.integrations.deep_ep import Buffer, EventOverlap
from epcomm.quantization import FP8_FLOAT32_SCALES, quantize

# Pairs in a chain: enough that the host and the launch of the graph do not affect the time.
_CHAIN = 20
# Calls in a measurement with products: enough that the host is ahead of the device, and that the
# launch of their graph is short in comparison.
_CALLS = 10
# Columns of the product that runs beside normal mode; its rows are the tokens of a rank.
_COLUMNS = 8192
# Rows, columns, inner size and number of the products that run beside low latency: 50 us together
# on an H200. They are small, because their operands evict those of communication from the cache of
# a GPU.
_SMALL, _NUM_SMALL = 2048, 3

Rows = Tensor | tuple[Tensor, Tensor]
Call = Callable[[], object]
# Begins a call and returns what ends it.
Begin = Callable[[], Call]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The sizes of a layer, and how often calls are timed."""

    hidden: Annotated[int, typer.Option(min=128, help="H.")] = 7168
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 256
    top_k: Annotated[int, typer.Option(min=1, help="K.")] = 8
    tokens: Annotated[str, typer.Option(help="T of low latency, with commas.")] = "1,32,128"
    normal_tokens: Annotated[int, typer.Option(min=1, help="T of normal mode.")] = 4096
    num_sms: Annotated[int, typer.Option(min=2, help="Of the kernels of normal mode.")] = 24
    rounds: Annotated[int, typer.Option(min=1, help="Times that a call is timed.")] = 20
    burst: Annotated[int, typer.Option(min=1, help="Eager calls without a wait.")] = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Tokens x [T, H] of numbers that bfloat16 and FP8 hold, and their routing."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def of(cls, options: Options, num_tokens: int, device: torch.device, seed: int) -> Self:
        """Make another batch for each seed and rank."""
        generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        x = torch.randint(-4, 5, (num_tokens, options.hidden), generator=generator)
        scores = torch.rand(num_tokens, options.experts, generator=generator)
        ids = scores.topk(options.top_k, dim=1).indices
        weights = torch.full(ids.shape, 1 / options.top_k)
        return cls(
            x=x.to(torch.bfloat16).to(device), ids=ids.to(device), weights=weights.to(device)
        )


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """The times of communication and of products, alone and together, in microseconds.

    share: the hidden part of the shorter one: 1 if both together take as long as the longer one, 0
        if they take as long as one after the other.
    """

    communication_us: float
    product_us: float
    together_us: float
    share: float

    @classmethod
    def of(cls, communication_us: float, product_us: float, together_us: float) -> Self:
        """Compute the share: of 30, 50 and 60 us together, 20 of 30 us are hidden."""
        saved = communication_us + product_us - together_us
        return cls(
            communication_us=communication_us,
            product_us=product_us,
            together_us=together_us,
            share=saved / min(communication_us, product_us),
        )


class LowLatency:
    """Pairs of low latency whose experts return ones: y is the sum of the weights."""

    def __init__(self, options: Options, buffer: Buffer, batch: Batch, max_tokens: int) -> None:
        """Open the buffer by a first pair."""
        self._options, self._buffer, self._batch = options, buffer, batch
        self._sizes = max_tokens, options.experts
        capacity = buffer.group_size * max_tokens
        shape = (options.experts // buffer.group_size, capacity, options.hidden)
        self._rows = torch.ones(shape, dtype=torch.bfloat16, device=batch.x.device)
        # Results of the last dispatch and combine.
        self._handle: tuple[Tensor, Tensor, int, int, int] | None = None
        self._y = torch.empty(0)
        self.pair()

    def begin_dispatch(self, *, is_async: bool) -> Call:
        """Begin a dispatch, asynchronous or with a hook; return its end as a function."""
        batch = self._batch
        *_, self._handle, event, hook = self._buffer.low_latency_dispatch(
            batch.x, batch.ids, *self._sizes, async_finish=is_async, return_recv_hook=not is_async
        )
        return _end_of(event, hook)

    def begin_combine(self, *, is_async: bool) -> Call:
        """Begin the combine of ones."""
        assert self._handle is not None, "a dispatch came before"
        batch = self._batch
        self._y, event, hook = self._buffer.low_latency_combine(
            self._rows,
            batch.ids,
            batch.weights,
            self._handle,
            async_finish=is_async,
            return_recv_hook=not is_async,
        )
        return _end_of(event, hook)

    def pair(self) -> Tensor:
        """Make a dispatch, its hook, and a combine of ones."""
        self.begin_dispatch(is_async=False)()
        assert self._handle is not None, "just dispatched"
        batch = self._batch
        y, _, _ = self._buffer.low_latency_combine(
            self._rows, batch.ids, batch.weights, self._handle
        )
        return y

    def chain(self) -> None:
        """Make _CHAIN pairs."""
        for _ in range(_CHAIN):
            self.pair()

    def check(self) -> None:
        """Compare slabs and y with what was sent."""
        batch, capacity = self._batch, self._rows.shape[1]
        slabs, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            batch.x, batch.ids, *self._sizes, use_fp8=False
        )
        assert isinstance(slabs, Tensor), "without scales"
        is_row = torch.arange(capacity, device=counts.device) < counts[:, None]
        rows = slabs.masked_fill(~is_row[..., None], float("nan"))
        y, _, _ = self._buffer.low_latency_combine(rows, batch.ids, batch.weights, handle)
        require("low latency, BF16 there and back", y, batch.x)
        require("low latency, sums of weights", self.pair(), torch.ones_like(batch.x))

    def hidden(self) -> dict[str, Hidden]:
        """Time both kinds of pairs with products between their halves, after a check."""
        (num_tokens, hidden_size), device = self._batch.x.shape, self._batch.x.device
        side = min(_SMALL, hidden_size)
        one = Product(m=side, n=side, k=side).on(device)

        def work() -> None:
            for _ in range(_NUM_SMALL):
                one()

        found = {}
        for where, is_async in (("before the hooks", False), ("beside them", True)):
            begins = [
                partial(self.begin_dispatch, is_async=is_async),
                partial(self.begin_combine, is_async=is_async),
            ]
            around(begins, _nothing)
            require(f"low latency, products {where}", self._y, self.pair())
            found[f"low latency, T={num_tokens}, products {where}"] = hidden_of(
                begins,
                work,
                device,
                rounds=self._options.rounds,
                num_sms=self._options.num_sms if is_async else 0,
                is_graph=True,
            )
        return found


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
        """Return tokens per expert, and which token is sent to which rank."""
        _, _, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
            self._batch.ids, self._options.experts
        )
        return per_expert, is_in_rank

    def dispatch(self, x: Rows) -> tuple[Rows, tuple[Tensor, ...]]:
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

    def dispatch_with_layout(self, x: Rows) -> None:
        """Make a layout and a dispatch."""
        self._layout = self.layout()
        self.dispatch(x)

    def combine(self) -> Tensor:
        """Combine the rows of the first dispatch."""
        return self._buffer.combine(self._rows, self._handle)[0]

    def calls(self, dispatch: Callable[[Rows], object]) -> dict[str, Call]:
        """Return the calls that are timed, by name; dispatch: with or without its layout."""
        return {
            "dispatch FP8": lambda: dispatch(self._fp8),
            "dispatch BF16": lambda: dispatch(self._batch.x),
            "combine": self.combine,
        }

    def begin_dispatch(self) -> Call:
        """Begin an asynchronous dispatch along the handle, FP8."""
        *_, event = self._buffer.dispatch(
            self._fp8,
            handle=self._handle,
            previous_event=self._buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        return event.current_stream_wait

    def begin_combine(self) -> Call:
        """Begin an asynchronous combine."""
        *_, event = self._buffer.combine(
            self._rows,
            self._handle,
            previous_event=self._buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        return event.current_stream_wait

    def hidden(self) -> dict[str, Hidden]:
        """Time both calls with a product beside them, after a check.

        Raises:
            CheckError: a combine beside an asynchronous one gives another result.
        """
        (num_tokens, hidden_size), device = self._batch.x.shape, self._batch.x.device
        work = Product(m=num_tokens, n=_COLUMNS, k=hidden_size).on(device)
        found = [self.combine()]
        around([self.begin_combine], lambda: found.append(self.combine()))
        require("normal mode, beside an asynchronous combine", found[1], found[0])
        begins = {"dispatch": self.begin_dispatch, "combine": self.begin_combine}
        return {
            f"{name}, T={num_tokens}, a product beside it": hidden_of(
                [begin],
                work,
                device,
                rounds=self._options.rounds,
                num_sms=self._options.num_sms,
                is_graph=False,
            )
            for name, begin in begins.items()
        }


def around(begins: Sequence[Begin], work: Call) -> None:
    """Make calls with `work` between the two halves of each call."""
    for begin in begins:
        end = begin()
        work()
        end()


def require(what: str, found: Tensor, wanted: Tensor) -> None:
    """Raise an error if results differ from the expected ones."""
    if not torch.equal(found, wanted):
        raise CheckError(f"{what}: {found.flatten()[:4].tolist()}..., expected others")


def times_of(call: Call, device: torch.device, *, rounds: int, is_graph: bool) -> Percentiles:
    """Return microseconds of a call on the slowest rank. Collective: as the call.

    is_graph: replay it from a device graph, on a GPU.
    """
    call()
    turns = {"call": launched(call, device, is_graph=is_graph)}
    return percentiles_of(take_turns(turns, device, num_rounds=rounds)["call"])["call"]


def hidden_of(
    begins: Sequence[Begin],
    work: Call,
    device: torch.device,
    *,
    rounds: int,
    num_sms: int,
    is_graph: bool,
) -> Hidden:
    """Time calls and the products between their halves, alone and together, by medians.

    num_sms: SMs that the products leave free.   is_graph: capture the calls, which read no counts.

    Collective: yes.   Host sync: yes.
    """
    calls: tuple[Call, ...] = (
        lambda: around(begins, _nothing),
        lambda: [work() for _ in begins],
        lambda: around(begins, work),
    )

    def median_us(call: Call) -> float:
        def calls() -> None:
            for _ in range(_CALLS):
                call()

        return times_of(calls, device, rounds=rounds, is_graph=is_graph).p50 / _CALLS

    with free_sms(num_sms) if device.type == "cuda" and num_sms else nullcontext():
        return Hidden.of(*map(median_us, calls))


def _nothing() -> None:
    """Do nothing between halves."""


def _end_of(event: EventOverlap, hook: Call | None) -> Call:
    return event.current_stream_wait if hook is None else hook


def measured(options: Options, device: torch.device) -> dict[str, object]:
    """Return the numbers of the report, and print them. Collective: yes."""
    console = Console(quiet=dist.get_rank() != 0, soft_wrap=True)
    assert dist.group.WORLD is not None, "the ranks have joined"
    Buffer.set_num_sms(options.num_sms)
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    found: dict[str, Percentiles] = {}
    hidden: dict[str, Hidden] = {}
    eager_calls: dict[str, Call] = {}
    tokens = read_numbers(options.tokens)
    for number, num_tokens in enumerate(tokens):
        batch = Batch.of(options, num_tokens, device, number)
        pairs = LowLatency(options, buffer, batch, max(tokens))
        pairs.check()
        times = times_of(pairs.chain, device, rounds=options.rounds, is_graph=True)
        of_pair = {name: us / _CHAIN for name, us in asdict(times).items()}
        found[f"low latency, T={num_tokens}, a pair of {_CHAIN}"] = Percentiles(**of_pair)
        hidden |= pairs.hidden()
        eager_calls["low-latency pair"] = pairs.pair
    normal = Normal(options, buffer, Batch.of(options, options.normal_tokens, device, 99))
    for name, call in normal.calls(normal.dispatch_with_layout).items():
        times = times_of(call, device, rounds=options.rounds, is_graph=False)
        found[f"{name}, T={options.normal_tokens}"] = times
    hidden |= normal.hidden()
    eager = Normal(options, buffer, Batch.of(options, 1, device, 7))
    eager_calls |= {"layout": eager.layout, **eager.calls(eager.dispatch)}
    rows: dict[str, EagerRow] = {
        name: eager_row(call, device, rounds=options.rounds, burst=options.burst)
        for name, call in eager_calls.items()
    }
    for name, row in rows.items():
        console.print(f"{name}, rank 0, own time\n{row.profile}")
    buffer.destroy()
    numbers = {
        "slowest_rank_us": {name: each.p50 for name, each in found.items()},
        "percentiles_us": {name: asdict(each) for name, each in found.items()},
        "slowest_rank_units": {name: max(of_all_ranks(row.units)) for name, row in rows.items()},
        "hidden": {name: asdict(each) for name, each in hidden.items()},
    }
    console.print(numbers)
    return numbers


@takes_records
def main(options: Options, output: Output) -> None:
    """Check the calls, then time them, and print the slowest rank's."""
    with ranks_of_torchrun() as device:
        report = report_of("deep_ep", asdict(options), device, "benchmarks.bench_deep_ep")
        write_report(report | measured(options, device), output)


if __name__ == "__main__":
    typer.run(main)
