"""ExpertParallelExperts: the routed experts of one layer, spread over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from epcomm.config import EPConfig, Mode
from epcomm.dispatchers.phases import PhaseDispatchers
from epcomm.errors import ConfigError, EPError
from epcomm.fuseep.path import FuseEPPath
from epcomm.group import EPGroup
from epcomm.pipeline import PipelinePath
from epcomm.planning import MoESpec, plan
from epcomm.precision import check_cast
from epcomm.records import TopKOutput, empty_topk
from epcomm.runners.base import ExpertRunner
from epcomm.sharding import ExpertShard, local_share, tag_as_sharded
from epcomm.stats import EPStats, LayerCounter
from epcomm.untraced import untraced
from epcomm.weights import ExpertTensors


class ExpertParallelExperts(nn.Module):
    """Holds L = P / W experts on each rank and computes y = sum over k of w_k * expert_k(x).

    Parameters carry the names given at construction and are tagged (see sharding.py).
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
            weights: of all P experts, equal on all ranks, or with is_local of this rank's L.
            group: the ranks that share the experts.
            config: the user's choices.
            top_k: K of the routing.
            is_local: `weights` is already this rank's share.
            names: parameter names by ExpertWeights field, where they differ.

        Collective: yes.   Host sync: yes.
        Raises:
            ConfigError: experts not divisible by ranks, unknown names, or ranks disagree.
            BackendUnavailable: the backend or runner asked for cannot serve this layer.
        """
        super().__init__()
        config = config or EPConfig()
        num_experts = weights.num_experts * (group.world_size if is_local else 1)
        spec = MoESpec(
            hidden_size=weights.hidden_size,
            num_experts=num_experts,
            top_k=top_k,
            dtype=weights.dtype,
        )
        self.plan = plan(config, spec, group, weights=weights)
        self.path: PipelinePath | FuseEPPath = (
            FuseEPPath(group, spec, config, self.plan.prefill)
            if self.plan.prefill.mode is Mode.FUSEEP
            else PipelinePath(group, spec, config, self.plan)
        )
        self.group = group
        self.config = config
        self.is_decoding = False
        self._spec = spec
        # What the experts are, without their values.
        self._kind = weights.with_tensors(
            {role: tensor.detach().to("meta") for role, tensor in weights.tensors().items()}
        )
        self._counter = LayerCounter(num_experts // group.world_size, group.device)
        self._names = {role: (names or {}).get(role, role) for role in weights.tensors()}
        self._register(weights, num_experts, is_local)

    @property
    def num_experts(self) -> int:
        """P, of all ranks."""
        return self._spec.num_experts

    @property
    def phases(self) -> PhaseDispatchers:
        """The dispatchers of both phases, for those who drive a batch themselves.

        Raises:
            ConfigError: mode fuseep has none.
        """
        return self._pipeline("dispatchers").phases

    @property
    def runner(self) -> ExpertRunner:
        """What computes the experts between dispatch and combine.

        Raises:
            ConfigError: mode fuseep has none.
        """
        return self._pipeline("runner").runner

    @property
    def weights(self) -> ExpertTensors:
        """This rank's experts, as live parameters."""
        tensors = {role: self.get_parameter(name) for role, name in self._names.items()}
        return self._kind.with_tensors(tensors)

    @untraced
    def forward(self, x: Tensor, topk: TopKOutput, *, decode: bool | None = None) -> Tensor:
        """Compute the routed experts of this rank's tokens.

        Args:
            x: [T, H]; T differs by rank and may be 0.
            topk: topk_ids [T, K], int64, -1 for none; topk_weights [T, K], float32; another
                floating dtype is cast, as x is, see docs/precision.md.
            decode: the phase, equal on all ranks; in mode auto it selects low latency. None: as
                decode_phase() says, else False.

        Returns:
            [T, H], dtype of x.

        Collective: yes, forward and backward.   Host sync: as explain() says.
        After a cast to a wider dtype, as .double(), the first call plans anew, on all ranks.
        torch.compile: one graph break.
        Raises: what Dispatcher.dispatch and combine raise.
        """
        decode = self.is_decoding if decode is None else decode
        try:
            weights = self.weights
        except EPError as error:
            self.path.refuse(error, decode=decode)
        out = self.path.run(x, topk, weights, decode=decode)
        self._counter.count(x.shape[0], out)
        return out.y

    def idle(self, carry: Tensor) -> Tensor:
        """See ExpertParallelLayer."""
        x = carry.to(self.weights.dtype).expand(0, self._spec.hidden_size)
        return self(x, empty_topk(self._spec.top_k, self.group.device)).sum().float()

    def idle_model(self, model: nn.Module) -> Tensor | None:
        """See ExpertParallelLayer."""
        return None

    def check(self) -> None:
        """Raise the faults that wait on the device. Local; host sync; see Dispatcher.check."""
        self.path.check()

    def explain(self) -> str:
        """What was chosen and rejected and why, as text."""
        chosen = self.path.chosen if isinstance(self.path, PipelinePath) else self.plan
        return chosen.explain()

    def stats(self) -> EPStats:
        """Counts since construction. Local; no host sync until counts by expert are read."""
        return self._counter.snapshot(self.path.traffic())

    def extra_repr(self) -> str:
        return f"{self._kind.format.activation.value}, {self.group.where}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        check_cast(self._kind, fn, self.group.where)
        return super()._apply(fn, recurse)

    def _register(self, weights: ExpertTensors, num_experts: int, is_local: bool) -> None:
        num_local = num_experts // self.group.world_size
        shard = ExpertShard(
            first_expert=self.group.rank * num_local,
            num_local_experts=num_local,
            num_experts=num_experts,
        )
        for role, tensor in weights.tensors().items():
            share = _copy_of(tensor) if is_local else local_share(tensor, shard)
            parameter = nn.Parameter(share, requires_grad=tensor.requires_grad)
            tag_as_sharded(parameter, shard)
            self.register_parameter(self._names[role], parameter)

    def _pipeline(self, what: str) -> PipelinePath:
        if not isinstance(self.path, PipelinePath):
            raise ConfigError(
                f"ExpertParallelExperts: mode fuseep has no {what} ({self.group.where}); its "
                "operator does everything in one call, layer.path.run()"
            )
        return self.path


def _copy_of(tensor: Tensor) -> Tensor:
    """A copy that is contiguous, as kernels and gather_state_dict() want it."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)
