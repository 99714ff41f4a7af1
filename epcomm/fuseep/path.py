"""Define FuseEPPath, which computes y from (x, topk) with the fused operator of a plan."""

from dataclasses import replace

import torch
from torch import Tensor

from epcomm.buffers.fused import FuseEPResult
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.call import DispatchCall
from epcomm.config import EPConfig, Mode
from epcomm.dispatchers.checks import CallChecks, num_tokens_of
from epcomm.errors import ConfigError, EPError, group_closed
from epcomm.group import EPGroup
from epcomm.ops.precision import in_dtype
from epcomm.planning.plans import PhasePlan
from epcomm.platforms.tracing import ranged
from epcomm.protocol import BatchFlags
from epcomm.records import TopKOutput, empty_topk
from epcomm.spec import MoESpec
from epcomm.types import sum_dtype
from epcomm.weights.quantized import Int8ChannelWeights
from epcomm.weights.unquantized import ExpertTensors
from epcomm.weights.written import Derived


class FuseEPPath:
    """The path of ExpertParallelExperts in mode fuseep, for inference."""

    def __init__(self, group: EPGroup, spec: MoESpec, config: EPConfig, chosen: PhasePlan) -> None:
        """Open the operator of `chosen`, a plan made with the same group and spec.

        Collective: yes.   Host sync: yes.
        Raises:
            ConfigError: the plan is for another mode, or ranks disagree.
            BackendUnavailable: the operator is not on this machine.
        """
        if chosen.mode is not Mode.FUSEEP:
            raise ConfigError(
                f"FuseEPPath: the plan is for mode {chosen.mode.value}, expected fuseep "
                f"({group.where}); plan with EPConfig(mode='fuseep')"
            )
        self.plan = chosen
        self._group, self._dtype = group, spec.dtype
        self._spec = chosen.buffer_spec
        self._checks = CallChecks(
            spec=self._spec, dtype=spec.dtype, device=group.device, where=group.where
        )
        self._operator = group.open_fused(chosen.buffer, self._spec)
        self._packed: Derived[object] = Derived("fuseep")
        self._checks_calls = config.check_calls

    @ranged("fuseep")
    def run(
        self,
        hidden_states: Tensor,
        topk: TopKOutput,
        weights: ExpertTensors,
        *,
        decode: bool = False,
    ) -> FuseEPResult:
        """Compute the routed experts of this rank's tokens.

        Args:
            hidden_states: [T, H], T <= M if there is a limit; T may be 0 and differ between ranks.
            topk: topk_ids [T, K], int64, -1 for none; topk_weights [T, K], float32.
            weights: this rank's experts as in the checkpoint. They are packed in the first call,
                and again after they were written; for writes through `.data` see repack().
            decode: ignored; prefill and decode use the same operator.

        Collective: yes.   Host sync: caps.host_syncs times; with check_calls one more.
        Lifetime: the caller owns the result.
        Raises:
            ConfigError: gradients are needed; raised after the exchange, in which this rank took
                part.
            ShapeError, CapacityError: a bad call; with caps.is_static y is NaN instead, and check()
                raises.
            HandleError: the group is closed.
        """
        where = self._group.where
        if self._group.is_closed:
            raise group_closed("fuseep", where)
        num_tokens = num_tokens_of(hidden_states)
        refusal = self._refusal(hidden_states, topk, weights)
        error = refusal or self._checks.find_call_error(hidden_states, topk)
        assert isinstance(weights, Int8ChannelWeights), "the plan was made for them"
        experts = self._packed.of(weights.tensors(), lambda: self._operator.pack(weights))
        result = self._operator.run(self._call(hidden_states, topk, error), experts)
        if self._checks_calls:
            # This precedes the refusal; otherwise faults of this call would wait for a check.
            self.check()
        if refusal is not None:
            raise refusal
        if error is not None:
            # A static operator does not raise; this rank took part without tokens.
            shape = (num_tokens, self._spec.hidden_size)
            return replace(result, y=result.y.new_full(shape, float("nan")))
        return replace(result, y=result.y.to(hidden_states.dtype))

    def check(self) -> None:
        """Raise the faults found on the device. Local; host sync; see Dispatcher.check."""
        self._operator.check()

    def repack(self) -> None:
        """Pack the experts again in the next call. Local.

        Call it after `parameter.data.copy_(...)` or `parameter.data[...] = ...`, which torch does
        not count as writes; load_state_dict(), copy_() and `.data = ...` are detected.
        """
        self._packed.forget()

    def traffic(self) -> BufferTraffic:
        """Return the bytes that the operator has sent to other ranks for all of its layers."""
        return self._operator.traffic()

    def _refusal(
        self, hidden_states: Tensor, topk: TopKOutput, weights: ExpertTensors
    ) -> EPError | None:
        # An argument that is not a TopKOutput is reported to all ranks as a fault of the call.
        inputs = (hidden_states, getattr(topk, "topk_weights", None), *weights.tensors().values())
        needs_grad = any(getattr(tensor, "requires_grad", False) for tensor in inputs)
        if not (torch.is_grad_enabled() and needs_grad):
            return None
        return ConfigError(
            f"fuseep: {self.plan.backend} has no gradients, but some are needed "
            f"({self._group.where}); use mode normal, or torch.no_grad()"
        )

    def _call(self, hidden_states: Tensor, topk: TopKOutput, error: EPError | None) -> DispatchCall:
        if error is not None:
            hidden_states = torch.empty(
                0, self._spec.hidden_size, dtype=self._dtype, device=self._group.device
            )
            topk = empty_topk(self._spec.top_k, self._group.device)
        return DispatchCall(
            hidden_states=hidden_states.detach().to(self._dtype),
            topk_ids=topk.topk_ids,
            topk_weights=in_dtype(topk.topk_weights, sum_dtype(self._dtype)).detach(),
            flags=BatchFlags.NONE,
            error=error,
        )
