"""Buffer of V1: the drop-in, and what the real one refuses and leaves undefined."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.integrations.deep_ep import Config, EventOverlap
from epcomm.integrations.deep_ep.v1 import buffer as drop_in
from epcomm.integrations.deep_ep.v1.buffer import DispatchResult, LowLatencyResult, XTensors
from fakes.deep_ep.limits import is_enforced, require, require_size
from fakes.deep_ep.strict_v1 import logfmt, low_latency_checks, normal_checks
from fakes.deep_ep.strict_v1.event import DeferredWork
from fakes.deep_ep.strict_v1.low_latency import (
    Handle,
    LowLatencyState,
    Result,
    Sizes,
    StrictHandle,
    poisoned_like,
    unshuffled,
)
from fakes.deep_ep.strict_v1.sizes import (
    ONE_HOST,
    check_buffer,
    num_channels,
    queue_depth,
    require_ids,
)
from fakes.deep_ep.undefined import poison

if TYPE_CHECKING:
    from mpi4py import MPI

_KNOWN_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)


class Buffer(drop_in.Buffer):
    """Normal and low-latency dispatch and combine over the ranks of a gloo process group.

    Nothing is sent before the arguments of this rank are checked.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: "MPI.Comm | None" = None,
    ) -> None:
        if group is None:
            raise ValueError("Either 'group' or 'comm' must be provided.")
        check_buffer(group.size(), num_nvl_bytes, num_rdma_bytes, low_latency_mode)
        super().__init__(
            group,
            num_nvl_bytes,
            num_rdma_bytes,
            low_latency_mode,
            explicitly_destroy=explicitly_destroy,
            enable_shrink=enable_shrink,
        )
        self._process_group = group
        self._deferred = DeferredWork()
        self._state = LowLatencyState(group, num_rdma_bytes)
        self._queue_depth = queue_depth()
        # The real package exchanges handles here, so it waits for every rank.
        dist.barrier(group=group)

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self._deferred.finish()
        self._begin("destroy")
        dist.barrier(group=self._process_group)
        super().destroy()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        _check_known(num_ranks)
        return drop_in.Buffer.get_dispatch_config(num_ranks)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        self._deferred.begin(previous_event, async_finish, allocate_on_comm_stream)
        require(topk_idx.dim() == 2, "topk_idx.dim() == 2")
        require(topk_idx.is_contiguous(), "topk_idx.is_contiguous()")
        require(num_experts > 0, "num_experts > 0")
        require_ids(topk_idx, num_experts)
        per_rank, per_node, per_expert, is_in_rank, _ = super().get_dispatch_layout(
            topk_idx, num_experts
        )
        event = self._deferred.hand_out([per_rank, per_expert, is_in_rank], async_finish)
        return per_rank, per_node, per_expert, is_in_rank, event

    def dispatch(
        self,
        x: XTensors,
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchResult:
        ranks = self._begin_normal(config, self.get_dispatch_config)
        self._deferred.begin(previous_event, async_finish, allocate_on_comm_stream)
        data, scales = x if isinstance(x, tuple) else (x, None)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            normal_checks.check_handle(handle, ranks)
            normal_checks.check_sent(normal_checks.Sent(x=data, scales=scales), handle[4], ranks)
            received = super().dispatch(x, handle=handle)[0]
            event = self._deferred.hand_out(_tensors(received), async_finish)
            return received, None, None, None, None, event
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        sent = normal_checks.Sent(
            x=data, scales=scales, topk_idx=topk_idx, topk_weights=topk_weights
        )
        normal_checks.check_sent(sent, is_token_in_rank, ranks)
        has_topk = topk_idx is not None
        require(has_topk or num_worst_tokens == 0, "num_worst_tokens needs topk_idx.has_value()")
        normal_checks.check_counts(
            sent, num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank, ranks
        )
        received, ids, weights, per_expert, made, _ = super().dispatch(
            x,
            num_tokens_per_rank=num_tokens_per_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
            config=ranks.config,
        )
        assert made is not None, "no handle came"
        num_rows = int(made[0][-1, self.rank])
        for tensor in (*_tensors(received), *([] if weights is None else [weights])):
            poison(tensor[num_rows:])
        outputs = [*_tensors(received), *(each for each in (ids, weights) if each is not None)]
        own = [tensor for tensor in made if tensor is not is_token_in_rank]
        event = self._deferred.hand_out([*outputs, *own], async_finish)
        return received, ids, weights, per_expert, made, event

    def combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: XTensors | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        ranks = self._begin_normal(config, self.get_combine_config)
        self._deferred.begin(previous_event, async_finish, allocate_on_comm_stream)
        normal_checks.check_handle(handle, ranks)
        biases = [] if bias is None else _tensors(bias)
        assert len(biases) <= 2
        normal_checks.check_combined(x, topk_weights, biases, handle, ranks)
        combined, weights, _ = super().combine(x, handle, topk_weights, bias)
        outputs = [combined] if weights is None else [combined, weights]
        return combined, weights, self._deferred.hand_out(outputs, async_finish)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        self._deferred.finish()
        self._for_low_latency()
        self._state.clean(Sizes(num_max_dispatch_tokens_per_rank, hidden, num_experts))

    # The recorded release has none of the arguments of branches.
    def low_latency_dispatch(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> LowLatencyResult:
        max_tokens, stats = num_max_dispatch_tokens_per_rank, cumulative_local_expert_recv_stats
        self._begin_strictly(max_tokens, both=async_finish and return_recv_hook)
        low_latency_checks.check_dispatch(
            x, topk_idx, max_tokens, num_experts, self.group_size, is_fp8=use_fp8
        )
        low_latency_checks.check_stats(
            stats, dispatch_wait_recv_cost_stats, num_experts, self.group_size
        )
        hidden = x.shape[1]
        low_latency_checks.check_bytes(max_tokens, hidden, num_experts, self.num_rdma_bytes)
        rule = "UE8M0 SF requires round_scale=True"
        require(not use_fp8 or not use_ue8m0 or round_scale, rule)
        generator = self._state.begin(Sizes(max_tokens, hidden, num_experts))
        recv_x, count, behind, _, hook = super().low_latency_dispatch(
            x,
            topk_idx,
            max_tokens,
            num_experts,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            return_recv_hook=True,
        )
        assert hook is not None, "asked for"
        data, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
        handle = StrictHandle.over(behind)
        received = Result(x=data, scales=scales, count=count, handle=handle)
        result = Result(
            x=poisoned_like(data),
            scales=None if scales is None else poisoned_like(scales),
            count=poisoned_like(count),
            handle=handle,
        )
        self._state.keep(result)

        def receive() -> None:
            hook()
            self._state.is_unreceived = False
            result.take(received, generator)
            if stats is not None:
                stats.add_(result.count)

        event, own_hook = self._finish(receive, async_finish, return_recv_hook)
        own_x = result.x if result.scales is None else (result.x, result.scales)
        return own_x, result.count, handle, event, own_hook

    def low_latency_combine(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        self._begin_strictly(handle[2], both=async_finish and return_recv_hook)
        require(not (use_logfmt and zero_copy), "not (zero_copy and use_logfmt)")
        assert isinstance(handle, StrictHandle), "as low_latency_dispatch() made it"
        low_latency_checks.check_combine(x, topk_idx, topk_weights, handle, self.group_size, out)
        low_latency_checks.check_stats(
            None, combine_wait_recv_cost_stats, handle[4], self.group_size
        )
        handle.require_written()
        rows = self._state.next_combine_buffer(handle) if zero_copy else x
        back = unshuffled(rows, handle)
        if use_logfmt:
            back = logfmt.rounded(back)
        self._state.begin(Sizes(handle[2], x.shape[2], handle[4]))
        self._state.forget(handle)
        combined, _, hook = super().low_latency_combine(
            back,
            topk_idx,
            topk_weights,
            handle.behind,
            return_recv_hook=True,
        )
        assert hook is not None, "asked for"
        # `out` may share memory with x, which has already been sent.
        result = poisoned_like(combined) if out is None else poison(out)

        def receive() -> None:
            hook()
            self._state.is_unreceived = False
            result.copy_(combined)

        event, own_hook = self._finish(receive, async_finish, return_recv_hook)
        return result, event, own_hook

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> Tensor:
        self._for_low_latency()
        return self._state.next_combine_buffer(handle)

    def _begin_normal(
        self, config: Config | None, default: Callable[[int], Config]
    ) -> normal_checks.Ranks:
        """Begin a call of normal mode, which leaves its words in the buffer of low latency."""
        _check_torch_deterministic()
        require(self.group_size <= 8, ONE_HOST)
        config = default(self.group_size) if config is None else config
        num_channels(config)
        self._state.soil()
        return normal_checks.Ranks(
            group=self._process_group, num_nvl_bytes=self.num_nvl_bytes, config=config
        )

    def _begin_strictly(self, max_tokens: int, *, both: bool) -> None:
        _check_torch_deterministic()
        self._for_low_latency()
        rule = "nvshmem_qp_depth >= (num_max_dispatch_tokens_per_rank + 1) * 2"
        require_size(self._queue_depth >= (max_tokens + 1) * 2, rule)
        require(not both, "not(async and return_recv_hook)")
        self._deferred.finish()

    def _for_low_latency(self) -> None:
        require(self.low_latency_mode, "low_latency_mode")

    def _finish(
        self, receive: Callable[[], None], is_async: bool, with_hook: bool
    ) -> tuple[EventOverlap, Callable[[], None] | None]:
        """Receive now, at the event or in the hook."""
        if with_hook:
            return EventOverlap(), receive
        if is_async:
            return EventOverlap(self._deferred.launch(receive)), None
        receive()
        return EventOverlap(), None


def _tensors(x: XTensors) -> list[Tensor]:
    return list(x) if isinstance(x, tuple) else [x]


def _check_known(num_ranks: int) -> None:
    known = num_ranks in _KNOWN_RANKS or not is_enforced()
    assert known, f"Unsupported number of EP ranks: {num_ranks}"


def _check_torch_deterministic() -> None:
    # The real package asserts it: filling new memory would race with its stream.
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    both = torch.are_deterministic_algorithms_enabled() and fills
    require_size(not both, "deterministic algorithms do not fill uninitialized memory")
