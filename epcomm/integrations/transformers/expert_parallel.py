"""Register epcomm as an expert-parallel implementation of transformers, for unedited models.

    registration = register_expert_parallel(EPConfig())
    layout = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="epcomm")
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=layout)

The path of a token: the model's own router chooses experts and weights, dispatch sends one copy to
each rank that owns one of them, the slots are packed by expert, the model's own experts compute
them, one row per slot, and combine returns the sum. So every kind of experts in transformers is
supported, with its own kernels, biases and activations.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from epcomm.blocks import correction_bias_of
from epcomm.buffers.traffic import BufferTraffic
from epcomm.config import EPConfig, Mode, Router
from epcomm.dispatchers.checks import unready_error
from epcomm.errors import ConfigError, EPError, HandleError
from epcomm.experts import PhaseDispatchers, count_batch
from epcomm.group import EPGroup
from epcomm.integrations.transformers.reading import read_routing
from epcomm.layers import named_expert_parallel_layers, put_in_front
from epcomm.ops.slots import expert_of_slot, pack
from epcomm.placement.recorder import load_table
from epcomm.planning.plan import plan
from epcomm.platforms.tracing import ranged, untraced
from epcomm.records import RowsDispatchOutput, TopKOutput
from epcomm.routing.choose import count_load
from epcomm.routing.gates import Gate, attach_gate
from epcomm.spec import MoESpec
from epcomm.stats import EPStats, LayerCounter
from epcomm.types import WeightsAppliedBy

# The forward of experts: hidden_states [N, H], top_k_index [N, K], top_k_weights [N, K] -> [N, H].
ExpertsCall = Callable[[Tensor, Tensor, Tensor], Tensor]


def register_expert_parallel(
    config: EPConfig | None = None, *, name: str = "epcomm"
) -> "ExpertParallelRegistration":
    """Register epcomm in transformers under `name`, for DistributedConfig.ep_implementation.

    Args:
        config: the user's choices, for every model loaded afterwards under this name. Where the
            ranks of an expert group hold the same batch, modes auto and standard compute it once as
            replicated tokens; other modes, and smaller groups with one batch, share it in slices.
        name: a later registration of the same name replaces this one for models loaded after it.

    Local; imports transformers.
    Raises:
        ConfigError: config.router is set, but the model's own router is used; or
            config.redundant_experts is set, but transformers cuts, loads and saves one copy of each
            expert in the order of their ids; or config.sum_groups is set, but the bits of the
            model's own router and experts depend on the number of tokens.
    """
    config = config or EPConfig()
    if config.router is not Router.AUTO:
        raise ConfigError(
            f"register_expert_parallel: router is {config.router!s}, expected auto, because the "
            "model's own router chooses the experts; leave EPConfig.router out"
        )
    reasons = {
        "redundant_experts": "transformers cuts, loads and saves one copy of each expert in the "
        "order of their ids",
        "sum_groups": "the bits of the model's own router and experts depend on the number of "
        "tokens",
    }
    for field, reason in reasons.items():
        if (value := getattr(config, field)) is not None:
            raise ConfigError(
                f"register_expert_parallel: {field} is {value}, expected None, because {reason}; "
                "load the model whole, or on meta, and replace each block by "
                "ExpertParallelMoE.from_transformers(block, group, config)"
            )
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

    registration = ExpertParallelRegistration(config)

    class EpcommEP(EPImplementation):
        """The expert parallelism of transformers for one layer, computed through epcomm."""

        def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.bridge = ExpertsBridge(
                registration,
                experts,
                ep_mesh=ep_mesh,
                batch_mesh=tp_mesh,
                shares_batch=self.shares_batch,
            )

        def __call__(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            return self.bridge(hidden_states, top_k_index, top_k_weights)

    EPImplementationInterface.register(name, EpcommEP)
    return registration


class ExpertParallelRegistration:
    """The configuration and groups of all models that are loaded under one name."""

    def __init__(self, config: EPConfig) -> None:
        self.config = config
        self._groups: dict[ProcessGroup, EPGroup] = {}
        self.bridges: list[ExpertsBridge] = []
        self._is_closed = False

    def check(self) -> None:
        """Raise the faults recorded on the device. Local; host sync; see Dispatcher.check."""
        for bridge in self.bridges:
            bridge.check()

    def explain(self) -> str:
        """Return the plans of all kinds of layers that have run, and their reasons, as text."""
        return "\n\n".join(dict.fromkeys(text for b in self.bridges for text in b.plans))

    def load_tables(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tokens that chose each expert, [N, E], int64, by layer, for LoadRecorder.

        Tokens are counted if EPConfig.record_load is set, on the device, but not in calls that
        backward repeats. Ranks that hold one batch as replicated tokens all count it.

        Local.   Host sync: none.
        Raises:
            ConfigError: EPConfig.record_load is not set, or the model has no layer of this
                registration.
        """
        layers = named_expert_parallel_layers(model).items()
        bridges = {n: e for n, e in layers if isinstance(e, ExpertsBridge) and e in self.bridges}
        tables = {n: e.load_table for n, e in bridges.items() if e.load_table is not None}
        if not tables:
            why = "record_load is False" if bridges else "the model has no layer of it"
            raise ConfigError(
                f"ExpertParallelRegistration.load_tables: {why}; call register_expert_parallel "
                "with EPConfig(record_load=True) before the model is loaded"
            )
        return tables

    def close(self) -> None:
        """Close the groups; layers loaded under this name raise from then on. Idempotent."""
        self._is_closed = True
        for group in self._groups.values():
            group.close()

    def group_of(self, mesh: DeviceMesh) -> EPGroup:
        """Return the EPGroup over a mesh, one for all layers. Local."""
        if self._is_closed:
            raise HandleError(
                "epcomm: this registration is closed; call register_expert_parallel again and load "
                "the model again"
            )
        ranks = mesh.get_group()
        if ranks not in self._groups:
            self._groups[ranks] = EPGroup(ranks)
        return self._groups[ranks]


