"""ExpertParallelMoE: a whole MoE block, router, routed experts over the ranks, shared experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from epcomm.config import EPConfig, Router
from epcomm.errors import ConfigError
from epcomm.experts import ExpertParallelExperts
from epcomm.group import EPGroup
from epcomm.profiling import ranged
from epcomm.records import TopKOutput
from epcomm.routing import RoutingSpec
from epcomm.routing.choose import choose_router
from epcomm.stats import EPStats

RouterCall = Callable[[nn.Module, Tensor, Tensor | None], Tensor | tuple[Tensor, ...]]


def call_with_tokens(
    router: nn.Module, tokens: Tensor, correction_bias: Tensor | None
) -> Tensor | tuple[Tensor, ...]:
    """Call a router with tokens [T, H] alone, as most want it."""
    return router(tokens)


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Which part of a block does what, by its dotted name below the block; None: there is none.

    router: tokens [T, H] to logits [T, E], or to a tuple whose first entry they are.
    call_router: calls it with the tokens and, where it wants it, the correction bias [E].
    correction_bias: E values, whatever their shape, that the routing wants.
    shared_experts: [..., H] to [..., H], computed on every rank's own tokens.
    shared_experts_gate: [..., H] to [..., 1]; its sigmoid multiplies what the shared experts give.
    latent_in, latent_out: [T, H] to [T, H'] before dispatch, and back after combine; H' is the
        hidden size of the routed experts.
    returns_scores: the block returns (y, topk_weights [T, K] in the dtype of the logits), not y.
    """

    router: str = "gate"
    call_router: RouterCall = call_with_tokens
    correction_bias: str | None = None
    shared_experts: str | None = None
    shared_experts_gate: str | None = None
    latent_in: str | None = None
    latent_out: str | None = None
    returns_scores: bool = False

    def names(self) -> dict[str, str]:
        """Field to name, of the parts that are there."""
        named = {
            "router": self.router,
            "correction_bias": self.correction_bias,
            "shared_experts": self.shared_experts,
            "shared_experts_gate": self.shared_experts_gate,
            "latent_in": self.latent_in,
            "latent_out": self.latent_out,
        }
        return {field: name for field, name in named.items() if name is not None}


