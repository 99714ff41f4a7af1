"""ElasticBuffer of the drop-in, which refuses what the real package refuses."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from epcomm.integrations import deep_ep
from epcomm.integrations.deep_ep import EPHandle, EventOverlap
from epcomm.integrations.deep_ep.v2.buffer import DispatchResult
from fakes.deep_ep.limits import require_size
from fakes.deep_ep.strict_v2 import limits
from fakes.deep_ep.strict_v2.calls import OpenOrders
from fakes.deep_ep.strict_v2.limits import MAX_RANKS, MAX_SCALEUP_RANKS


class ElasticBuffer(OpenOrders):
    """The drop-in, with what only the real package has: limits, poison, open orders.

    Calls whose sizes differ between ranks are detected. Refusals are local, as there.
    """

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - as the drop-in
        num_ranks = _arguments_of(deep_ep.ElasticBuffer.__init__, args, options)["group"].size()
        require_size(num_ranks <= MAX_RANKS, "num_ranks <= kNumMaxRanks")
        require_size(num_ranks <= MAX_SCALEUP_RANKS, "num_scaleup_ranks <= 64")
        super().__init__(*args, **options)
        limits.check_buffer_bytes(self.num_bytes, self.num_cpu_bytes)
        self._is_destroyed = False

    def destroy(self) -> None:
        super().destroy()
        self._is_destroyed = True

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        *args: Any,  # noqa: ANN401 - as the drop-in
        **options: Any,  # noqa: ANN401 - as the drop-in
    ) -> int:
        limits.check_sizing(num_max_tokens_per_rank, hidden)
        return deep_ep.ElasticBuffer.get_buffer_size_hint(
            group, num_max_tokens_per_rank, hidden, *args, **options
        )

    def get_theoretical_num_sms(self, num_experts: int, *args: Any, **options: Any) -> int:  # noqa: ANN401
        assert num_experts % self.num_ranks == 0
        return super().get_theoretical_num_sms(num_experts, *args, **options)

    def dispatch(self, *args: Any, **options: Any) -> DispatchResult:  # noqa: ANN401
        self._check_alive()
        given = _arguments_of(deep_ep.ElasticBuffer.dispatch, args, options)
        self._check_dispatch(given, given["handle"])
        self.finish()
        return super().dispatch(**given)

    def combine(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None, EventOverlap]:  # noqa: ANN401
        self._check_alive()
        given = _arguments_of(deep_ep.ElasticBuffer.combine, args, options)
        bias = given["bias"]
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        assert not isinstance(bias, tuple) or len(bias) == 2
        self._check_launch(given["num_sms"] or given["handle"].num_sms, given)
        limits.check_combine(given, biases, allow_multiple_reduction=self.allow_multiple_reduction)
        limits.check_combine_bytes(
            given,
            self.num_ranks,
            self.num_bytes,
            allow_multiple_reduction=self.allow_multiple_reduction,
        )
        self.finish()
        return super().combine(**given)

    def _check_dispatch(self, given: dict[str, Any], handle: EPHandle | None) -> None:
        routes = given["topk_idx"] if handle is None else handle.topk_idx
        # The package reads num_experts before the handle. For cached routes it has the number only
        # if the caller repeats it; otherwise it fails unless num_sms is given.
        num_sms = given["num_sms"]
        if not num_sms:
            num_sms = self.get_theoretical_num_sms(given["num_experts"], routes.shape[1])
        if handle is None and given["num_experts"] is None:
            raise TypeError("dispatch(): incompatible function arguments: num_experts is None")
        max_tokens = given["num_max_tokens_per_rank"]
        if handle is not None:
            limits.check_handle(given, handle)
            max_tokens = handle.num_max_tokens_per_rank
            known = {"topk_idx": handle.topk_idx, "num_experts": handle.num_experts}
            given = {**given, **known}
        max_tokens = self.num_max_tokens_per_rank if max_tokens is None else max_tokens
        self._check_launch(num_sms, given)
        limits.check_dispatch(given, max_tokens, self.num_ranks)
        limits.check_dispatch_bytes(given, max_tokens, self.num_ranks, self.num_bytes)
        sizes = [max_tokens, given["num_experts"], routes.shape[1]]
        has = [given["topk_weights"] is not None, handle is not None]
        names = "num_max_tokens_per_rank, num_experts, top-k, weights and caching"
        limits.agree(self.group, [*sizes, *map(int, has)], names)

    def _check_launch(self, num_sms: int, given: dict[str, Any]) -> None:
        limits.check_events(given)
        limits.check_sms(num_sms)
        num_qps = given["num_qps"] or self.get_theoretical_num_qps(num_sms)
        assert num_qps <= self.num_allocated_qps, "Allocated QPs are not enough"

    def _check_alive(self) -> None:
        if self._is_destroyed:
            raise AttributeError("'NoneType' object: the buffer is destroyed")


def _arguments_of(
    method: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call of a method by name, with defaults and without self."""
    bound = inspect.signature(method).bind(None, *args, **options)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "self"}