class ExpertsBridge:
    """Sends the tokens of a batch to the experts of one layer, and returns the results.

    plans: the text of each plan, one for each shape of the calls.
    load_table: see ExpertParallelRegistration.load_tables(); None: nothing is counted.
    """

    idles_alone = False

    def __init__(
        self,
        registration: ExpertParallelRegistration,
        experts: nn.Module,
        *,
        ep_mesh: DeviceMesh,
        batch_mesh: DeviceMesh,
        shares_batch: bool,
    ) -> None:
        """Take the forward of a layer's experts, which computes local expert ids.

        ep_mesh: ranks that share the experts.   batch_mesh: ranks that hold the same batch.
        shares_batch: the ranks that share the experts hold the same batch.

        Local: dispatchers are opened by the first call.
        """
        self._registration = registration
        self._experts = experts
        self._call_experts: ExpertsCall = experts.forward
        self._num_local_experts = int(experts.num_experts)  # type: ignore[arg-type]
        self._num_experts = self._num_local_experts * ep_mesh.size()
        self._ep_mesh = ep_mesh
        mode = registration.config.mode
        self._is_replicated = shares_batch and mode in (Mode.AUTO, Mode.STANDARD)
        has_slices = batch_mesh.size() > 1 and not self._is_replicated
        self._batch_mesh = batch_mesh if has_slices else None
        self._phases: dict[MoESpec, PhaseDispatchers] = {}
        self.plans: list[str] = []
        self._counter: LayerCounter | None = None
        self.load_table: Tensor | None = None
        if registration.config.record_load:
            self.load_table = load_table(self._num_experts, self.group.device)
        self.is_decoding = False
        self._gate: Gate | None = None
        registration.bridges.append(self)
        put_in_front(experts, self)
        attach_gate(experts, self.gate_of)

    @untraced
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of this rank's tokens [T, H] with global ids [T, K], to [T, H].

        Collective: over the expert group, forward and backward; T may differ and be 0.
        """
        num_tokens = hidden_states.shape[0]
        if self._batch_mesh is not None:
            hidden_states, top_k_index, top_k_weights = (
                _slice_of(tensor, self._batch_mesh)
                for tensor in (hidden_states, top_k_index, top_k_weights)
            )
        topk = TopKOutput(topk_ids=top_k_index.long(), topk_weights=top_k_weights)
        y = self._compute(hidden_states.contiguous(), topk)
        return y if self._batch_mesh is None else _gather_slices(y, self._batch_mesh, num_tokens)

    def gate_of(self, block: nn.Module) -> Gate:
        """Return the gate of the block whose experts these are; the first call reads the block.

        Local.
        Raises:
            ConfigError: the router cannot be read, see ExpertParallelMoE.from_transformers().
        """
        if self._gate is None:
            layout, routing = read_routing(block, self._num_experts)
            self._gate = gate = Gate(routing, self._num_experts, self.group.calls)

            def observe(_: nn.Module, inputs: tuple[Tensor, ...], outputs: object) -> object:
                if not (gate.observers or gate.ended):
                    return outputs
                return self._observe(gate, inputs[0], outputs, correction_bias_of(block, layout))

            block.get_submodule(layout.router).register_forward_hook(observe)
            attach_gate(block, gate)
        return self._gate

    def check(self) -> None:
        """Raise the faults recorded on the device. Local; host sync."""
        for phases in self._phases.values():
            phases.check()

    def idle(self, carry: Tensor) -> Tensor:
        """Fail, because the layer does not idle alone; see ExpertParallelLayer."""
        raise AssertionError("idle_step() runs the whole model")

    @property
    def group(self) -> EPGroup:
        """Return the ranks that share the experts."""
        return self._registration.group_of(self._ep_mesh)

    def stats(self) -> EPStats:
        """Return counts since construction. Local; host sync when counts by expert are read."""
        if self._counter is None:
            return EPStats()
        traffic = (phases.traffic() for phases in self._phases.values())
        return self._counter.snapshot(sum(traffic, BufferTraffic()))

    def _observe(
        self, gate: Gate, hidden_states: Tensor, outputs: object, bias: Tensor | None
    ) -> tuple[object, ...]:
        """Return the outputs of a router with the choice of the gate's observers."""
        logits, weights, ids, *further = outputs  # type: ignore[misc]
        live = TopKOutput(topk_ids=ids.long(), topk_weights=weights)
        try:
            chosen = gate.observe(logits, live, bias)
        except Exception as problem:
            # The other ranks call the experts meanwhile; the device may be unable to report.
            with suppress(EPError, RuntimeError):
                phases = self._phases_for(hidden_states, live)
                error = unready_error(problem, self.group.where)
                phases.of_phase(decode=self.is_decoding).refuse(error)
            raise
        weights = chosen.topk_weights.to(weights.dtype)
        return (logits, weights, chosen.topk_ids.to(ids.dtype), *further)

    def _compute(self, hidden_states: Tensor, topk: TopKOutput) -> Tensor:
        # A call that backward repeats has already been counted.
        if self.load_table is not None and torch._C._current_graph_task_id() == -1:
            count_load(topk.topk_ids, self.load_table)
        dispatcher = self._phases_for(hidden_states, topk).of_phase(decode=self.is_decoding)
        trained = {name: p.requires_grad for name, p in self._experts.named_parameters()}
        out = dispatcher.dispatch(hidden_states, topk, experts_need_grad=trained)
        y = dispatcher.combine(out.combine_input(self._run(out)))
        if self._counter is None:
            self._counter = LayerCounter(self._num_local_experts, y.device)
        count_batch(self._counter, hidden_states.shape[0], out.exchange_plan)
        return y

    @ranged("experts")
    def _run(self, out: RowsDispatchOutput) -> Tensor:
        """Compute the slots [C, H] by the model's experts, as tokens with one expert each.

        The experts multiply by the slot's router weight where combine does not apply it.
        """
        slots = pack(out.hidden_states.data, out.index)
        ids = expert_of_slot(out.index, slots.shape[0]).unsqueeze(1)
        weights = out.slot_weights
        if weights is None or out.weights_applied_by is WeightsAppliedBy.COMBINE:
            weights = slots.new_ones(slots.shape[0])
        weights = weights.unsqueeze(1).to(slots.dtype)
        if slots.shape[0]:
            return self._call_experts(slots, ids, weights).to(slots.dtype)
        # Experts without rows would not be part of the graph, and a reduction of their gradients
        # over other ranks would wait for this rank.
        dummy = slots.sum(dim=0, keepdim=True)
        no_expert = ids.new_zeros(1, 1)
        return self._call_experts(dummy, no_expert, weights.new_ones(1, 1))[:0].to(slots.dtype)

    def _phases_for(self, hidden_states: Tensor, topk: TopKOutput) -> PhaseDispatchers:
        spec = MoESpec(
            hidden_size=hidden_states.shape[-1],
            num_experts=self._num_experts,
            top_k=topk.topk_ids.shape[1],
            dtype=hidden_states.dtype,
        )
        if spec not in self._phases:
            config = self._registration.config
            if self._is_replicated:
                config = replace(config, mode=Mode.STANDARD, replicated=True)
            chosen = plan(config, spec, self.group)
            self.plans.append(chosen.explain())
            self._phases[spec] = PhaseDispatchers(self.group, spec, config, chosen)
        return self._phases[spec]


def _slice_of(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows of a tensor that all ranks of `mesh` hold; backward gathers them."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(0)]).to_local()


def _gather_slices(rows: Tensor, mesh: DeviceMesh, num_tokens: int) -> Tensor:
    """Gather the rows of all ranks of `mesh`, [num_tokens, H]; backward takes this rank's rows."""
    hidden_size = rows.shape[1]
    return DTensor.from_local(
        *(rows.contiguous(), mesh, [Shard(0)]),
        run_check=False,
        shape=torch.Size((num_tokens, hidden_size)),
        stride=(hidden_size, 1),
    ).full_tensor()
