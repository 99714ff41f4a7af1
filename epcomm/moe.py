"""ExpertParallelMoE: a whole MoE block, router, routed experts over the ranks, shared experts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from epcomm.blocks import BlockLayout, RouterInput, chosen_by_router, correction_bias_of, find_part
from epcomm.config import EPConfig, Router
from epcomm.errors import ConfigError, ShapeError
from epcomm.experts import ExpertParallelExperts
from epcomm.group import EPGroup
from epcomm.micro_batches import Steps
from epcomm.ops.token_blocks import in_blocks
from epcomm.placement.recorder import load_table, loads_of_ranks
from epcomm.platforms.tracing import ranged
from epcomm.records import ReplicaTable, TopKOutput
from epcomm.registry import BLOCK_READER
from epcomm.routing import RoutingSpec
from epcomm.routing.choose import choose_router, count_load
from epcomm.routing.gates import Gate, attach_gate
from epcomm.stats import EPStats


class ExpertParallelMoE(nn.Module):
    """Routes, computes the routed experts of all ranks' tokens, and adds the shared experts.

    Parts keep their names in the block, so state_dict names do too.
    """

    def __init__(
        self,
        *,
        routing: RoutingSpec,
        experts: ExpertParallelExperts,
        parts: Mapping[str, nn.Module | Tensor],
        layout: BlockLayout = BlockLayout(),
    ) -> None:
        """Construct a block from its parts.

        Args:
            routing: logits to experts and weights.
            experts: the routed experts; their configuration selects the router.
            parts: everything else by name: children, parameters, and other tensors as buffers.
            layout: what each part does.

        Local.
        Raises:
            ConfigError: the layout names a part that is missing, or the routing is impossible
                among these experts, or chooses another number a token than they were made for.
            BackendUnavailable: the router asked for is not on the device of the group.
        """
        super().__init__()
        if routing.top_k != experts.top_k:
            raise ConfigError(
                f"ExpertParallelMoE: top_k of routing is {routing.top_k}, expected {experts.top_k} "
                f"as top_k of experts ({experts.group.where}); make them equal"
            )
        self._layout = layout
        self._router = choose_router(
            Router(experts.config.router),
            routing,
            num_experts=experts.num_logical_experts,
            device=experts.group.device,
            where=experts.group.where,
        )
        self._block_tokens = _check_blocks(experts)
        # The table is made here, because one made in a captured call would be zeroed in every
        # replay.
        self._load_table: Tensor | None = None
        if experts.config.record_load:
            self._load_table = load_table(experts.num_logical_experts, experts.group.device)
        self._gate = Gate(routing, experts.num_logical_experts, experts.group.calls)
        attach_gate(self, self._gate)
        self.experts = experts
        # An adapter may replace the experts later, and has no hidden_size.
        self._hidden_size = experts.hidden_size
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)
        for field, name in layout.names().items():
            find_part(self, field, name)

    @classmethod
    def from_transformers(
        cls, block: nn.Module, group: EPGroup, config: EPConfig | None = None
    ) -> "ExpertParallelMoE":
        """Spread the experts of a transformers MoE block over the group.

        The block is read by its structure, whatever its class, and a copy of it confirms on a few
        random tokens what was read; docs/blocks.md describes how.

        Args:
            block: a whole block, equal on all ranks; its experts are copied, the rest is reused.
                On the meta device it gives a layer of this rank's shares on meta.
            group: the ranks that share the experts.
            config: the user's choices.

        Collective: yes.   Host sync: yes.
        Raises:
            ConfigError: an unknown part or attribute (the message names it), or a block whose
                results differ from what its parts compute; on all ranks.
        """
        return resolve_name(BLOCK_READER)(block, group, config)

    @property
    def routing(self) -> RoutingSpec:
        """The routing of logits to experts and weights, as given at construction."""
        return self._router.spec

    @property
    def load_table(self) -> Tensor:
        """The tokens that chose each expert, [N, E], int64, on the device, for LoadRecorder.

        The rows add up to the load. forward() counts, in device graphs too, but not the calls that
        backward repeats; route() does not.

        Raises:
            ConfigError: EPConfig.record_load is not set.
        """
        if self._load_table is None:
            raise ConfigError(
                "ExpertParallelMoE: load_table is asked for, but record_load is False "
                f"({self.experts.group.where}); set EPConfig(record_load=True)"
            )
        return self._load_table

    def route(self, x: Tensor, *, input_ids: Tensor | None = None) -> tuple[Tensor, TopKOutput]:
        """Route without computing experts, for auxiliary losses.

        Args:
            x: [..., H], as the block takes it.
            input_ids: [...], for routers that look experts up by token; others do not read them.

        Returns:
            logits [T, E] and the TopKOutput, both differentiable in x.

        Local.   Host sync: none.
        Raises:
            ShapeError: x is not a tensor, or has another H.
            ConfigError: the router needs input_ids and there are none.
        """
        return self._route(x, input_ids)

    @ranged("route")
    def _route(
        self,
        x: Tensor,
        input_ids: Tensor | None,
        load: Tensor | None = None,
        replicas: ReplicaTable | None = None,
    ) -> tuple[Tensor, TopKOutput]:
        self._check_hidden_size(x)
        tokens = x.reshape(-1, x.shape[-1])
        bias = self._correction_bias()
        ids = () if input_ids is None else (input_ids,)
        if self._block_tokens is not None:
            ids = tuple(each.reshape(-1) for each in ids)
        outputs = in_blocks(self._call_router, (tokens, *ids), self._block_tokens)
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        if self._is_chosen_by_router:
            _, weights, ids = outputs[:3]
            topk = TopKOutput(topk_ids=ids.long(), topk_weights=weights.float())
            if load is not None:
                count_load(topk.topk_ids, load)
            return logits, topk
        return logits, self._router.route(
            logits, correction_bias=bias, hidden_states=tokens, load=load, replicas=replicas
        )

    def forward(
        self,
        x: Tensor,
        input_ids: Tensor | None = None,
        *,
        decode: bool | None = None,
        topk_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the block for this rank's tokens.

        Args:
            x: [..., H]; the number of tokens differs by rank and may be 0.
            input_ids: [...], ids of the tokens in the vocabulary, for routers that look experts up
                by token; others do not read them.
            decode: the phase, equal on all ranks; in mode auto it selects low latency. None: as
                decode_phase() sets, otherwise False.
            topk_ids: [..., K], integers, logical experts in place of those that the router would
                choose, distinct for a token; -1: the router chooses. Their weights follow from the
                router's logits, with gradients. None: the router chooses all.

        Returns:
            The shape and dtype of x; for blocks that return their router's scores, these follow:
            topk_weights [T, K], best expert first.

        Shared experts run while tokens, and in backward their gradients, are sent: on CPU ranks
        over gloo or MPI, except in a compiled layer.

        Collective: yes, forward and backward, on every rank also when it has no token.
        Host sync: see explain().
        Raises:
            ShapeError: x is not a tensor, or has another H; topk_ids of another shape or dtype.
            ConfigError: the router needs input_ids and there are none; or topk_ids are given to a
                routing with a custom function, or inside replay_routes().
            Exception: any error of the router. Each on this rank; the others raise an EPError
                that names it, see docs/failures.md.
        Further it raises what ExpertParallelExperts.forward raises.
        """
        logits, tokens, topk = self._prepare(x, input_ids, decode, topk_ids)
        shared: list[Tensor] = []
        # Only what is outside the experts' call is compiled.
        if self._layout.shared_experts is None or torch.compiler.is_compiling():
            y = self.experts(tokens, topk, decode=decode)
        else:
            compute_shared = lambda: shared.append(self._shared_experts(x))  # noqa: E731
            y = self.experts(tokens, topk, decode=decode, meanwhile=compute_shared)
        return self._joined(y, shared, x, logits, topk)

    def steps(
        self,
        x: Tensor,
        input_ids: Tensor | None = None,
        *,
        decode: bool | None = None,
        topk_ids: Tensor | None = None,
    ) -> Steps[Any]:
        """Compute forward(), and yield while tokens are sent and returned: see interleave().

        Hooks of this module do not run. Args, Returns, Collective, Host sync, Raises: as forward().
        """
        # An adapter may replace the experts.
        if not isinstance(self.experts, ExpertParallelExperts):
            return self(x, input_ids, decode=decode, topk_ids=topk_ids)
        logits, tokens, topk = self._prepare(x, input_ids, decode, topk_ids)
        shared: list[Tensor] = []
        meanwhile = None
        if self._layout.shared_experts is not None:
            meanwhile = lambda: shared.append(self._shared_experts(x))  # noqa: E731
        y = yield from self.experts.steps(tokens, topk, decode=decode, meanwhile=meanwhile)
        return self._joined(y, shared, x, logits, topk)

    def _joined(
        self, y: Tensor, shared: list[Tensor], x: Tensor, logits: Tensor, topk: TopKOutput
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the result of the block; shared: that of shared experts, if it was computed."""
        layout = self._layout
        y = self._through(layout.latent_out, y)
        if layout.routed_scale != 1.0:
            y = y * layout.routed_scale
        y = y.view(x.shape)
        if layout.shared_experts is not None:
            y = y + (shared[0] if shared else self._shared_experts(x))
            y = y / 2 if layout.averages_shared_experts else y
        y = self._through(layout.output_norm, y)
        return (y, topk.topk_weights.to(logits.dtype)) if layout.returns_scores else y

    def _prepare(
        self, x: Tensor, input_ids: Tensor | None, decode: bool | None, topk_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, TopKOutput]:
        """Return logits [T, E], the tokens that the experts get, [T, H'], and their routing."""
        # A call that backward repeats was counted before. torch 2.11 cannot compile this line, and
        # would compile nothing of the method if it were inside the try.
        is_repeated, gate = torch._C._current_graph_task_id() != -1, self._gate
        try:
            load = None if is_repeated else self._load_table
            if topk_ids is None and not (gate.observers or (is_repeated and gate.ended)):
                replicas = getattr(self.experts, "replica_table", None)
                logits, topk = self._route(x, input_ids, load, replicas)
            else:
                # Observers need logical experts, so the experts choose copies afterwards, as they
                # do under an adapter.
                logits, live = self._route(x, input_ids)
                topk = gate.observe(logits, live, self._correction_bias(), topk_ids)
                if load is not None:
                    count_load(topk.topk_ids, load)
            return logits, self._through(self._layout.latent_in, x.reshape(-1, x.shape[-1])), topk
        except Exception as problem:
            # Meanwhile the other ranks call the experts, so this rank must take part.
            self.experts.refuse(problem, decode=decode)
            raise

    def check(self) -> None:
        """Raise the faults recorded on the device. Local; host sync; see Dispatcher.check."""
        self.experts.check()

    def explain(self) -> str:
        """Describe the chosen and the rejected candidates, with reasons."""
        routing = self._router.explain()
        if self._is_chosen_by_router:
            routing = ("routing by the block's own router",)
        return "\n".join((self.experts.explain(), *routing))

    def stats(self) -> EPStats:
        """Return counts since construction. Local; no host sync until counts by expert are read."""
        stats = self.experts.stats()
        if self._load_table is None:
            return stats
        load = loads_of_ranks(
            self._load_table.sum(0),
            num_ranks=self.experts.group.world_size,
            physical_to_logical=self.experts.logical_of_physical,
        )
        return replace(stats, rank_load=load)

    def _check_hidden_size(self, x: object) -> None:
        """Refuse x that the parts would refuse with an error of torch."""
        latent_in = self._layout.latent_in
        expected: object = self._hidden_size
        if latent_in is not None:
            # The experts are narrower than the block; a custom latent_in may have no in_features.
            expected = getattr(self.get_submodule(latent_in), "in_features", None)
        if isinstance(x, Tensor) and x.dim() and expected in (None, x.shape[-1]):
            return
        came = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(
            f"ExpertParallelMoE: x is {came}, expected a tensor "
            f"[..., {'H' if expected is None else expected}] ({self.experts.group.where}); pass "
            "hidden states of the block's size"
        )

    @property
    def _is_chosen_by_router(self) -> bool:
        return self.routing.custom_function is chosen_by_router

    def _call_router(
        self, tokens: Tensor, input_ids: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        kinds = self._layout.router_inputs
        inputs = [self._router_input(kind, tokens, input_ids) for kind in kinds]
        return self.get_submodule(self._layout.router)(*inputs)

    def _router_input(
        self, kind: RouterInput, tokens: Tensor, input_ids: Tensor | None
    ) -> Tensor | None:
        if kind is RouterInput.TOKENS:
            return tokens
        if kind is RouterInput.BATCH:
            return tokens.unsqueeze(0)
        if kind is RouterInput.CORRECTION_BIAS:
            return self._correction_bias()
        if input_ids is None or input_ids.numel() != tokens.shape[0]:
            came = "None" if input_ids is None else list(input_ids.shape)
            raise ConfigError(
                f"ExpertParallelMoE: input_ids is {came}, expected one id for each of the "
                f"{tokens.shape[0]} tokens, because the router looks experts up by token "
                f"({self.experts.group.where}); pass input_ids"
            )
        return input_ids.reshape(-1)

    def _correction_bias(self) -> Tensor | None:
        bias = correction_bias_of(self, self._layout)
        return None if bias is None else bias.reshape(-1)

    def _through(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else self._in_blocks(self.get_submodule(name), x)

    def _in_blocks(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self._block_tokens is None:
            return part(x)
        y = in_blocks(part, (x.reshape(-1, x.shape[-1]),), self._block_tokens)
        assert isinstance(y, Tensor), "only routers return more"
        return y.view(*x.shape[:-1], y.shape[-1])

    def _shared_experts(self, x: Tensor) -> Tensor:
        layout = self._layout
        assert layout.shared_experts is not None, "the caller has checked it"
        shared_experts = self.get_submodule(layout.shared_experts)

        def compute(x: Tensor) -> Tensor:
            shared = shared_experts(x)
            if layout.shared_experts_gate is None:
                return shared
            # In the block, because torch computes the last elements of a tensor in another way.
            return torch.sigmoid(self.get_submodule(layout.shared_experts_gate)(x)) * shared

        return self._in_blocks(compute, x)


def _check_blocks(experts: ExpertParallelExperts) -> int | None:
    """Return EPConfig.block_tokens; refuse sum_groups without it."""
    config = experts.config
    if config.sum_groups is not None and config.block_tokens is None:
        raise ConfigError(
            "ExpertParallelMoE: sum_groups is set, but the bits of the router and of shared "
            f"experts depend on the number of tokens ({experts.group.where}); set "
            "EPConfig.block_tokens, or compute them outside and use ExpertParallelExperts"
        )
    return config.block_tokens
