"""Observe the gates of a model: see each choice of experts, record it, or replace it.

    router -> logits, live choice -> observers of the gate -> experts

An observer takes a GateCall and returns it, or a GateCall with another choice. Observers exist only
inside context managers such as watch_gates(), record_routes() and replay_routes(); a gate without
observers costs its layer one comparison.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from epcomm.calls.order import Calls
from epcomm.errors import ConfigError, HandleError, ShapeError
from epcomm.records import TopKOutput
from epcomm.routing.reference import weigh_chosen
from epcomm.routing.spec import RoutingSpec

# Ended replays that a gate remembers, more than the micro-batches of a pipeline.
_MAX_ENDED = 256
# The attribute of a module that holds its Gate, or a function that returns it.
_ATTRIBUTE = "epcomm_gate"


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """The point of backward that repeats calls for activation checkpointing.

    task: the number of the backward.
    node: the number of the node that needs the calls; see call_number().
    is_reentrant: it is the node of a reentrant checkpoint, which is made before its calls; else it
        is a node of the checkpoint, made after them.
    """

    task: int
    node: int
    is_reentrant: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class GateCall:
    """The input and the choice of a gate in one call.

    logits: [T, E], with their graph.
    live: the choice of the router.   chosen: the choice that the experts get; ids are logical.
    routing, correction_bias: of the block; the bias is [E] or None.
    repeats: where backward is, if it repeats an earlier call for activation checkpointing.
    """

    logits: Tensor
    live: TopKOutput
    chosen: TopKOutput
    routing: RoutingSpec
    correction_bias: Tensor | None
    repeats: Repeat | None

    @property
    def topk_ids(self) -> Tensor:
        """The experts that compute the tokens, [T, K], int64."""
        return self.chosen.topk_ids

    @property
    def live_topk_ids(self) -> Tensor:
        """The experts that the router chose, [T, K], int64."""
        return self.live.topk_ids


GateObserver = Callable[[GateCall], GateCall]


class Gate:
    """The gate of one layer, as observers see it.

    observers: called in this order in each call of the layer.
    ended: ranges of call_number() from the begin to the end of each replay_routes() that has ended.
    replayed: totals of all replays, [4], int64, on the device, see ReplayCounts; None before.
    """

    def __init__(self, routing: RoutingSpec, num_experts: int, calls: Calls) -> None:
        """Describe the gate of a layer with E logical experts on the group of `calls`. Local."""
        self.routing, self.num_experts, self.calls = routing, num_experts, calls
        self.observers: tuple[GateObserver, ...] = ()
        self.ended: deque[range] = deque(maxlen=_MAX_ENDED)
        self.replayed: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return the gate of a copied layer, which shares the group and has no observers."""
        return type(self)(self.routing, self.num_experts, self.calls)

    def observe(
        self, logits: Tensor, live: TopKOutput, bias: Tensor | None, topk_ids: Tensor | None = None
    ) -> TopKOutput:
        """Call the observers, and return the choice for the experts.

        topk_ids: the experts that the caller of the layer passed, see choose(); None: none.

        Local.   Host sync: none.
        Raises:
            HandleError: backward repeats a call of an ended replay_routes().
            ShapeError, ConfigError: topk_ids of another shape or dtype, or of a routing whose
                weights do not follow from logits.
        """
        repeats, task = None, torch._C._current_graph_task_id()
        if task != -1:
            node = torch._C._current_autograd_node()
            is_reentrant = node.name() == "CheckpointFunctionBackward"
            repeats = Repeat(task=task, node=node._sequence_nr(), is_reentrant=is_reentrant)
        call = GateCall(
            logits=logits,
            live=live,
            chosen=live,
            routing=self.routing,
            correction_bias=None if bias is None else bias.reshape(-1),
            repeats=repeats,
        )
        if topk_ids is not None:
            call = choose(call, self._checked_ids(topk_ids, logits.shape[0]), has_live=True)
        for observe in self.observers:
            call = observe(call)
        has_ended = repeats is not None and any(repeats.node in each for each in self.ended)
        if has_ended and call.chosen is live:
            raise HandleError(
                "replay_routes: backward repeats a call whose context has ended "
                f"({self.calls.names.where}); call backward inside the context"
            )
        return call.chosen

    def _checked_ids(self, topk_ids: Tensor, num_tokens: int) -> Tensor:
        """Return the ids that the caller of a layer passed, [T, K], int64."""
        where, shape = self.calls.names.where, [num_tokens, self.routing.top_k]
        if self.routing.custom_function is not None:
            raise ConfigError(
                "ExpertParallelMoE: topk_ids is given, expected None, because the weights of a "
                f"custom routing do not follow from logits ({where}); call the experts of the block"
            )
        flat = topk_ids.reshape(-1, topk_ids.shape[-1]) if topk_ids.dim() > 2 else topk_ids
        if list(flat.shape) != shape or flat.is_floating_point() or flat.dtype is torch.bool:
            raise ShapeError(
                f"ExpertParallelMoE: topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}, expected "
                f"integers {shape} ({where}); pass K ids for each token, -1 where the router "
                "chooses"
            )
        return flat.long()