class ExpertParallelMoE(nn.Module):
    """Routes, computes the routed experts of all ranks' tokens, and adds the shared experts.

    Parts keep the names of the block they came from, so state_dict names do too.
    """

    def __init__(
        self,
        *,
        routing: RoutingSpec,
        experts: ExpertParallelExperts,
        parts: Mapping[str, nn.Module | Tensor],
        layout: BlockLayout = BlockLayout(),
    ) -> None:
        """Assemble a block.

        Args:
            routing: logits to experts and weights.
            experts: the routed experts; their configuration says who computes the routing.
            parts: everything else by name: children, parameters, and other tensors as buffers.
            layout: what each part does.

        Local.
        Raises:
            ConfigError: the layout names a part that is missing, or the routing is impossible
                among these experts.
            BackendUnavailable: the router asked for is not on the device of the group.
        """
        super().__init__()
        self._layout = layout
        # Experts are not replicated: the logical ones, E, are the physical ones.
        self._router = choose_router(
            Router(experts.config.router),
            routing,
            num_experts=experts.num_experts,
            device=experts.group.device,
            where=experts.group.where,
        )
        self.experts = experts
        for name, part in parts.items():
            self._register(name, part)
        for field, name in layout.names().items():
            find_part(self, field, name)

    @classmethod
    def from_transformers(
        cls, block: nn.Module, group: EPGroup, config: EPConfig | None = None
    ) -> ExpertParallelMoE:
        """Spread the experts of a transformers MoE block over the group.

        Args:
            block: a whole block, equal on all ranks; its experts are copied, the rest is reused.
            group: the ranks that share the experts.
            config: the user's choices.

        Collective: yes.   Host sync: yes.
        Raises:
            ConfigError: the kind of block is unknown (the message lists the known ones), or it is
                configured to compute something else than its kind does here.
        """
        from epcomm.integrations.transformers import from_transformers

        return from_transformers(block, group, config)

    @property
    def routing(self) -> RoutingSpec:
        """Logits to experts and weights, as given at construction."""
        return self._router.spec

    @ranged("route")
    def route(self, x: Tensor) -> tuple[Tensor, TopKOutput]:
        """Route without computing experts, for auxiliary losses.

        Args:
            x: [..., H].

        Returns:
            logits [T, E] and the TopKOutput, both differentiable in x.

        Local.   Host sync: none.
        """
        tokens = x.reshape(-1, x.shape[-1])
        layout, bias = self._layout, self._correction_bias()
        logits = layout.call_router(self.get_submodule(layout.router), tokens, bias)
        if isinstance(logits, tuple):
            logits = logits[0]
        topk = self._router.route(logits, correction_bias=bias, hidden_states=tokens)
        return logits, topk

    def forward(self, x: Tensor, *, decode: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the block for this rank's tokens.

        Args:
            x: [..., H]; the number of tokens differs by rank and may be 0.
            decode: the phase, equal on all ranks; in mode auto it selects low latency. None: as
                decode_phase() says, else False.

        Returns:
            The shape and dtype of x; for blocks that return their router's scores, these follow:
            topk_weights [T, K], best expert first.

        Collective: yes, forward and backward, on every rank also when it has no token.
        Host sync: as explain() says.
        Raises: what ExpertParallelExperts.forward raises.
        """
        layout = self._layout
        logits, topk = self.route(x)
        tokens = self._through(layout.latent_in, x.reshape(-1, x.shape[-1]))
        y = self._through(layout.latent_out, self.experts(tokens, topk, decode=decode))
        y = self._add_shared_experts(y.view(x.shape), x)
        return (y, topk.topk_weights.to(logits.dtype)) if layout.returns_scores else y

    def check(self) -> None:
        """Raise the faults that wait on the device. Local; host sync; see Dispatcher.check."""
        self.experts.check()

    def explain(self) -> str:
        """What was chosen and rejected and why, as text."""
        return "\n".join((self.experts.explain(), *self._router.explain()))

    def stats(self) -> EPStats:
        """Counts since construction. Local; no host sync until counts by expert are read."""
        return self.experts.stats()

    def _register(self, name: str, part: nn.Module | Tensor) -> None:
        if isinstance(part, nn.Module):
            self.add_module(name, part)
        elif isinstance(part, nn.Parameter):
            self.register_parameter(name, part)
        else:
            self.register_buffer(name, part)

    def _correction_bias(self) -> Tensor | None:
        name = self._layout.correction_bias
        if name is None:
            return None
        bias = find_part(self, "correction_bias", name)
        assert isinstance(bias, Tensor), "checked at creation"
        return bias.reshape(-1)

    def _through(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else self.get_submodule(name)(x)

    def _add_shared_experts(self, y: Tensor, x: Tensor) -> Tensor:
        layout = self._layout
        if layout.shared_experts is None:
            return y
        shared = self.get_submodule(layout.shared_experts)(x)
        if layout.shared_experts_gate is not None:
            shared = torch.sigmoid(self.get_submodule(layout.shared_experts_gate)(x)) * shared
        return y + shared


def find_part(block: nn.Module, field: str, name: str) -> nn.Module | Tensor:
    """The part of a block that its layout calls `field`, by its dotted name.

    Raises:
        ConfigError: there is no such module, or for a correction bias no such tensor.
    """
    part: object = block
    for step in name.split("."):
        part = getattr(part, step, None)
    if not isinstance(part, Tensor if field == "correction_bias" else nn.Module):
        raise ConfigError(
            f"{type(block).__name__}: {name} is {type(part).__name__}, expected its "
            f"{field}; pass a BlockLayout that names it"
        )
    return part
