"""Imitate Buffer, the calls of deep_ep V1, with its signatures."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.config import environment
from fakes.deep_ep.limits import require, require_size
from fakes.deep_ep.v1 import config as configs
from fakes.deep_ep.v1 import normal
from fakes.deep_ep.v1.config import Config
from fakes.deep_ep.v1.event import CommStream, EventHandle, EventOverlap
from fakes.deep_ep.v1.handle import NormalHandle
from fakes.deep_ep.v1.layout import layout_of
from fakes.deep_ep.v1.low_latency import LowLatency

XTensors = Tensor | tuple[Tensor, Tensor]
DispatchResult = tuple[
    XTensors,
    Tensor | None,
    Tensor | None,
    list[int] | None,
    tuple[Tensor, ...] | None,
    EventOverlap,
]

_ONE_HOST = "the ranks of the fake are on one host: internode kernels are not reachable"
# The real package counts 16 bytes at a time in an int32.
_MAX_BUFFER_BYTES = 16 * (2**31 - 1)


class Buffer:
    """Normal and low-latency dispatch and combine over the ranks of a gloo process group.

    Every call but the statics is collective over the group. Nothing is sent before the arguments
    of this rank are checked; where ranks disagree, the fake raises on all of them if it can see it.
    """

    num_sms: int = 20

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
        comm: object | None = None,
    ) -> None:
        if group is None:
            if comm is None:
                raise ValueError("Either 'group' or 'comm' must be provided.")
            raise RuntimeError("the fake of deep_ep has no MPI; pass a process group of gloo")
        self.rank = group.rank()
        self.group = group
        self.group_size = group.size()
        _check_sizes(self.group_size, num_nvl_bytes, num_rdma_bytes, low_latency_mode)
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.runtime: CommStream | None = CommStream()
        self._low_latency: LowLatency | None = None
        if low_latency_mode:
            assert num_qps_per_rank > 0
            self.nvshmem_qp_depth = _queue_depth()
            self._low_latency = LowLatency(group, num_rdma_bytes, enable_shrink)
        # The real one exchanges handles, so a rank that does not come is missed here.
        dist.barrier(group=group)

    def destroy(self) -> None:
        """Release everything, together with all ranks; no call is possible afterwards."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self._stream.finish()
        dist.barrier(group=self.group)
        self.runtime = None

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return whether FP8 and low latency are compiled in."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set it for all buffers of the process, as the real one does."""
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Record an event after all work on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """num_rdma_bytes for low latency; num_ranks does not matter."""
        align = configs.BUFFER_ALIGNMENT_BYTES
        num_bytes = configs.low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_experts)
        # One more than needed where it is a multiple already.
        return (num_bytes + align) // align * align

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return the recommended Config for a number of ranks."""
        return configs.dispatch_config(Buffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return the recommended Config for a number of ranks."""
        return configs.combine_config(Buffer.num_sms, num_ranks)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Return tokens per rank, RDMA rank (None) and expert, is_token_in_rank and an event."""
        stream = self._stream
        stream.begin(previous_event, async_finish, allocate_on_comm_stream)
        layout = layout_of(topk_idx, num_experts, self.group_size)
        per_rank, per_expert = layout.tokens_per_rank, layout.tokens_per_expert
        event = stream.hand_out([per_rank, per_expert, layout.is_in_rank], async_finish)
        return per_rank, None, per_expert, layout.is_in_rank, event

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
        """Send rows to the ranks of their experts; with a handle, the ways of an earlier call.

        Returns:
            Received x as it came (with scales or without), local ids, weights, rows per local
            expert aligned up (an empty list with num_worst_tokens), handle, event; None instead of
            ids, weights, counts and handle if a handle came.
        """
        del num_tokens_per_rdma_rank
        _check_torch_deterministic()
        config = self.get_dispatch_config(self.group_size) if config is None else config
        stream, ranks = self._begin_normal(config), self._ranks(config)
        stream.begin(previous_event, async_finish, allocate_on_comm_stream)
        data, scales = x if isinstance(x, tuple) else (x, None)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            known = NormalHandle.of(handle, self.group_size, configs.num_channels(config))
            sent = normal.Sent(x=data, scales=scales)
            normal.check_sent(sent, known.is_in_rank, ranks)
            received = normal.dispatch(sent, known, ranks, num_local=0)
            event = stream.hand_out(received.tensors(), async_finish)
            return _as_sent(received), None, None, None, None, event
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        sent = normal.Sent(x=data, scales=scales, topk_idx=topk_idx, topk_weights=topk_weights)
        normal.check_sent(sent, is_token_in_rank, ranks)
        has_topk = topk_idx is not None
        require(has_topk or num_worst_tokens == 0, "num_worst_tokens needs topk_idx.has_value()")
        counts = normal.Counts(per_rank=num_tokens_per_rank, per_expert=num_tokens_per_expert)
        made, per_expert = normal.notify(sent, counts, is_token_in_rank, ranks, num_worst_tokens)
        received = normal.dispatch(sent, made, ranks, per_expert.shape[0])
        own = [tensor for tensor in made.as_tuple() if tensor is not is_token_in_rank]
        event = stream.hand_out([*received.tensors(), *own], async_finish)
        aligned = [
            -(-count // expert_alignment) * expert_alignment for count in per_expert.tolist()
        ]
        rows_per_expert = [] if num_worst_tokens else aligned
        ids, weights = received.topk_idx, received.topk_weights
        return _as_sent(received), ids, weights, rows_per_expert, made.as_tuple(), event

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
        """Sum over the ranks of each token, without weights; weights are summed beside it."""
        _check_torch_deterministic()
        config = self.get_combine_config(self.group_size) if config is None else config
        stream = self._begin_normal(config)
        stream.begin(previous_event, async_finish, allocate_on_comm_stream)
        known = NormalHandle.of(handle, self.group_size, configs.num_channels(config))
        biases = [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias]
        assert len(biases) <= 2
        combined, weights = normal.combine(x, topk_weights, biases, known, self._ranks(config))
        handed_out = [combined] if weights is None else [combined, weights]
        return combined, weights, stream.hand_out(handed_out, async_finish)

    def internode_dispatch(
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
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchResult:
        """Fail: the imitation has only one host."""
        raise RuntimeError(f"internode_dispatch: {_ONE_HOST}")

    def internode_combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...] | list[Tensor],
        topk_weights: Tensor | None = None,
        bias: XTensors | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Fail: the imitation has only one host."""
        raise RuntimeError(f"internode_combine: {_ONE_HOST}")

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Make the buffer ready for low latency with these sizes."""
        self._stream.finish()
        self._for_low_latency().clean(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def low_latency_dispatch(
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
    ) -> tuple[
        XTensors,
        Tensor,
        tuple[Tensor, Tensor, int, int, int],
        EventOverlap,
        Callable[[], None] | None,
    ]:
        """Send rows to their experts' slabs; quantised here with use_fp8.

        dispatch_wait_recv_cost_stats is checked and left alone: the fake measures nothing.
        """
        _check_torch_deterministic()
        low_latency, stream = self._for_low_latency(), self._stream
        self._check_queue_depth(num_max_dispatch_tokens_per_rank)
        require(not (async_finish and return_recv_hook), "not(async and return_recv_hook)")
        stream.finish()
        result, receive = low_latency.dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            expert_stats=cumulative_local_expert_recv_stats,
            wait_stats=dispatch_wait_recv_cost_stats,
            wire=low_latency.wire_format(use_fp8, round_scale, use_ue8m0),
        )
        recv_x = result.x if result.scales is None else (result.x, result.scales)
        event, hook = _finish(stream, receive, async_finish, return_recv_hook)
        return recv_x, result.count, result.handle.as_tuple(), event, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Tensor, Tensor, int, int, int],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Sum the rows of each token times their weights.

        As in the real one, topk_idx and topk_weights are read when the rows are received.
        """
        _check_torch_deterministic()
        low_latency, stream = self._for_low_latency(), self._stream
        self._check_queue_depth(handle[2])
        require(not (use_logfmt and zero_copy), "not (zero_copy and use_logfmt)")
        require(not use_logfmt, "the fake has no LogFMT")
        require(not (async_finish and return_recv_hook), "not(async and return_recv_hook)")
        stream.finish()
        combined, receive = low_latency.combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            zero_copy=zero_copy,
            out=out,
            wait_stats=combine_wait_recv_cost_stats,
        )
        event, hook = _finish(stream, receive, async_finish, return_recv_hook)
        return combined, event, hook

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out, or not; the fake then refuses low latency."""
        self._masks()[rank_to_mask] = int(mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write 1 for each masked rank into int32 [W]."""
        masks = self._masks()
        require(mask_status.dtype == torch.int32, "mask_status.scalar_type() == torch::kInt32")
        require(mask_status.numel() == self.group_size, "mask_status.numel() == num_ranks")
        mask_status.copy_(masks.view(mask_status.shape))

    def low_latency_clean_mask_buffer(self) -> None:
        """Mask no rank."""
        self._masks().zero_()

    def get_next_low_latency_combine_buffer(
        self, handle: tuple[Tensor, Tensor, int, int, int]
    ) -> Tensor:
        """Return the next call's buffer, [L, W*M, H] with strides of messages, for zero_copy."""
        return self._for_low_latency().next_combine_buffer(*handle[2:])

    @property
    def _stream(self) -> CommStream:
        require(self.runtime is not None, "the buffer is destroyed")
        assert self.runtime is not None, "just required"
        return self.runtime

    def _ranks(self, config: Config) -> normal.Ranks:
        return normal.Ranks(group=self.group, num_nvl_bytes=self.num_nvl_bytes, config=config)

    def _begin_normal(self, config: Config) -> CommStream:
        require(self.group_size <= configs.MAX_NVL_PEERS, _ONE_HOST)
        configs.num_channels(config)
        if self._low_latency is not None:
            self._low_latency.soil()
        return self._stream

    def _for_low_latency(self) -> LowLatency:
        require(self._low_latency is not None, "low_latency_mode")
        assert self._low_latency is not None, "just required"
        require(self.runtime is not None, "the buffer is destroyed")
        return self._low_latency

    def _masks(self) -> Tensor:
        masks = None if self._low_latency is None else self._low_latency.masks
        require(masks is not None, "mask_buffer_ptr != nullptr and Shrink mode must be enabled")
        assert masks is not None, "just required"
        return masks

    def _check_queue_depth(self, max_tokens: int) -> None:
        rule = "nvshmem_qp_depth >= (num_max_dispatch_tokens_per_rank + 1) * 2"
        require_size(self.nvshmem_qp_depth >= (max_tokens + 1) * 2, rule)