def call_number() -> int:
    """Return the position in autograd's sequence: the number of the next node that it makes."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def checkpoint_of_call() -> object | None:
    """Return an object that the calls inside one checkpoint share; None outside, or if reentrant.

    Checkpoints that are not reentrant install separate hooks for tensors that forward saves.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    attributes = None if hooks is None else getattr(hooks[0], "__dict__", None)
    return None if attributes is None else attributes.setdefault("epcomm_checkpoint", object())


def attach_gate(module: nn.Module, gate: Gate | Callable[[nn.Module], Gate]) -> None:
    """Make `gate` known to named_gates() as that of a layer.

    gate: the gate of the block `module`; or a function for its child `module` that takes the block.
    """
    setattr(module, _ATTRIBUTE, gate)


def named_gates(model: nn.Module) -> dict[str, Gate]:
    """Return the gates of the MoE blocks of a model, by the names of the blocks, in their order.

    Blocks are ExpertParallelMoE, and those of models that transformers loaded with epcomm.

    Local.
    Raises:
        ConfigError: the router of a block of transformers cannot be read.
    """
    found: dict[str, Gate] = {}
    for name, module in model.named_modules():
        # Do not use getattr(), because wrappers of modules have the attributes of the wrapped
        # module.
        gate = vars(module).get(_ATTRIBUTE)
        if isinstance(gate, Gate):
            found[name] = gate
        elif gate is not None:
            block = name.rpartition(".")[0]
            found[block] = gate(model.get_submodule(block))
    return found


def replayed_gates(model: nn.Module) -> dict[str, Gate]:
    """Return the gates that have replayed routes, by the names of their blocks. Local."""
    found = {name: vars(module).get(_ATTRIBUTE) for name, module in model.named_modules()}
    return {n: g for n, g in found.items() if isinstance(g, Gate) and g.replayed is not None}


@contextmanager
def observed(gates: Sequence[tuple[Gate, GateObserver]], *, first: bool = False) -> Iterator[None]:
    """Add an observer to each gate inside the context. Local.

    first: put it before the existing observers, which see its choice.
    """
    for gate, observer in gates:
        own = (observer,)
        gate.observers = own + gate.observers if first else gate.observers + own
    try:
        yield
    finally:
        for gate, observer in gates:
            gate.observers = tuple(each for each in gate.observers if each is not observer)


@contextmanager
def unobserved(gates: Iterable[Gate]) -> Iterator[None]:
    """Remove the observers of the gates inside the context. Local."""
    before = {gate: gate.observers for gate in gates}
    for gate in before:
        gate.observers = ()
    try:
        yield
    finally:
        for gate, observers in before.items():
            gate.observers = observers


@contextmanager
def watch_gates(model: nn.Module) -> Iterator[list[GateCall]]:
    """Collect the calls of the gates of all MoE blocks of `model`, in their order.

    The logits have their graph, and hold its memory as long as the list lives. Calls that backward
    repeats are left out, and so are blocks in idle_step(), whose gates do not run. Under reentrant
    checkpointing logits have no gradients: pass use_reentrant=False.

    Local.   Host sync: none.
    """
    found: list[GateCall] = []

    def watch(call: GateCall) -> GateCall:
        if call.repeats is None:
            found.append(call)
        return call

    with observed([(gate, watch) for gate in named_gates(model).values()]):
        yield found


def choose(call: GateCall, topk_ids: Tensor, *, has_live: bool) -> GateCall:
    """Replace the choice of a call by given experts, whose weights follow from the live logits.

    topk_ids: [T, K], int64, logical experts, distinct in a row; -1 entries take the best live
        experts that the row does not name.   has_live: some entries are -1.

    Returns: the call with the choice; its weights are differentiable in the logits as those of
        route(). Rows of -1 alone keep the live weights.

    Local.   Host sync: none.
    """
    ids = _with_live(topk_ids, call.live.topk_ids) if has_live else topk_ids
    weights = weigh_chosen(
        call.logits,
        call.routing,
        correction_bias=call.correction_bias,
        # Dispatch reports ids out of range on all ranks; an index error here would not.
        topk_ids=ids.clamp(0, call.logits.shape[1] - 1),
    )
    if has_live:
        is_live = (topk_ids < 0).all(dim=1, keepdim=True)
        weights = torch.where(is_live, call.live.topk_weights.to(weights.dtype), weights)
    return replace(call, chosen=TopKOutput(topk_ids=ids, topk_weights=weights))


def _with_live(topk_ids: Tensor, live_ids: Tensor) -> Tensor:
    """Replace entries of -1 by the best live experts that the row does not name.

    Example: [[5, -1, -1]] with live [[2, 5, 0]] gives [[5, 2, 0]].
    """
    is_named = (live_ids[:, :, None] == topk_ids[:, None, :]).any(dim=2)
    others = live_ids.gather(1, torch.argsort(is_named.int(), dim=1, stable=True))
    is_open = topk_ids < 0
    number = (is_open.cumsum(dim=1) - 1).clamp(min=0)
    return torch.where(is_open, others.gather(1, number), topk_ids)
