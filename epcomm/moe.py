"""ExpertParallelMoE: a whole MoE block, router, routed experts over the ranks, shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from epcomm.config import EPConfig
from epcomm.errors import ConfigError
from epcomm.experts import EPStats, ExpertParallelExperts
from epcomm.group import EPGroup
from epcomm.records import TopKOutput
from epcomm.routing import RoutingSpec, route


@contextmanager
def decode_phase(model: nn.Module) -> Iterator[None]:
    """Within it, every ExpertParallelMoE of `model` decodes unless its caller says otherwise.

    For models whose code calls the block without a phase. Local; all ranks enter alike.
    """
    blocks = [module for module in model.modules() if isinstance(module, ExpertParallelMoE)]
    before = [block._is_decoding for block in blocks]
    try:
        for block in blocks:
            block._is_decoding = True
        yield
    finally:
        for block, was_decoding in zip(blocks, before, strict=True):
            block._is_decoding = was_decoding


class ExpertParallelMoE(nn.Module):
    """Routes, computes the routed experts of all ranks' tokens, and adds the shared experts.

    Children keep the names of the block they came from, so state_dict names do too.
    """

    def __init__(
        self,
        *,
        router: nn.Module,
        routing: RoutingSpec,
        experts: ExpertParallelExperts,
        shared_experts: nn.Module | None = None,
        router_name: str = "gate",
        shared_experts_name: str = "shared_experts",
        correction_bias_name: str | None = None,
    ) -> None:
        """Assemble a block.

        Args:
            router: x [T, H] to logits [T, E], or to a tuple whose first entry they are.
            routing: logits to experts and weights.
            experts: the routed experts.
            shared_experts: [..., H] to [..., H], computed on every rank's own tokens, or None.
            router_name, shared_experts_name: names of the children.
            correction_bias_name: dotted name, below this module, of the bias that `routing` wants.
        """
        super().__init__()
        self._router_name = router_name
        self._shared_experts_name = shared_experts_name if shared_experts is not None else None
        self._correction_bias_name = correction_bias_name
        self._is_decoding = False
        self.routing = routing
        self.add_module(router_name, router)
        self.experts = experts
        if shared_experts is not None:
            self.add_module(shared_experts_name, shared_experts)

    @classmethod
    def from_transformers(
        cls, block: nn.Module, group: EPGroup, config: EPConfig | None = None
    ) -> ExpertParallelMoE:
        """Spread the experts of a transformers MoE block over the group.

        Args:
            block: a whole block, equal on all ranks; its router is reused, its experts are copied.
            group: the ranks that share the experts.
            config: the user's choices.

        Collective: yes.   Host sync: yes.
        Raises:
            ConfigError: the kind of block is unknown (the message lists the known ones).
        """
        from epcomm.integrations.transformers import from_transformers

        return from_transformers(block, group, config)

    def route(self, x: Tensor) -> tuple[Tensor, TopKOutput]:
        """Route without computing experts, for auxiliary losses.

        Args:
            x: [..., H].

        Returns:
            logits [T, E] and the TopKOutput, both differentiable in x.

        Local.   Host sync: none.
        """
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.get_submodule(self._router_name)(tokens)
        if isinstance(logits, tuple):
            logits = logits[0]
        topk = route(
            logits, self.routing, correction_bias=self._correction_bias(), hidden_states=tokens
        )
        return logits, topk

    def forward(self, x: Tensor, *, decode: bool | None = None) -> Tensor:
        """Compute the block for this rank's tokens.

        Args:
            x: [..., H]; the number of tokens differs by rank and may be 0.
            decode: the phase, equal on all ranks; in mode auto it selects low latency. None: as
                decode_phase() says, else False.

        Returns:
            The shape and dtype of x.

        Collective: yes, forward and backward, on every rank also when it has no token.
        Host sync: as explain() says.
        Raises: what ExpertParallelExperts.forward raises.
        """
        decode = self._is_decoding if decode is None else decode
        _, topk = self.route(x)
        y = self.experts(x.reshape(-1, x.shape[-1]), topk, decode=decode).view(x.shape)
        if self._shared_experts_name is None:
            return y
        return y + self.get_submodule(self._shared_experts_name)(x)

    def check(self) -> None:
        """Raise the faults that wait on the device. Local; host sync; see Dispatcher.check."""
        self.experts.check()

    def explain(self) -> str:
        """What was chosen and rejected and why, as text."""
        return self.experts.explain()

    def stats(self) -> EPStats:
        """Counts since construction. Local; no host sync."""
        return self.experts.stats()

    def _correction_bias(self) -> Tensor | None:
        if self._correction_bias_name is None:
            return None
        path, _, name = self._correction_bias_name.rpartition(".")
        bias = getattr(self.get_submodule(path), name)
        if not isinstance(bias, torch.Tensor):
            raise ConfigError(
                f"ExpertParallelMoE: {self._correction_bias_name} is {type(bias).__name__}, "
                "expected a tensor; name the correction bias of the router"
            )
        return bias