def _finish(
    stream: CommStream, receive: Callable[[], None], is_async: bool, with_hook: bool
) -> tuple[EventOverlap, Callable[[], None] | None]:
    """Receive now, at the event or in the hook."""
    if with_hook:
        return EventOverlap(), receive
    if is_async:
        return EventOverlap(stream.launch(receive)), None
    receive()
    return EventOverlap(), None


def _as_sent(received: normal.Received) -> XTensors:
    return received.x if received.scales is None else (received.x, received.scales)


def _check_torch_deterministic() -> None:
    # The real package asserts it: filling new memory would race with its stream.
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    both = torch.are_deterministic_algorithms_enabled() and fills
    require_size(not both, "deterministic algorithms do not fill uninitialized memory")


def _check_sizes(
    num_ranks: int, num_nvl_bytes: int, num_rdma_bytes: int, low_latency_mode: bool
) -> None:
    for num_bytes in (num_nvl_bytes, num_rdma_bytes):
        is_multiple = num_bytes % configs.BUFFER_ALIGNMENT_BYTES == 0
        require_size(is_multiple, "num_bytes % NUM_BUFFER_ALIGNMENT_BYTES == 0")
        require_size(num_bytes < _MAX_BUFFER_BYTES, "num_bytes / sizeof(int4) < INT_MAX")
    fits = num_nvl_bytes < 2**31 or num_rdma_bytes == 0
    require_size(fits, "num_nvl_bytes <= INT_MAX or num_rdma_bytes == 0")
    peers = configs.MAX_NVL_PEERS
    rule = "num_ranks < NUM_MAX_NVL_PEERS or num_ranks % NUM_MAX_NVL_PEERS == 0"
    require_size(num_ranks < peers or num_ranks % peers == 0, rule)
    if num_rdma_bytes > 0:
        rule = "num_ranks > NUM_MAX_NVL_PEERS or low_latency_mode"
        require(num_ranks > peers or low_latency_mode, rule)


def _queue_depth() -> int:
    """Entries of a send queue. The real constructor also writes NVSHMEM_* for the whole process."""
    return int(environment().get("NVSHMEM_QP_DEPTH", "1024"))
