"""Imitate ElasticBuffer: the calls of the package, with its parameters in its order."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.types import align_up
from fakes.deep_ep.v2.combine import run_combine
from fakes.deep_ep.v2.dispatch import run_dispatch
from fakes.deep_ep.v2.events import EventHandle, EventOverlap
from fakes.deep_ep.v2.handle import EPHandle
from fakes.deep_ep.v2.limits import (
    MAX_RANKS,
    MAX_SCALEUP_RANKS,
    NUM_DEVICE_SMS,
    check_buffer_bytes,
    check_sizing,
    limit,
    require,
)
from fakes.deep_ep.v2.records import CombineRequest, DispatchRequest, Domain
from fakes.deep_ep.v2.sizes import buffer_bytes

# GB/s of one direction of NVLink on an H200, which the package would ask the machine for.
_NVLINK_GBS = 450.0
# Queue pairs that the package allocates on its own, in hybrid mode and without it.
_DEFAULT_QPS_HYBRID = 129
_DEFAULT_QPS_DIRECT = 17

_Rows = Tensor | tuple[Tensor, Tensor]


class ElasticBuffer:
    """Dispatch and combine between the ranks of a gloo process group, all of one NVLink domain.

    Attributes (as in the package): group, rank_idx, num_ranks, num_bytes, num_max_tokens_per_rank,
    the domain sizes and what the constructor was told.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self.group = group
        self.rank_idx = group.rank()
        self.num_ranks = group.size()
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.deterministic = deterministic
        self.explicitly_destroy = explicitly_destroy
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        limit(self.num_ranks <= MAX_RANKS, "num_ranks <= kNumMaxRanks")
        limit(self.num_ranks <= MAX_SCALEUP_RANKS, "num_scaleup_ranks <= 64")
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(
                group,
                num_max_tokens_per_rank,
                hidden,
                num_topk,
                use_fp8_dispatch,
                allow_hybrid_mode,
                allow_multiple_reduction,
            )
        check_buffer_bytes(num_bytes, num_cpu_bytes)
        self.num_bytes = num_bytes
        default_qps = _DEFAULT_QPS_HYBRID if allow_hybrid_mode else _DEFAULT_QPS_DIRECT
        self.num_allocated_qps = num_allocated_qps or default_qps
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self._in_flight: list[EventHandle] = []
        # None after destroy(). Seeded, so that a failure can be repeated; each call draws on.
        self._domain: Domain | None = Domain(
            group=group,
            rank=self.rank_idx,
            num_ranks=self.num_ranks,
            num_bytes=num_bytes,
            allow_multiple_reduction=allow_multiple_reduction,
            deterministic=deterministic,
            generator=torch.Generator().manual_seed(1 + self.rank_idx),
        )
        dist.barrier(group)

    def destroy(self) -> None:
        """Destroy the buffer, which was made with explicitly_destroy=True. Collective."""
        assert self.explicitly_destroy
        if self._domain is not None:
            dist.barrier(self.group)
            self._domain = None

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of a buffer for such batches, a multiple of 2 MB; num_topk 0 means 32."""
        del allow_hybrid_mode  # One host: there is nothing to be hybrid between.
        check_sizing(num_max_tokens_per_rank, hidden)
        return buffer_bytes(
            num_ranks=group.size(),
            max_tokens=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            allow_multiple_reduction=allow_multiple_reduction,
        )

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Wait for all ranks."""
        del use_comm_stream, with_cpu_sync, sequential  # One stream, and it is the host's.
        dist.barrier(self._alive().group)

    @staticmethod
    def capture() -> EventHandle:
        """Record an event of the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.Stream:
        """Return the one stream of a CPU, which orders nothing."""
        return cast(torch.Stream, torch.cpu.current_stream())

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Ranks over RDMA, ranks over NVLink."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Scale-out ranks, scale-up ranks."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """SMs whose memory traffic keeps NVLink busy with balanced routes, even, 4 to 132.

        Raises:
            TypeError: num_experts is None, as dispatch() passes it for cached routes; so does the
                package. Pass num_sms to dispatch() there.
        """
        assert num_scaleout_topk == 0
        del rdma_gbs
        assert num_experts % self.num_ranks == 0
        others = num_experts - num_experts // self.num_ranks
        missed = math.comb(others, num_topk) / math.comb(num_experts, num_topk)
        num_expected_ranks = self.num_ranks * (1 - missed)
        remote_share = 1 - 1 / self.num_ranks
        num_sms = float(NUM_DEVICE_SMS)
        if remote_share > 0 and num_expected_ranks > 0:
            rows_gbs = (nvlink_gbs or _NVLINK_GBS) / remote_share
            num_sms = max(rows_gbs / num_expected_ranks / sm_read_gbs, rows_gbs / sm_write_gbs)
        # A quarter more than the model says, and pairs of them.
        wanted = align_up(max(4, math.ceil(num_sms * 1.25)), 2)
        wanted = wanted if self.prefer_overlap_with_compute else max(wanted, 64)
        return min(wanted, NUM_DEVICE_SMS)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs, at most those allocated."""
        wanted = num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)

    def dispatch(
        self,
        x: _Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[_Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Send each token to the ranks of its experts. N rows come, each at most M from a rank.

        Args:
            x: [T, H], bfloat16; or ([T, H] float8_e4m3fn, [T, S] words of 4 B, any strides).
            topk_idx: [T, K], int64, -1 means none; None with a handle.
            topk_weights: [T, K], float32; None with a handle.
            do_cpu_sync: exact sizes and counts on the host; else the worst case. Not with a handle.
            do_expand: a row for each (token, expert), by expert; else for each (token, rank).

        Returns:
            The rows; [N, K] experts of this rank or None if expanded; weights [N, K], or [N] if
            expanded; the handle (the given one, if cached); the event.

        Collective: all ranks of the group, same M, H, K and num_experts; T may differ.
        Host sync: always here.   Lifetime: the tensors are the caller's.
        Raises:
            RuntimeError: an assertion of the package's C++.
            AssertionError: an assertion of its Python.
        """
        domain = self._alive()
        # The package looks at num_experts before it looks into the handle: of cached routes it
        # knows it only if the caller repeats it, and fails unless num_sms is given.
        routes = cast(EPHandle, handle).topk_idx if topk_idx is None else topk_idx
        num_sms = num_sms or self.get_theoretical_num_sms(cast(int, num_experts), routes.shape[1])
        self._check_qps(num_sms, num_qps)
        max_tokens = num_max_tokens_per_rank
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None, "topk_weights must be None with a cached handle"
            assert not do_cpu_sync, "Cannot do CPU sync with cached handle"
            num_experts = _or(num_experts, handle.num_experts)
            expert_alignment = _or(expert_alignment, handle.expert_alignment)
            max_tokens = _or(max_tokens, handle.num_max_tokens_per_rank)
            given = (num_experts, expert_alignment, max_tokens)
            cached = (handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank)
            assert given == cached
        if num_experts is None:
            raise TypeError("dispatch(): incompatible function arguments: num_experts is None")
        rows, sf = x if isinstance(x, tuple) else (x, None)
        self._begin((previous_event, previous_event_before_epilogue), allocate_on_comm_stream)
        result = run_dispatch(
            DispatchRequest(
                x=rows,
                sf=sf,
                topk_idx=routes,
                topk_weights=topk_weights,
                recv_stats=cumulative_local_expert_recv_stats,
                num_experts=num_experts,
                max_tokens=_or(max_tokens, self.num_max_tokens_per_rank),
                expert_alignment=_or(expert_alignment, 1),
                num_sms=num_sms,
                handle=handle,
                do_handle_copy=do_handle_copy,
                do_cpu_sync=handle is None and do_cpu_sync is not False,
                do_expand=do_expand,
                do_zero_padding=do_zero_padding,
                is_sf_col_major=use_tma_aligned_col_major_sf,
            ),
            domain,
        )
        event = self._end(
            async_with_compute_stream,
            (result.recv_x, result.recv_sf, result.recv_topk_idx, result.recv_topk_weights),
        )
        recv = result.recv_x if result.recv_sf is None else (result.recv_x, result.recv_sf)
        return recv, result.recv_topk_idx, result.recv_topk_weights, result.handle, event

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        # The package's default is None too.
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sum the rows of each token over the ranks, unweighted.

        Args:
            x: [N, H], bfloat16, rows as dispatch() returned them.
            topk_weights: [N, K], float32, sent back along; not if expanded.
            bias: none, one or two of [T, H], bfloat16, added to the sums.

        Returns:
            [T, H], bfloat16; [T, K], float32, or None; the event.

        Collective: all ranks of the group.   Host sync: always here.
        Raises:
            RuntimeError: an assertion of the package's C++.
        """
        domain = self._alive()
        num_sms = num_sms or handle.num_sms
        self._check_qps(num_sms, num_qps)
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        assert not isinstance(bias, tuple) or len(bias) == 2
        self._begin((previous_event, previous_event_before_epilogue), allocate_on_comm_stream)
        result = run_combine(
            CombineRequest(
                x=x, topk_weights=topk_weights, biases=biases, handle=handle, num_sms=num_sms
            ),
            domain,
        )
        event = self._end(async_with_compute_stream, (result.x, result.topk_weights))
        return result.x, result.topk_weights, event

    def _alive(self) -> Domain:
        if self._domain is None:
            raise AttributeError("'NoneType' object: the buffer is destroyed")
        return self._domain

    def _check_qps(self, num_sms: int, num_qps: int) -> None:
        num_qps = num_qps or self.get_theoretical_num_qps(num_sms)
        assert num_qps <= self.num_allocated_qps, "Allocated QPs are not enough"

    def _begin(self, events: tuple[Any, Any], allocate_on_comm_stream: bool) -> None:
        for event in events:
            if event is not None and not isinstance(event, EventHandle):
                raise TypeError(f"incompatible function arguments: {type(event).__name__}")
        previous_event = events[0]
        # With an event, computation overlaps the call and must not get the memory of its tensors.
        require(previous_event is None or allocate_on_comm_stream, "allocate_on_comm_stream")
        # Calls of one buffer follow one another on its stream, waited for or not.
        for event in self._in_flight:
            event.current_stream_wait()
        self._in_flight.clear()

    def _end(self, is_async: bool, results: tuple[Tensor | None, ...]) -> EventOverlap:
        if not is_async:
            return EventOverlap(None)
        event = EventHandle.holding(results)
        self._in_flight.append(event)
        return EventOverlap(event)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
