"""PipelinePath: dispatch, experts, combine, by the dispatchers and the runner of a plan.

PhaseDispatchers has the dispatchers of both phases of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from epcomm.buffers.traffic import BufferTraffic
from epcomm.config import EPConfig, Mode
from epcomm.dispatchers.base import NeedGrad
from epcomm.dispatchers.dispatcher import RowsDispatcher
from epcomm.dispatchers.modes import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    StandardDispatcher,
)
from epcomm.errors import ConfigError, EPError, ShapeError
from epcomm.group import EPGroup
from epcomm.ops.precision import is_widened
from epcomm.planning.plan import plan
from epcomm.planning.plans import EPPlan, PhasePlan
from epcomm.platforms.profiler import ranged
from epcomm.records import CombineInput, DispatchOutput, ExchangePlan, PathOutput, TopKOutput
from epcomm.registry import runner_class
from epcomm.spec import MoESpec
from epcomm.weights.unquantized import ExpertTensors


class PipelinePath:
    """A layer's way in all modes but fuseep."""

    def __init__(self, group: EPGroup, spec: MoESpec, config: EPConfig, chosen: EPPlan) -> None:
        """Open what `chosen` names; it was planned with weights, and with the same arguments.

        Collective: yes.   Host sync: yes.
        """
        self._group, self._config = group, config
        # Without a dtype of the user's choice rows travel as the experts are.
        self._may_widen = config.dispatch_dtype is None
        self._open(spec, chosen)

    def run(
        self, x: Tensor, topk: TopKOutput, weights: ExpertTensors, *, decode: bool
    ) -> PathOutput:
        """Dispatch, compute and combine one batch; see ExpertParallelExperts.forward."""
        if self._may_widen and is_widened(weights, self._spec.dtype):
            self._widen(weights)
        try:
            dispatcher = self.phases.of_phase(decode=decode)
        except ConfigError as error:
            self.refuse(error, decode=decode)
        misplaced = self._find_misplaced(weights)
        if misplaced is not None:
            dispatcher.refuse(misplaced)
        trained: NeedGrad = False
        if torch.is_grad_enabled():
            trained = {name: tensor.requires_grad for name, tensor in weights.tensors().items()}
        out = dispatcher.dispatch(x, topk, experts_need_grad=trained)
        try:
            results = self._run_experts(out, weights)
        except Exception as problem:
            dispatcher.refuse_results(out.handle, problem)
            raise
        y = dispatcher.combine(results)
        return path_output(y, out)

    @ranged("experts")
    def _run_experts(self, out: DispatchOutput, weights: ExpertTensors) -> CombineInput:
        return self.runner.run(out, weights)

    def _widen(self, weights: ExpertTensors) -> None:
        """Plan anew for experts that were cast to a wider dtype, as all ranks have cast theirs.

        Collective: yes.   Host sync: yes.
        """
        spec = replace(self._spec, dtype=weights.dtype)
        self._open(spec, plan(self._config, spec, self._group, weights=weights))

    def _open(self, spec: MoESpec, chosen: EPPlan) -> None:
        self.phases = PhaseDispatchers(self._group, spec, self._config, chosen)
        assert chosen.runner is not None, "plan() was given the weights"
        self.runner = runner_class(chosen.runner)(int8_profile=chosen.prefill.int8_profile)
        # Last, so that a refusal is met again by the next call.
        self._spec, self.chosen = spec, chosen

    def refuse(self, error: EPError, *, decode: bool) -> NoReturn:
        """Raise what keeps this rank from a call, after the other ranks have heard of it.

        Collective: yes, in place of run().
        """
        is_served = not decode or self.phases.decode is not None
        self.phases.of_phase(decode=decode and is_served).refuse(error)

    def _find_misplaced(self, weights: ExpertTensors) -> ShapeError | None:
        """Find experts that are not on the device of the group, as after construction on meta."""
        for name, tensor in weights.tensors().items():
            if tensor.device != self._group.device:
                return ShapeError(
                    f"ExpertParallelExperts: {name} is on {tensor.device}, expected "
                    f"{self._group.device} ({self._group.where}); load the experts, or call "
                    f".to({str(self._group.device)!r})"
                )
        return None

    def check(self) -> None:
        """Raise the faults that wait on the device. Local; host sync; see Dispatcher.check."""
        self.phases.check()

    def traffic(self) -> BufferTraffic:
        """Return the bytes sent by the buffers of both phases."""
        return self.phases.traffic()


def path_output(y: Tensor, out: DispatchOutput) -> PathOutput:
    """Return y with what the batch took on this rank. Local; no host sync."""
    return PathOutput(
        y=y,
        num_rows=out.exchange_plan.num_rows,
        num_slots=_num_slots(out.exchange_plan),
        num_tokens_per_expert=out.num_tokens_per_expert,
    )


def _num_slots(exchange_plan: ExchangePlan) -> int:
    used, row_of_slot = (
        exchange_plan.index.host_num_tokens_per_expert,
        exchange_plan.index.row_of_slot,
    )
    if used is not None:
        return sum(used)
    return exchange_plan.num_rows if row_of_slot is None else row_of_slot.shape[0]


# Of either layout, as the plan chose; runners read what they are given.
AnyDispatcher = RowsDispatcher[Any, Any]


_DISPATCHERS: Mapping[Mode, type[AnyDispatcher]] = {
    Mode.NORMAL: DeepEPNormalDispatcher,
    Mode.LOW_LATENCY: DeepEPLowLatencyDispatcher,
    Mode.STANDARD: StandardDispatcher,
}


class PhaseDispatchers:
    """One dispatcher for prefill and training, one for decode; they may be the same."""

    def __init__(self, group: EPGroup, spec: MoESpec, config: EPConfig, chosen: EPPlan) -> None:
        """Open what `chosen` names; it was planned with the same group, spec and config.

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
            ConfigError: nothing serves decode; the message says what to set.
        """
        if not decode:
            return self.prefill
        if self.decode is None:
            raise ConfigError(
                f"ExpertParallelExperts: decode=True but there is no low latency "
                f"({self._where}); {self._decode_lacks}"
            )
        return self.decode

    def check(self) -> None:
        """Raise the faults that wait on the device. Local; host sync; see Dispatcher.check."""
        for dispatcher in self._all():
            dispatcher.check()

    def traffic(self) -> BufferTraffic:
        """Return the bytes sent by the buffers of both phases."""
        return sum((dispatcher.traffic() for dispatcher in self._all()), BufferTraffic())

    def _all(self) -> list[AnyDispatcher]:
        is_one = self.decode is None or self.decode is self.prefill
        return [self.prefill] if is_one else [self.prefill, *filter(None, [self.decode])]
