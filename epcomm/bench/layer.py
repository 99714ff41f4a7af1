"""Time whole layers and their parts: from Python, and in a device graph.

Experts are random SwiGLU, each made from its own seed, so that any rank can compute any token in
float64 without the others: the first tokens of each rank are checked so before a layer is timed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from epcomm.bench.bounds import bound_layer
from epcomm.bench.contenders.all_gather import AllGather
from epcomm.bench.exposure import IN_TURN, OVERLAPPED, SHARED, Exposure, trace
from epcomm.bench.options import FP8, BenchOptions, dtype_of
from epcomm.bench.ranks import faults_of_all, of_all_ranks
from epcomm.bench.records import Report, Timing, Wrong
from epcomm.bench.report import name_of
from epcomm.bench.timing import peak_bytes_of
from epcomm.bench.turns import Timed, has_graphs, time_all, time_parts
from epcomm.config import EPConfig, Mode
from epcomm.errors import BackendUnavailable, ConfigError, EPError
from epcomm.experts import ExpertParallelExperts
from epcomm.group import EPGroup
from epcomm.micro_batches import interleave
from epcomm.ops.slots import aligned_counts, count_experts
from epcomm.platforms.tracing import ranged
from epcomm.quantization import dequantize, quantize
from epcomm.records import RowsDispatchOutput, TopKOutput
from epcomm.registry import runner_class
from epcomm.testing.data import RankBatch
from epcomm.testing.oracle import relative_error
from epcomm.weights.quantized import Fp8BlockWeights
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights

# Tokens of each rank that are compared: each costs K experts in float64.
_CHECKED_TOKENS = 8
# Roundings of a value before it is y: both products, the activation, the weighted result, the sum
# of a rank and y.
_NUM_ROUNDINGS = 6
# The reference quantises what kernels quantise. Runners that round gate and up to bfloat16 change
# an activation by up to 2**-8 of it. Codes of E4M3 are up to 2**-3 apart, so about 2**-5 of the
# activations get the next code: the root of the mean square error is 2**-3 * 2**-2.5.
_CODE_ERROR = 2**-5.5
# The runner that is timed beside the one of `auto` where it can compute the experts.
_OTHER_RUNNER = "deep_gemm"
# These read counts on the host, so they cannot be captured.
_HOST_RUNNERS = frozenset({"reference", "quantized_reference"})
# The parts of a traced call that overlaps them.
_CHUNKS = 4
# A budget has a quarter more slots than the batch needs, because an engine does not know the need.
_SPARE = 1.25


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """A layer with its batch: from hidden states and routing to y [T, H].

    timing: without times.
    dispatch, products, combine: the parts; products take what dispatch returned, and combine takes
        what both returned, results first.   whole: all three in one call.
    experts: the layer of epcomm; None for torch.
    """

    timing: Timing
    is_capturable: bool
    dispatch: Callable[[], Any]
    products: Callable[[Any], Any]
    combine: Callable[[Any, Any], Tensor]
    whole: Callable[..., Tensor]
    experts: ExpertParallelExperts | None = None
    check: Callable[[], None] = lambda: None

    def timed(
        self, device: torch.device, *, in_graph: bool, others: Mapping[str, Callable[[], object]]
    ) -> Timed:
        """Return a function that times the layer, its parts and other calls. Collective: yes."""
        # What the parts have returned.
        left: dict[str, Any] = {}

        def dispatch() -> None:
            left["rows"] = self.dispatch()

        def products() -> None:
            left["results"] = self.products(left["rows"])

        def combine() -> None:
            self.combine(left["results"], left["rows"])

        parts = {"dispatch": dispatch, "products": products, "combine": combine, **others}
        return time_parts({**parts, "layer": self.whole}, "layer", device, in_graph=in_graph)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Case:
    """Layers at one T with experts of one format; batches: of all ranks."""

    options: BenchOptions
    weights: str
    group: EPGroup
    batches: Sequence[RankBatch]
    report: Report

    @property
    def batch(self) -> RankBatch:
        return self.batches[self.group.rank]

    def measure(self, on_round: Callable[[], None]) -> None:
        """Check all layers, and time those that are right in turn. Collective: yes."""
        group, experts, expected = self.group, self.make_experts(), self.expected()
        self.batch.x.requires_grad_(self.options.backward)
        self.batch.topk_weights.requires_grad_(self.options.backward)
        ids = [each.topk_ids for each in self.batches]
        self.report.bounds.append(bound_layer(self.weights, experts, ids, group, self.report.rates))
        right = [each for each in self.open_layers(experts) if self._is_right(each, expected)]
        # Each layer that is right, eager or replayed from a graph.
        ways = [(layer, in_graph) for layer in right for in_graph in _ways_of(layer, group.device)]
        calls: dict[str, Timed] = {}
        for number, (layer, in_graph) in enumerate(ways):
            others = {} if in_graph else self._steps(layer)
            calls[str(number)] = layer.timed(group.device, in_graph=in_graph, others=others)
        us = time_all(calls, group.device, self.options, on_round=on_round)
        for (layer, in_graph), spans in zip(ways, us.values(), strict=True):
            layer.check()
            timing = replace(layer.timing, in_graph=in_graph, us=spans)
            if not in_graph and group.device.type == "cuda":
                parts = {"layer": layer.whole, **self._steps(layer)}
                peaks = {part: max(of_all_ranks(peak_bytes_of(parts[part]))) for part in parts}
                timing = replace(timing, peak_bytes=peaks)
            self.report.results.append(timing)
        if self.options.trace:
            for layer in right:
                self._expose(layer, experts, expected)

    def _steps(self, layer: Layer) -> Mapping[str, Callable[[], object]]:
        """Return a layer's call forward and backward, which drops gradients, if it is asked for."""
        if not self.options.backward or layer.experts is None:
            return {}
        trained = [each for each in layer.experts.parameters() if each.requires_grad]
        tensors = [self.batch.x, self.batch.topk_weights, *trained]

        @torch.enable_grad()
        def step() -> None:
            layer.whole().backward(self.batch.dy)
            for tensor in tensors:
                tensor.grad = None

        return {"step": step} if trained else {}

    def _is_right(self, layer: Layer, expected: Tensor) -> bool:
        """Return whether a layer is right on all ranks; report what is wrong. Collective: yes."""
        faults = faults_of_all(self.find_fault(layer, expected))
        if faults:
            name = f"layer in {layer.timing.mode or 'torch'} on {name_of(layer.timing)}"
            self.report.wrong.append(Wrong(name=name, tokens=layer.timing.tokens, fault=faults))
        return not faults

    def _expose(self, layer: Layer, experts: ExpertTensors, expected: Tensor) -> None:
        """Measure and trace what a layer of epcomm exposes of its exchange. Collective: yes."""
        if layer.experts is None or layer.timing.overlap:
            return
        shared, number = self._shared_expert(), max(self.options.chunks, default=_CHUNKS)

        def overlapped(chunked: Layer) -> Tensor:
            kept: list[Tensor] = []
            y = chunked.whole(meanwhile=lambda: kept.append(shared()))
            return y + kept[0]

        calls: dict[str, Callable[[], object]] = {IN_TURN: lambda: layer.whole() + shared()}
        for chunked in self._open(replace(layer.experts.config, chunks=number), experts):
            if not self._is_right(chunked, expected):
                return
            calls[OVERLAPPED] = partial(overlapped, chunked)
        others, device = {**calls, SHARED: shared}, self.group.device
        timed = layer.timed(device, in_graph=False, others=others)
        name = f"T = {layer.timing.tokens}, {layer.timing.mode} on {name_of(layer.timing)}"
        us = time_all({name: timed}, device, self.options)
        self.report.exposures.append(Exposure.of(name, us[name]))
        named = {f"{call}, {name}": make for call, make in calls.items()}
        self.report.events.extend(trace(named, self.group))

    def open_layers(self, experts: ExpertTensors) -> list[Layer]:
        """Open layers of epcomm, and one over torch's collectives for each of their runners."""
        opened: list[Layer] = []
        runners = ["auto"]
        if runner_class(_OTHER_RUNNER).supports(experts).ok:
            runners.append(_OTHER_RUNNER)
        for mode, backend, runner in product(self.options.modes, self.options.backends, runners):
            config = self.options.config(mode, self.batch.x.shape[0], backend)
            config = replace(config, runner=runner)
            exact = self._open(config, experts)
            opened += exact
            for number in self.options.chunks if exact else ():
                opened += self._open(replace(config, chunks=number), experts)
            if exact and self.options.micro_batches is not None:
                opened += self._open(config, experts, self.options.micro_batches)
            if exact and mode is Mode.NORMAL and has_graphs(self.group.device):
                # The host reads exact sizes, so a graph needs a budget.
                budget = self._num_slots(exact[0].timing.runner)
                opened += self._open(replace(config, max_recv_slots=budget), experts)
        names = dict.fromkeys(each.timing.runner for each in opened)
        return [*opened, *(self._gathered(experts, name) for name in names)]

    def _open(
        self, config: EPConfig, experts: ExpertTensors, micro_batches: int | None = None
    ) -> list[Layer]:
        """Open a layer of epcomm; none if it is refused, which is reported."""
        top_k = self.options.top_k
        try:
            layer = ExpertParallelExperts(experts, self.group, config, top_k=top_k, is_local=True)
        except (BackendUnavailable, ConfigError) as error:
            self.report.add_absent(config, f"{self.weights} experts: {error}")
            return []
        for name, parameter in layer.expert_parameters().items():
            # All layers share the experts.
            parameter.data = experts.tensors()[name]
        phase, dispatcher = layer.plan.prefill, layer.phases.prefill
        whole, overlap = partial(layer, self.batch.x, self.batch.topk), ""
        begins = dispatcher.is_asynchronous
        if config.chunks is not None:
            overlap = f"chunks={config.chunks}"
        if micro_batches is not None:
            overlap = f"{micro_batches} micro-batches"
            whole = partial(self._in_turn, layer, micro_batches)
            begins = begins or phase.caps.has_receive_hook
        if overlap and not begins:
            self.report.add_absent(config, f"{overlap}: transfers are not asynchronous here")
            return []
        made = Layer(
            timing=replace(
                self._untimed,
                mode=phase.mode.value,
                backend=phase.backend,
                runner=layer.plan.runner or "",
                overlap=overlap,
            ),
            is_capturable=phase.is_capturable,
            dispatch=partial(dispatcher.dispatch, self.batch.x, self.batch.topk),
            products=lambda rows: layer.runner.run(rows, layer.weights),
            combine=lambda results, rows: dispatcher.combine(results),
            whole=whole,
            experts=layer,
            check=layer.check,
        )
        return [made]

    def _in_turn(self, layer: ExpertParallelExperts, number: int) -> Tensor:
        """Compute the tokens in a number of micro-batches."""
        topk = self.batch.topk
        tensors = (self.batch.x, topk.topk_ids, topk.topk_weights)
        parts = zip(*(each.tensor_split(number) for each in tensors), strict=True)
        calls = [layer.steps(x, TopKOutput(topk_ids=i, topk_weights=w)) for x, i, w in parts]
        return torch.cat(interleave(*calls))

    @property
    def _untimed(self) -> Timing:
        tokens = self.batch.x.shape[0]
        return Timing(mode="", backend=AllGather.backend, tokens=tokens, weights=self.weights)

    def _gathered(self, experts: ExpertTensors, name: str) -> Layer:
        """Return an all-gather, experts by a runner, and a reduce-scatter."""
        runner = runner_class(name)()
        contender = AllGather(self.options.experts, runner, experts, self._num_slots(name))

        def products(rows: RowsDispatchOutput) -> Tensor:
            return runner.run(rows, experts).hidden_states

        def whole() -> Tensor:
            rows = contender.dispatch(self.batch)
            return contender.combine(products(rows), rows)

        return Layer(
            timing=replace(self._untimed, runner=name),
            is_capturable=True,
            dispatch=partial(contender.dispatch, self.batch),
            products=products,
            combine=contender.combine,
            whole=whole,
        )

    def _num_slots(self, runner: str) -> int:
        ids = torch.cat([each.topk_ids for each in self.batches])
        counts = count_experts(ids, self.options.experts).view(self.group.world_size, -1)
        aligned = aligned_counts(counts, runner_class(runner).expert_alignment)
        return math.ceil(_SPARE * int(aligned.sum(dim=1).max()))

    def make_experts(self) -> ExpertTensors:
        num_local = self.options.experts // self.group.world_size
        first = self.group.rank * num_local
        made = [self._expert(expert) for expert in range(first, first + num_local)]
        return made[0].with_tensors(
            {name: torch.cat([each.tensors()[name] for each in made]) for name in made[0].tensors()}
        )

    def _shared_expert(self) -> Callable[[], Tensor]:
        """Return an expert of the same size in the dtype of the tokens, which it gets all of."""
        x, expert = self.batch.x, self._unquantized(self.options.experts)
        gate_up, down = expert.gate_up_proj[0].T, expert.down_proj[0].T

        @ranged(SHARED)
        def compute() -> Tensor:
            gate, up = (x @ gate_up).chunk(2, dim=1)
            return (silu(gate) * up) @ down

        return compute

    def _expert(self, expert: int) -> ExpertTensors:
        """Make one expert, [1, ...], in the format of the weights."""
        plain = self._unquantized(expert)
        return Fp8BlockWeights.from_unquantized(plain) if self.weights == FP8 else plain

    def _unquantized(self, expert: int) -> ExpertWeights:
        """Make one expert, [1, ...], which is equal on any rank."""
        options, device = self.options, self.group.device
        assert options.intermediate is not None, "a whole layer was asked for"
        hidden, inner = options.hidden, options.intermediate
        generator = torch.Generator(device).manual_seed(options.seed + 104729 * (expert + 1))

        def matrix(rows: int, columns: int) -> Tensor:
            shape = (1, rows, columns)
            values = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
            return (values / columns**0.5).to(dtype_of(options.dtype))

        gate_up, down = matrix(2 * inner, hidden), matrix(hidden, inner)
        return ExpertWeights(gate_up_proj=gate_up, down_proj=down)

    def expected(self) -> Tensor:
        """Compute y of the first tokens in float64, [at most _CHECKED_TOKENS, H]."""
        x = self.batch.x[:_CHECKED_TOKENS]
        y = torch.zeros_like(x, dtype=torch.float64)
        for token, experts in enumerate(self.batch.topk_ids[:_CHECKED_TOKENS].tolist()):
            for k, expert in enumerate(experts):
                made = self._expert(expert)
                is_fp8 = isinstance(made, Fp8BlockWeights)
                matrices = made.dequantized() if is_fp8 else made.tensors()
                gate_up, down = (each[0].double() for each in matrices.values())
                gate, up = (gate_up @ _as_read(x[token], made)).chunk(2)
                result = down @ _as_read(gate / (1 + torch.exp(-gate)) * up, made)
                y[token] += self.batch.topk_weights[token, k].double() * result
        return y

    def find_fault(self, layer: Layer, expected: Tensor) -> str:
        """Return how far a layer is from the formula on this rank, '' if within its roundings."""
        try:
            y = layer.whole()
        except EPError as error:
            return str(error)
        error, limit = relative_error(y[:_CHECKED_TOKENS], expected), self._tolerance()
        return "" if error <= limit else f"y is off by {error:.1e}, allowed {limit:.1e}"

    def _tolerance(self) -> float:
        """Return the largest error of y, as a share of its largest value.

        Besides the roundings, products add H and I terms in float32, whose errors add up like a
        random walk.
        """
        options = self.options
        assert options.intermediate is not None, "a whole layer was asked for"
        adding = math.sqrt(options.hidden + options.intermediate) * torch.finfo(torch.float32).eps
        codes = _CODE_ERROR if self.weights == FP8 else 0.0
        return _NUM_ROUNDINGS * torch.finfo(dtype_of(options.dtype)).eps + adding + codes


def measure_layers(
    options: BenchOptions,
    group: EPGroup,
    batches: Sequence[RankBatch],
    report: Report,
    on_round: Callable[[], None],
) -> None:
    """Check and time layers with experts of each format, on every backend that serves, in turn.

    batches: of all ranks.

    Collective: yes.   Host sync: yes.
    """
    for weights in options.weights:
        case = _Case(options=options, weights=weights, group=group, batches=batches, report=report)
        case.measure(on_round)


def _ways_of(layer: Layer, device: torch.device) -> tuple[bool, ...]:
    """Return whether a layer is replayed from a graph, or both values to time it eager too."""
    if not (layer.is_capturable and has_graphs(device)) or layer.timing.runner in _HOST_RUNNERS:
        return (False,)
    # Normal mode has a budget of slots for graphs alone.
    return (True,) if layer.timing.mode == Mode.NORMAL else (False, True)


def _as_read(row: Tensor, experts: ExpertTensors) -> Tensor:
    """Return a row [H] or [I] as a product reads it, in float64: with the values of its codes."""
    if isinstance(experts, Fp8BlockWeights):
        row = dequantize(quantize(row.float().unsqueeze(0), experts.wire_format), torch.float32)[0]
    return row.double()
