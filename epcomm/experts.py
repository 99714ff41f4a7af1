"""ExpertParallelExperts: the routed experts of one layer, spread over the ranks of a group."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from epcomm.buffers.traffic import BufferTraffic
from epcomm.config import EPConfig, Mode
from epcomm.dispatchers import chunks
from epcomm.dispatchers.checks import NeedGrad, unready_error
from epcomm.dispatchers.dispatcher import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    Dispatcher,
    StandardDispatcher,
)
from epcomm.errors import ConfigError, EPError, PickleRefused, ShapeError
from epcomm.fuseep.path import FuseEPPath
from epcomm.group import EPGroup
from epcomm.micro_batches import Steps, interleave
from epcomm.ops.precision import check_cast
from epcomm.placement.expert_placement import ExpertPlacement
from epcomm.placement.moving import MoveMemory, stage_experts
from epcomm.placement.rebalancing import ExpertState, agree_on_move, agree_to_write, check_placement
from epcomm.placement.replicas import ReplicaTables, first_placement
from epcomm.planning.plan import plan
from epcomm.planning.plans import EPPlan, PhasePlan
from epcomm.platforms.tracing import ranged, untraced
from epcomm.records import (
    CombineInput,
    DispatchOutput,
    ExchangePlan,
    ReplicaTable,
    TopKOutput,
    empty_topk,
)
from epcomm.registry import runner_class
from epcomm.runners.base import ExpertRunner
from epcomm.sharding.data_parallel import check_fsdp, watch_ddp
from epcomm.sharding.shards import cut_share, is_expert_tensor, shard_of_rank
from epcomm.sharding.state import cut_before_load, note_share, watch_optimizers
from epcomm.spec import MoESpec
from epcomm.stats import EPStats, LayerCounter
from epcomm.weights.local_experts import LocalExperts
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights


class ExpertParallelExperts(nn.Module):
    """Holds L = P / W experts on each rank and computes y = sum over k of w_k * expert_k(x).

    Parameters have the names given at construction. If the group has a DeviceMesh they are
    ExpertTensors, [E, ...] for torch's tools and [L, ...] for this layer; otherwise [L, ...].
    docs/checkpoints.md lists what may replace them.

    num_experts: P, the physical experts of all ranks.   top_k: K.   hidden_size: H.
    num_logical_experts: E, the experts of the model, which topk_ids name.
    placement: the logical expert of each physical expert; None without config.redundant_experts:
        P = E, in order.
    """

    def __init__(
        self,
        weights: ExpertTensors,
        group: EPGroup,
        config: EPConfig | None = None,
        *,
        top_k: int,
        is_local: bool = False,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Take this rank's share of the experts and open the communication.

        Args:
            weights: the weights of all E experts, equal on all ranks; with is_local those of this
                rank's L experts. Weights on meta are not copied; call to_empty() and load a
                checkpoint. An nn.Parameter keeps its requires_grad; any other tensor of
                ExpertWeights trains, unless the chosen mode has no gradients.
            group: the ranks that share the experts.
            config: the configuration.
            top_k: K of the routing.
            is_local: `weights` has only this rank's experts; with config.redundant_experts, those
                of ExpertPlacement.spread().
            names: parameter names that differ from the ExpertWeights fields, by field.

        Collective: yes.   Host sync: yes.
        Raises:
            ConfigError: experts not divisible by ranks, unknown names, or ranks disagree.
            BackendUnavailable: the selected backend or runner does not support this layer.
        """
        super().__init__()
        config = config or EPConfig()
        num_redundant = config.redundant_experts or 0
        num_experts = (
            weights.num_experts * group.world_size
            if is_local
            else weights.num_experts + num_redundant
        )
        spec = MoESpec(
            hidden_size=weights.hidden_size,
            num_experts=num_experts,
            top_k=top_k,
            dtype=weights.dtype,
        )
        self.plan = plan(config, spec, group, weights=weights)
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, weights.hidden_size
        self.num_logical_experts = num_experts - num_redundant
        self.placement = first_placement(config, spec, group.world_size, group.where, group.hosts)
        self.path: PipelinePath | FuseEPPath = (
            FuseEPPath(group, spec, config, self.plan.prefill)
            if self.plan.prefill.mode is Mode.FUSEEP
            else PipelinePath(group, spec, config, self.plan)
        )
        self.group = group
        self.config = config
        self.is_decoding, self.idles_alone = False, True
        self._spec = spec
        # Types and shapes of the experts, on meta.
        self._kind = weights.with_tensors(
            {role: tensor.detach().to("meta") for role, tensor in weights.tensors().items()}
        )
        self._counter = LayerCounter(num_experts // group.world_size, group.device)
        self._names = {role: (names or {}).get(role, role) for role in weights.tensors()}
        self._replicas = self.placement and ReplicaTables(
            self.placement,
            rank=group.rank,
            is_replicated=config.replicated,
            device=group.device,
            sum_groups=config.sum_groups,
        )
        self.shard = shard_of_rank(
            rank=group.rank,
            world_size=group.world_size,
            num_experts=self.num_logical_experts,
            physical_to_logical=self.placement and self.placement.physical_to_logical,
        )
        self._local = LocalExperts(self._kind, tuple(self._names), self.shard, group.where)
        self._register(weights, is_local=is_local)
        self.register_load_state_dict_pre_hook(cut_before_load)
        self.register_state_dict_post_hook(note_share)

    @property
    def phases(self) -> PhaseDispatchers:
        """The dispatchers of both phases, for callers that run dispatch and combine themselves.

        Raises:
            ConfigError: mode fuseep has none.
        """
        return self._pipeline("dispatchers").phases

    @property
    def runner(self) -> ExpertRunner:
        """Return the runner that computes the experts between dispatch and combine.

        Raises:
            ConfigError: mode fuseep has none.
        """
        return self._pipeline("runner").runner

    @property
    def weights(self) -> ExpertTensors:
        """The experts of this rank, [L, ...], read from the current parameters or replacements.

        In grad mode the tensors are views, and the parameters accumulate the gradients. Local.
        """
        parameters, held, computed = self._parameters, [], set()
        for place, name in enumerate(self._names.values()):
            tensor = parameters.get(name)
            if tensor is None:
                # torch.nn.utils.parametrize replaces the parameter by a computed attribute.
                tensor = getattr(self, name)
                computed.add(place)
            held.append(tensor)
        if not self._local.knows(held):
            check_fsdp(self, shares_tokens=self.config.replicated or self.group.world_size == 1)
            self._local.read(held)
        return self._local.of(held, computed)

    def expert_parameters(self) -> Mapping[str, Tensor]:
        """Return the parameters that hold experts, by their names in this layer. Local."""
        own = dict(self.named_parameters())
        names = ((name, f"parametrizations.{name}.original") for name in self._names.values())
        return {name: own[name] for pair in names for name in pair if name in own}

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, as torch.nn.Module does.

        If an ordinary parameter with this rank's experts replaces an expert parameter, it is
        wrapped in an ExpertTensor of the same memory, so that checkpoints and optimizers know which
        experts it has. Then a warning reports that the layer holds a different object.
        """
        if param is not None and name in self._names.values() and not hasattr(param, "device_mesh"):
            held = self.as_expert_tensor(param.detach())
            if is_expert_tensor(held):
                warnings.warn(
                    f"ExpertParallelExperts: {name} was set to an ordinary parameter, and holds "
                    f"its memory as an ExpertTensor ({self.group.where}); pass the layer's "
                    "parameters() to optimizers, not the original",
                    stacklevel=3,
                )
                param = nn.Parameter(held, param.requires_grad)
        super().register_parameter(name, param)

    def as_expert_tensor(self, tensor: Tensor) -> Tensor:
        """Wrap an ordinary tensor of this rank's experts [L, ...] in an ExpertTensor. Local.

        The result shares memory. Other tensors, and all tensors in a group without a DeviceMesh,
        are returned unchanged.
        """
        mesh = self.group.mesh
        is_share = tensor.dim() > 0 and tensor.shape[0] == self.shard.num_local_experts
        if mesh is None or not is_share or hasattr(tensor, "device_mesh"):
            return tensor
        from epcomm.sharding.expert_tensor import ExpertTensor

        watch_optimizers()
        watch_ddp()
        return ExpertTensor.of_share(tensor, mesh, self.shard, weakref.ref(self.group))

    def scale_gradients(self, factor: float) -> None:
        """Scale the gradients; see scale_expert_gradients() of epcomm/training/gradients.py."""
        self._local.gradient_factor *= factor
        for name, parameter in self.expert_parameters().items():
            # For a parametrised tensor, scale only the gradient of the original experts.
            if name not in self._parameters and parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * factor)

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertParallelExperts:
        """Copy the parameters; the copy shares group, buffers and dispatchers."""
        memo |= {id(shared): shared for shared in (self.group, self.path, self.plan, self._kind)}
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(deepcopy(self.__dict__, memo))
        return other

    def __reduce__(self) -> NoReturn:
        raise PickleRefused(
            "ExpertParallelExperts: cannot be pickled, because it holds connections to other "
            f"ranks ({self.group.where}); save state_dict() by torch.distributed.checkpoint, or "
            "gather_state_dict(), and build the layer again"
        )

    @property
    def replica_table(self) -> ReplicaTable | None:
        """The replicas for the next call; None without a placement.

        For routers that choose replicas themselves; forward() chooses them for other routers.
        """
        return None if self._replicas is None else self._replicas.table

    @property
    def logical_of_physical(self) -> Tensor | None:
        """The logical expert of each physical expert, [P], int64, on the device. Local.

        None without a placement. rebalance() writes it in place.
        """
        return None if self._replicas is None else self._replicas.logical_of_physical

    @untraced
    def forward(
        self,
        x: Tensor,
        topk: TopKOutput,
        *,
        decode: bool | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> Tensor:
        """Compute the routed experts of this rank's tokens.

        Args:
            x: [T, H]; T differs by rank and may be 0.
            topk: topk_ids [T, K], int64, logical ids unless is_physical, -1 for none; topk_weights
                [T, K], float32. Other floating dtypes, also of x, are cast: docs/precision.md.
            decode: the phase, equal on all ranks; in mode auto True selects low latency. None: True
                in decode_phase(), otherwise False.
            meanwhile: local work to do while the tokens are sent; it runs only where transfers are
                asynchronous.

        Returns:
            [T, H], dtype of x.

        Collective: yes, forward and backward.   Host sync: see explain().
        After a cast to a wider dtype, such as .double(), the next call makes a new plan, on all
        ranks.
        torch.compile: one graph break.
        Raises: the errors of Dispatcher.dispatch and combine.
        """
        decode = self.is_decoding if decode is None else decode
        try:
            weights = self.weights
        except EPError as error:
            if isinstance(self.path, PipelinePath):
                self.path.phases.any_of(decode=decode).refuse(error)
            raise
        except Exception as problem:
            self.refuse(problem, decode=decode)
            raise
        if self._replicas is not None:
            topk = self._replicas.choose(topk)
        if isinstance(self.path, PipelinePath):
            return self.path.run(
                x, topk, weights, self._counter, decode=decode, meanwhile=meanwhile
            )
        out = self.path.run(x, topk, weights, decode=decode)
        self._counter.count(out.y.shape[0], out.num_rows, out.num_slots, out.num_tokens_per_expert)
        return out.y

    @untraced
    def steps(
        self,
        x: Tensor,
        topk: TopKOutput,
        *,
        decode: bool | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> Steps[Tensor]:
        """Compute forward(), and yield while tokens are sent and returned: see interleave().

        It yields where dispatch_async() begins a call, see docs/graphs.md. It does not divide the
        tokens into EPConfig.chunks. Hooks of this module, such as FSDP's, do not run.

        Args, Returns, Collective, Host sync, Raises: as forward().
        """
        decode = self.is_decoding if decode is None else decode
        path = self.path
        if not isinstance(path, PipelinePath) or not path.begins(decode=decode):
            return self.forward(x, topk, decode=decode)
        try:
            weights = self.weights
        except Exception as problem:
            self.refuse(problem, decode=decode)
            raise
        if self._replicas is not None:
            topk = self._replicas.choose(topk)
        call = path.steps(x, topk, weights, self._counter, decode=decode, meanwhile=meanwhile)
        return (yield from call)

    @untraced
    def refuse(self, problem: Exception, *, decode: bool | None = None) -> None:
        """Report a failure of this rank to the ranks that are calling this layer.

        For failures before the layer, such as in a router. docs/failures.md lists the transports
        that report them.

        Collective: yes, in place of forward().   Host sync: as forward().
        """
        decode = self.is_decoding if decode is None else decode
        if not isinstance(self.path, PipelinePath):
            # The operators of fuseep cannot report a failure.
            return
        # A device that has failed may be unable to send the report too.
        with suppress(EPError, RuntimeError):
            self.path.phases.any_of(decode=decode).refuse(unready_error(problem, self.group.where))

    def idle(self, carry: Tensor) -> Tensor:
        """Take part in a call without tokens; see ExpertParallelLayer.idle."""
        x = carry.to(self.weights.dtype).expand(0, self._spec.hidden_size)
        return self(x, empty_topk(self._spec.top_k, self.group.device)).sum().float()

    def rebalance(self, placement: ExpertPlacement, optimizer: Optimizer | None = None) -> None:
        """Move experts between ranks to another placement, between two calls.

        The layer computes the same function, but may sum in another order. Parameters and replica
        tables are written in place, so captured graphs stay valid. After a failure the experts have
        the old placement. If a rank is lost in the last agreement, all survivors raise EPTimeout
        and have the same placement, the old or the new one, which `placement` shows; they agree on
        it through the store of the process group.

        An earlier state_dict() shares the memory that is written, so it is invalid afterwards.

        Args:
            placement: the new placement, with the ranks and the logical and physical experts of the
                layer.
            optimizer: the optimizer of the parameters, whose state moves with them; None: there is
                none, or it has no state. ExpertTensors reject a step with state that did not move.

        Host memory: the rows that change on this rank, until all have arrived. Device memory:
        pieces of one parameter. explain() and `epcomm plan` show the most of both.

        Collective: yes, in the same order relative to other calls on all ranks, on the stream of
        the layer's calls.   Host sync: yes.
        Raises:
            ConfigError: the layer has no placement, the new one has other numbers, or parameters
                have gradients, are on meta or are sharded differently; on every rank, before any
                expert moves.
            EPTimeout: some ranks did not arrive; `placement` is equal on all remaining ranks.
        """
        calls, problem, state = self.group.calls, "", None
        try:
            state = self._find_movable(placement, optimizer)
        except ConfigError as error:
            problem = str(error)
        agree_on_move(
            calls,
            problem=problem,
            placement="" if problem else placement.as_json(),
            state="" if state is None else state.describe(),
        )
        assert state is not None, "agree_on_move() raises if a rank has a problem"
        assert self.placement is not None, "_find_movable() checks it"
        assert self._replicas is not None, "a layer with a placement has replica tables"
        write = stage_experts(state.pieces(), self.placement, placement, calls.collectives)
        # Nothing is written before all ranks have all their rows.
        lost = agree_to_write(calls)
        write()
        self._replicas.write(placement)
        self.placement = placement
        self.shard = replace(self.shard, physical_to_logical=placement.physical_to_logical)
        self._local.shard = self.shard
        state.belong_to(self.shard)
        self._counter.forget_experts()
        if lost is not None:
            raise lost

    def check(self) -> None:
        """Raise the faults recorded on the device; see Dispatcher.check. Local. Host sync: yes."""
        self.path.check()

    def explain(self) -> str:
        """Describe the plan, the rejected candidates with their reasons, and the placement."""
        chosen = self.path.chosen if isinstance(self.path, PipelinePath) else self.plan
        lines = [chosen.explain()]
        if self.config.chunks is not None:
            path, how = self.path, "not used, because calls are not begun here"
            if isinstance(path, PipelinePath) and path.phases.any_of(decode=False).is_asynchronous:
                how = str(self.config.chunks)
            lines.append(f"chunks: {how}")
        if reason := self.group.calls.cannot_begin:
            lines.append(f"begun calls: made in wait(), because {reason}")
        if self.placement is None:
            return "\n".join(lines)
        memory = MoveMemory.of(
            self._kind.tensors(), num_physical=self.num_experts, num_ranks=self.group.world_size
        )
        limit = (
            f"moved in pieces: at most {memory.device_bytes} B on the device and "
            f"{memory.host_bytes} B on the host, and as much for each state of an optimizer there"
        )
        return "\n".join((*lines, self.placement.describe(), limit))

    def stats(self) -> EPStats:
        """Return counts since construction. Local. Host sync: when counts by expert are read."""
        return self._counter.snapshot(self.path.traffic())

    def extra_repr(self) -> str:
        return f"{self._kind.format.activation.value}, {self.group.where}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        check_cast(self._kind, fn, self.group.where)
        return super()._apply(fn, recurse)

    def _register(self, weights: ExpertTensors, *, is_local: bool) -> None:
        trains = isinstance(weights, ExpertWeights) and self.plan.prefill.caps.trainable
        for role, tensor in weights.tensors().items():
            part = tensor.detach() if is_local else cut_share(tensor.detach(), self.shard)
            # Kernels and gather_state_dict() need contiguous tensors, and the whole may be freed.
            share = part.clone(memory_format=torch.contiguous_format)
            is_decided = isinstance(tensor, nn.Parameter)
            requires_grad = tensor.requires_grad if is_decided else tensor.requires_grad or trains
            parameter = nn.Parameter(self.as_expert_tensor(share), requires_grad=requires_grad)
            self.register_parameter(self._names[role], parameter)

    def _find_movable(self, placement: ExpertPlacement, optimizer: Optimizer | None) -> ExpertState:
        if self.placement is None:
            raise ConfigError(
                f"rebalance: the layer has no placement ({self.group.where}); set "
                "EPConfig.redundant_experts, to 0 for one copy of each expert"
            )
        check_placement(self.placement, placement, self.group.where)
        if placement.prefers_near and self.config.replicated:
            raise ConfigError(
                "rebalance: prefers_near of the placement is True, expected False if all ranks "
                f"have the same tokens ({self.group.where}), because they must choose the same "
                "replicas; set it to False"
            )
        parameters = self.expert_parameters()
        if set(parameters) != set(self._names.values()):
            raise ConfigError(
                f"rebalance: the layer computes with {sorted(parameters)}, expected its own "
                f"{sorted(self._names.values())} ({self.group.where}); move experts before they "
                "are parametrised"
            )
        return ExpertState.of(parameters, optimizer, self.shard.num_local_experts)

    def _pipeline(self, what: str) -> PipelinePath:
        if not isinstance(self.path, PipelinePath):
            raise ConfigError(
                f"ExpertParallelExperts: mode fuseep has no {what} ({self.group.where}); its "
                "operator dispatches, computes and combines in one call, layer.path.run()"
            )
        return self.path


class PipelinePath:
    """Runs a layer by dispatch, experts and combine: all modes except fuseep."""

    def __init__(self, group: EPGroup, spec: MoESpec, config: EPConfig, chosen: EPPlan) -> None:
        """Open the buffers of `chosen`, a plan made with the same arguments and with weights.

        Collective: yes.   Host sync: yes.
        """
        self._group, self._config = group, config
        # Without EPConfig.dispatch_dtype, rows are sent in the dtype of the experts.
        self._may_widen = config.dispatch_dtype is None
        self._open(spec, chosen)

    def run(
        self,
        x: Tensor,
        topk: TopKOutput,
        weights: ExpertTensors,
        counter: LayerCounter,
        *,
        decode: bool,
        meanwhile: Callable[[], object] | None = None,
    ) -> Tensor:
        """Dispatch, compute, combine and count one batch; see ExpertParallelExperts.forward."""
        chunks, transfers = self._config.chunks, self._group.calls.transfers
        number = 1 if decode else chunks or 1
        # The cheapest tests first: most calls have no work to do while tokens are sent.
        may_overlap = (
            transfers is not None
            and (transfers.are_free or chunks is not None)
            and (
                number > 1
                or meanwhile is not None
                or (torch.is_grad_enabled() and weights.requires_grad)
            )
        )
        if may_overlap and self.phases.any_of(decode=decode).is_asynchronous:
            call = self.steps(
                *(x, topk, weights, counter), decode=decode, number=number, meanwhile=meanwhile
            )
            return interleave(call)[0]
        dispatcher, trained = self._enter(weights, decode=decode)
        out = dispatcher.dispatch(x, topk, experts_need_grad=trained)
        try:
            results = self._run_experts(out, weights)
        except Exception as problem:
            dispatcher.refuse_results(problem, out.handle)
            raise
        y = dispatcher.combine(results)
        # Use the rows of y, because x is unchecked if a static buffer has recorded a fault.
        count_batch(counter, y.shape[0], out.handle.exchange_plan)
        return y

    def steps(
        self,
        x: Tensor,
        topk: TopKOutput,
        weights: ExpertTensors,
        counter: LayerCounter,
        *,
        decode: bool,
        number: int = 1,
        meanwhile: Callable[[], object] | None = None,
    ) -> Steps[Tensor]:
        """Run one batch in a number of chunks, and yield while they are sent; only if begins()."""
        dispatcher, trained = self._enter(weights, decode=decode)
        transfers = self._group.calls.transfers
        y, plans = yield from chunks.run(
            *(dispatcher, x, topk, weights, self._run_experts),
            number=number,
            joins=transfers is not None and not transfers.are_free,
            experts_need_grad=trained,
            meanwhile=meanwhile,
        )
        count_batch(counter, y.shape[0], *plans)
        return y

    def begins(self, *, decode: bool) -> bool:
        """Return whether dispatch_async() begins a call, on a thread or for a receive hook."""
        dispatcher = self.phases.any_of(decode=decode)
        return dispatcher.is_asynchronous or dispatcher.plan.caps.has_receive_hook

    def _enter(self, weights: ExpertTensors, *, decode: bool) -> tuple[AnyDispatcher, NeedGrad]:
        """Return the dispatcher of a call, and which experts need gradients.

        Collective: only if it makes a new plan, or if it reports an error.
        """
        dtype, planned = weights.dtype, self._spec.dtype
        if dtype is not planned and dtype.itemsize > planned.itemsize and self._may_widen:
            # All ranks have cast their experts, so all make the new plan.
            spec = replace(self._spec, dtype=dtype)
            self._open(spec, plan(self._config, spec, self._group, weights=weights))
        try:
            dispatcher = self.phases.of_phase(decode=decode)
        except ConfigError as error:
            self.phases.any_of(decode=decode).refuse(error)
        tensors = weights.tensors()
        device = self._group.device
        for name, tensor in tensors.items():
            if tensor.device != device:
                misplaced = ShapeError(
                    f"ExpertParallelExperts: {name} is on {tensor.device}, expected {device} "
                    f"({self._group.where}); load the experts, or call .to({str(device)!r})"
                )
                dispatcher.refuse(misplaced)
        trained: NeedGrad = False
        if torch.is_grad_enabled():
            trained = {name: tensor.requires_grad for name, tensor in tensors.items()}
        return dispatcher, trained

    @ranged("experts")
    def _run_experts(self, out: DispatchOutput, weights: ExpertTensors) -> CombineInput:
        return self.runner.run(out, weights)

    def _open(self, spec: MoESpec, chosen: EPPlan) -> None:
        self.phases = PhaseDispatchers(self._group, spec, self._config, chosen)
        assert chosen.runner is not None, "plan() was given the weights"
        self.runner = runner_class(chosen.runner)(int8_profile=chosen.prefill.int8_profile)
        self.runner.product_sms = chosen.product_sms
        # Set last, so that after an error above the next call plans again.
        self._spec, self.chosen = spec, chosen

    def check(self) -> None:
        """Raise the faults recorded on the device; see Dispatcher.check. Local. Host sync: yes."""
        self.phases.check()

    def traffic(self) -> BufferTraffic:
        """Return the bytes sent by the buffers of both phases."""
        return self.phases.traffic()


def count_batch(counter: LayerCounter, num_tokens: int, *plans: ExchangePlan) -> None:
    """Count a batch of T tokens from the exchange plans of its chunks. Local. Host sync: none."""
    num_rows, num_slots, counts = 0, 0, None
    for each in plans:
        index, num_rows = each.index, num_rows + each.num_rows
        if index.host_num_tokens_per_expert is not None:
            num_slots += sum(index.host_num_tokens_per_expert)
        else:
            num_slots += each.num_rows if index.row_of_slot is None else index.row_of_slot.shape[0]
        per_expert = index.num_tokens_per_expert
        counts = per_expert if counts is None else counts + per_expert
    assert counts is not None, "a batch has at least one chunk"
    counter.count(num_tokens, num_rows, num_slots, counts)


# A dispatcher of either layout; the plan pairs it with a runner that reads its layout.
AnyDispatcher = Dispatcher[Any, Any]


_DISPATCHERS: Mapping[Mode, type[AnyDispatcher]] = {
    Mode.NORMAL: DeepEPNormalDispatcher,
    Mode.LOW_LATENCY: DeepEPLowLatencyDispatcher,
    Mode.STANDARD: StandardDispatcher,
}


class PhaseDispatchers:
    """The dispatcher for prefill and training, and the one for decode; they may be the same."""

    def __init__(self, group: EPGroup, spec: MoESpec, config: EPConfig, chosen: EPPlan) -> None:
        """Open the dispatchers of `chosen`, a plan made with the same group, spec and config.

        Collective: yes.   Host sync: yes.
        """

        def open_phase(phase: PhasePlan) -> AnyDispatcher:
            return _DISPATCHERS[phase.mode](group, spec, config, chosen=phase)

        self._where = group.where
        self._decode_lacks = chosen.decode_lacks
        self.prefill = open_phase(chosen.prefill)
        self.decode: AnyDispatcher | None = self.prefill
        if chosen.decode is not chosen.prefill:
            self.decode = None if chosen.decode is None else open_phase(chosen.decode)

    def of_phase(self, *, decode: bool) -> AnyDispatcher:
        """Return the dispatcher of a phase.

        Raises:
            ConfigError: no backend serves decode; the message has the remedy.
        """
        if not decode:
            return self.prefill
        if self.decode is None:
            raise ConfigError(
                f"ExpertParallelExperts: decode=True but there is no low latency "
                f"({self._where}); {self._decode_lacks}"
            )
        return self.decode

    def any_of(self, *, decode: bool) -> AnyDispatcher:
        return self.decode or self.prefill if decode else self.prefill

    def check(self) -> None:
        """Raise the faults recorded on the device; see Dispatcher.check. Local. Host sync: yes."""
        for dispatcher in self._all():
            dispatcher.check()

    def traffic(self) -> BufferTraffic:
        """Return the bytes sent by the buffers of both phases."""
        return sum((dispatcher.traffic() for dispatcher in self._all()), BufferTraffic())

    def _all(self) -> list[AnyDispatcher]:
        is_one = self.decode is None or self.decode is self.prefill
        return [self.prefill] if is_one else [self.prefill, *filter(None, [self.decode])]
