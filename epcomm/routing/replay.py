"""Router replay: training takes the experts that rollout took.

    with record_routes(model) as record:        # rollout
        generate(model, ...)
    routes = record.routes()                     # [tokens, layers, K], int16

    with replay_routes(model, routes) as replay: # training, forward and backward
        model(tokens).loss.backward()
    replay.disagreement()                        # share of tokens whose live choice differs

The weights of the replayed experts are computed from the live logits, with gradients. A layer takes
the next T rows of `routes` in each call, so micro-batches take theirs in the order of their
forwards. A call that backward repeats for activation checkpointing takes the rows of the call that
it repeats, which autograd's numbers of nodes tell: they grow in the order of forward.

    call of micro-batch              0    1    2
    number of the next node          7   31   55
    node 40 of a checkpoint needs the call: it repeats that of micro-batch 1
    node 30 of a reentrant checkpoint, made before its calls: micro-batch 1 as well

A layer that one checkpoint calls several times repeats these calls in their order.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from epcomm.errors import ConfigError, HandleError, ShapeError
from epcomm.routing.gates import (
    Gate,
    GateCall,
    Repeat,
    call_number,
    checkpoint_of_call,
    choose,
    named_gates,
    observed,
)

# The largest number of experts whose ids fit int16.
_MAX_EXPERTS = 2**15
_DTYPES = (torch.int16, torch.int32, torch.int64, torch.int8, torch.uint8)


@dataclass(frozen=True, kw_only=True)
class ReplayCounts:
    """Counts of the differences between live and replayed choices of a layer, on this rank.

    num_tokens: tokens with a replayed expert.
    num_tokens_that_differ: tokens of these with an expert that the router did not choose.
    num_entries, num_entries_that_differ: the same of the replayed entries of tokens.
    """

    num_tokens: int
    num_tokens_that_differ: int
    num_entries: int
    num_entries_that_differ: int

    @property
    def token_share(self) -> float:
        """The share of tokens that differ; 0 without tokens."""
        return self.num_tokens_that_differ / max(self.num_tokens, 1)

    @property
    def entry_share(self) -> float:
        """The share of entries that differ; 0 without entries."""
        return self.num_entries_that_differ / max(self.num_entries, 1)

    @classmethod
    def of(cls, counts: Tensor) -> Self:
        """Read the counts of a Gate. Host sync: yes."""
        names = (field.name for field in fields(cls))
        return cls(**dict(zip(names, counts.tolist(), strict=True)))


class RouteRecord:
    """The routes that a model took inside record_routes()."""

    def __init__(self, num_layers: int, top_k: int, recorded: Mapping[int, list[Tensor]]) -> None:
        """Join what was recorded: the ids [T, K] of each call of a layer, by its index."""
        self._num_layers, self._top_k, self._recorded = num_layers, top_k, recorded

    def calls(self) -> list[Tensor]:
        """Return the routes of each forward of the model, [T, layers, K], int16, in their order.

        Layers without experts have -1. In decode a forward has one token of each sequence.

        Local.   Host sync: none.   Lifetime: tensors of the caller, on the device of the model.
        Raises:
            ShapeError: the layers were called with different numbers of tokens or of times, or
                differ in K.
        """
        of_layers = self._recorded.values()
        if len(set(map(len, of_layers))) > 1:
            raise ShapeError(
                f"record_routes: layers were called {list(map(len, of_layers))} times, expected "
                "the same number; record each forward that may fail in its own context"
            )
        return [self._routes(ids) for ids in zip(*of_layers, strict=True)]

    def routes(self) -> Tensor:
        """Return the routes of all forwards, [tokens, layers, K]; see calls()."""
        calls = self.calls()
        if not calls:
            return torch.empty(0, self._num_layers, self._top_k, dtype=torch.int16, device="cpu")
        return torch.cat(calls)

    def _routes(self, ids_of_layers: Sequence[Tensor]) -> Tensor:
        shape = ids_of_layers[0].shape
        if any(ids.shape != shape for ids in ids_of_layers):
            raise ShapeError(
                f"record_routes: layers chose experts of {[list(x.shape) for x in ids_of_layers]}, "
                "expected the same [T, K] of all; record the layers apart"
            )
        routes = ids_of_layers[0].new_full((shape[0], self._num_layers, shape[1]), -1)
        for index, ids in zip(self._recorded, ids_of_layers, strict=True):
            routes[:, index] = ids
        return routes


@contextmanager
def record_routes(
    model: nn.Module, *, layers: Mapping[str, int] | None = None
) -> Iterator[RouteRecord]:
    """Record the experts of each token in all MoE layers of `model`.

    Calls that backward repeats are left out, and so is idle_step(). Replays of device graphs are
    not recorded: generate without them.

    Args:
        model: has ExpertParallelMoE blocks, or was loaded by transformers with epcomm.
        layers: index of the layer of each block, by the name of the block; None: the first number
            in the name, such as 3 for `model.layers.3.mlp`.

    Local.   Host sync: none.
    Raises:
        ConfigError: no MoE layer, blocks without a separate index, or over 32,768 experts.
    """
    gates, num_layers = _gates_by_layer("record_routes", model, layers)
    recorded: dict[int, list[Tensor]] = {index: [] for index in gates}
    keep = [partial(_keep_ids, ids) for ids in recorded.values()]
    with observed(list(zip(gates.values(), keep, strict=True))):
        top_k = next(iter(gates.values())).routing.top_k
        yield RouteRecord(num_layers or max(gates) + 1, top_k, recorded)


class RouteReplay:
    """The replay of routes inside replay_routes()."""

    def __init__(self, layers: "Sequence[_ReplayedLayer]") -> None:
        self._layers = layers

    def disagreement(self) -> dict[int, ReplayCounts]:
        """Return the ReplayCounts of each layer so far, on this rank.

        Local.   Host sync: yes.
        """
        return {layer.index: ReplayCounts.of(layer.counts) for layer in self._layers}


@contextmanager
def replay_routes(
    model: nn.Module, routes: Tensor, *, layers: Mapping[str, int] | None = None
) -> Iterator[RouteReplay]:
    """Replace the experts that all MoE layers of `model` choose by given ones.

    Forward and backward of the tokens belong inside the context, because activation checkpointing
    chooses experts again in backward.

    Args:
        model: has ExpertParallelMoE blocks, or was loaded by transformers with epcomm.
        routes: [tokens, layers, K], an integer dtype, on the device of the model. The tokens of
            this rank in the order in which forwards take them, padding included, see
            routes_of_batch(). Layers are those of the whole model, also in a pipeline stage; those
            without experts are not read. Entries are ids of logical experts, distinct for a token;
            -1: the router chooses. A rank without tokens passes routes of 0 tokens.
        layers: see record_routes().

    Collective: yes, one exchange of every group of the layers; all of its ranks enter the context.
    Host sync: yes, on entry; none in calls of the layers.
    Raises:
        ConfigError: bad routes of some rank, a context inside another one, or a router whose
            weights do not follow from its logits; on every rank.
        ShapeError: a forward with more tokens than routes are left, reported to the other ranks; on
            exit, routes that no forward took.
    """
    gates, num_layers = _gates_by_layer("replay_routes", model, layers)
    _agree(gates, _problem(gates, routes, num_layers))
    replayed = [_ReplayedLayer(i, gate, routes[:, i].clone()) for i, gate in gates.items()]
    for layer in replayed:
        layer.last = replayed[-1]
    try:
        with observed(list(zip(gates.values(), replayed, strict=True)), first=True):
            yield RouteReplay(replayed)
    finally:
        for layer in replayed:
            layer.end()
    for layer in replayed:
        layer.check_end()


def _keep_ids(kept: list[Tensor], call: GateCall) -> GateCall:
    if call.repeats is None:
        kept.append(call.topk_ids.to(torch.int16))
    return call


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """A call of a layer: its first token, T, call_number(), and checkpoint_of_call()."""

    start: int
    num_tokens: int
    number: int
    checkpoint: object | None


class _ReplayedLayer:
    """Replaces the choice of one layer.

    counts: see ReplayCounts; [4], int64, on the device.   last: the last layer of the model.
    """

    last: "_ReplayedLayer"

    def __init__(self, index: int, gate: Gate, routes: Tensor) -> None:
        self.index = index
        self._routes = routes
        self._has_live = bool((routes < 0).any())
        self.counts = torch.zeros(4, dtype=torch.int64, device=routes.device)
        self._gate = gate
        self._calls: list[_Call] = []
        self._end = 0
        self._begin_number = call_number()
        self._thread = threading.get_ident()
        # The last repeated call, and the number of calls that its node has repeated before it.
        self._last_repeat: Repeat | None = None
        self._num_repeated = 0

    def __call__(self, call: GateCall) -> GateCall:
        num_tokens = call.logits.shape[0]
        if call.chosen is not call.live:
            raise ConfigError(
                f"replay_routes: layer {self.index} is called with topk_ids "
                f"({self._gate.calls.names.where}); leave them out inside the context"
            )
        repeats = call.repeats
        start = self._take(num_tokens) if repeats is None else self._start_of(repeats, num_tokens)
        ids = self._routes[start : start + num_tokens].long()
        if repeats is None:
            self._count(ids, call.live_topk_ids)
        return choose(call, ids, has_live=self._has_live)

    def end(self) -> None:
        """Refuse to repeat the calls from now on."""
        if self._calls:
            self._gate.ended.append(range(self._begin_number, call_number() + 1))

    def check_end(self) -> None:
        if self._end != len(self._routes):
            raise ShapeError(
                f"replay_routes: routes have {len(self._routes)} tokens, but the calls of layer "
                f"{self.index} took {self._end} ({self._gate.calls.names.where}); pass the routes "
                "of the tokens that the model gets inside the context"
            )

    def _take(self, num_tokens: int) -> int:
        start, self._end = self._end, self._end + num_tokens
        if self._end > len(self._routes):
            raise ShapeError(
                f"replay_routes: layer {self.index} is called with {num_tokens} tokens, but routes "
                f"have {len(self._routes) - start} left of {len(self._routes)} "
                f"({self._gate.calls.names.where}); pass a row of routes for every token, -1 where "
                "the router chooses"
            )
        if len(self._calls) > len(self.last._calls):
            raise HandleError(
                f"replay_routes: layer {self.index} is called again, but the previous forward "
                f"ended before layer {self.last.index} ({self._gate.calls.names.where}); begin a "
                "new context after a forward that failed"
            )
        if threading.get_ident() != self._thread:
            raise ConfigError(
                f"replay_routes: layer {self.index} is called in a different thread from that of "
                f"the context ({self._gate.calls.names.where}); enter a context in each thread"
            )
        number, checkpoint = call_number(), checkpoint_of_call()
        self._calls.append(
            _Call(start=start, num_tokens=num_tokens, number=number, checkpoint=checkpoint)
        )
        return start

    def _start_of(self, repeat: Repeat, num_tokens: int) -> int:
        """Return the first token of the call that backward repeats."""
        self._num_repeated = self._num_repeated + 1 if repeat == self._last_repeat else 0
        self._last_repeat = repeat
        place = self._first_of(repeat) + self._num_repeated
        is_known = repeat.node >= self._begin_number and 0 <= place < len(self._calls)
        if not is_known or self._calls[place].num_tokens != num_tokens:
            raise HandleError(
                f"replay_routes: backward repeats a call of layer {self.index} from before the "
                f"context, or with other tokens ({self._gate.calls.names.where}); call forward and "
                "backward in one context"
            )
        return self._calls[place].start

    def _first_of(self, repeat: Repeat) -> int:
        """Return the number of the first call of this layer in the checkpoint, or -1."""
        place = bisect_right(self._calls, repeat.node, key=lambda call: call.number)
        if repeat.is_reentrant:
            return place
        first = place - 1
        checkpoint = self._calls[first].checkpoint if place else None
        while checkpoint is not None and first and self._calls[first - 1].checkpoint is checkpoint:
            first -= 1
        return first

    def _count(self, ids: Tensor, live_ids: Tensor) -> None:
        is_given = ids >= 0
        differs = is_given & ~(ids[:, :, None] == live_ids[:, None, :]).any(dim=2)
        found = (is_given.any(dim=1), differs.any(dim=1), is_given, differs)
        counts = torch.stack([each.sum() for each in found])
        self.counts += counts
        if self._gate.replayed is None:
            # A tensor of inference mode could not be updated outside it.
            with torch.inference_mode(False):
                self._gate.replayed = torch.zeros(4, dtype=torch.int64, device=counts.device)
        self._gate.replayed += counts


def _gates_by_layer(
    caller: str, model: nn.Module, layers: Mapping[str, int] | None
) -> tuple[dict[int, Gate], int | None]:
    """Return the gates of a model by the index of their layer, and the number of its layers.

    The number is None for a pipeline stage, which has only some of them.
    """
    gates = named_gates(model)
    if not gates:
        raise ConfigError(
            f"{caller}: {type(model).__name__} has no MoE layer of epcomm; build it with "
            "ExpertParallelMoE, or load it with ep_implementation='epcomm'"
        )
    indices = {n: _index_in(n) if layers is None else layers.get(n) for n in gates}
    is_alone = layers is None and list(indices.values()) == [None]
    if is_alone:
        indices = dict.fromkeys(indices, 0)
    is_bad = layers is not None and (layers.keys() - gates.keys() or min(layers.values()) < 0)
    if is_bad or None in indices.values() or len(set(indices.values())) < len(gates):
        raise ConfigError(
            f"{caller}: the layers of the blocks are {dict(indices if layers is None else layers)}"
            f", expected a separate index for each of {list(gates)}; pass layers={{name: index}}"
        )
    found = {index: gates[name] for name, index in indices.items() if index is not None}
    most = max(gate.num_experts for gate in gates.values())
    if most > _MAX_EXPERTS:
        expected = f"expected at most {_MAX_EXPERTS}, whose ids fit int16"
        raise ConfigError(f"{caller}: a layer has {most} experts, {expected}")
    if is_alone:
        return found, 1
    return found, _num_layers(model, gates) if layers is None else None


def _index_in(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _num_layers(model: nn.Module, names: Iterable[str]) -> int | None:
    """Return the length of the list of layers that holds all blocks; None: there is none."""
    holders = set()
    for name in names:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
        holders.add(".".join(parts[:place]))
    holder = model.get_submodule(holders.pop()) if len(holders) == 1 else None
    return len(holder) if isinstance(holder, nn.ModuleList | nn.Sequential) else None


def _problem(gates: Mapping[int, Gate], routes: object, num_layers: int | None) -> str:
    """Return what is wrong with the arguments of replay_routes() on this rank, or ''."""
    for index, gate in gates.items():
        if any(isinstance(observer, _ReplayedLayer) for observer in gate.observers):
            return "the model is inside another replay_routes(), expected none; leave it first"
        if gate.routing.custom_function is not None:
            return (
                f"layer {index} has a routing with a custom function, expected one whose weights "
                "follow from the logits; pass ids and weights to ExpertParallelExperts"
            )
    if not isinstance(routes, Tensor) or routes.dim() != 3 or routes.dtype not in _DTYPES:
        came = f"{routes.dtype} {list(routes.shape)}" if isinstance(routes, Tensor) else routes
        return f"routes is {came}, expected int16 [tokens, layers, K]"
    device = next(iter(gates.values())).calls.collectives.device
    if routes.device.type != device.type:
        return f"routes is on {routes.device}, expected {device}; call .to({str(device)!r})"
    most = num_layers or routes.shape[1]
    if not max(gates) < routes.shape[1] <= most:
        expected = num_layers or f"at least {max(gates) + 1}"
        return (
            f"routes has {routes.shape[1]} layers, expected {expected}, those of the whole model "
            "with its dense layers"
        )
    for index, gate in gates.items():
        found = _problem_of_layer(routes[:, index], gate)
        if found:
            return f"routes of layer {index}: {found}"
    return ""


def _problem_of_layer(routes: Tensor, gate: Gate) -> str:
    """Return what is wrong with the routes [tokens, K] of one layer, or ''. Host sync: yes."""
    top_k = gate.routing.top_k
    if routes.shape[1] != top_k:
        return f"{routes.shape[1]} experts a token, expected {top_k} as top_k of its routing"
    if not routes.numel():
        return ""
    low, high = (int(each) for each in routes.aminmax())
    if low < -1 or high >= gate.num_experts:
        return f"ids from {low} to {high}, expected -1 to {gate.num_experts - 1}"
    ordered = routes.sort(dim=1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        return "an expert twice for a token, expected distinct ids"
    return ""


def _agree(gates: Mapping[int, Gate], problem: str) -> None:
    """Raise the problems of all ranks on every rank. Collective: every group of the gates."""
    found: list[str] = []
    for calls in {gate.calls: None for gate in gates.values()}:
        mine = {"problem": f"{problem} ({calls.names.where})" if problem else ""}
        records = calls.agree({}, what="replay_routes", findings=mine)
        found += [str(each["problem"]) for each in records if each["problem"]]
    if found:
        raise ConfigError(f"replay_routes: {found[0]}")
