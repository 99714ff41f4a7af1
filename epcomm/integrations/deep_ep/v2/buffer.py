"""ElasticBuffer of DeepEP V2: its calls and signatures, translated to epcomm's buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.config import Mode
from epcomm.errors import EPError, HandleError
from epcomm.integrations.deep_ep.events import AsyncCall, CommStream, EventHandle, EventOverlap
from epcomm.integrations.deep_ep.ranks import Ranks
from epcomm.integrations.deep_ep.v2 import checks, sizes
from epcomm.integrations.deep_ep.v2.calls import CombineRequest, ElasticCalls, OutputForm
from epcomm.integrations.deep_ep.v2.exchange import DispatchRequest
from epcomm.integrations.deep_ep.v2.handle import EPHandle
from epcomm.integrations.deep_ep.v2.missing import NotThere

# Queue pairs that the package allocates on its own, in hybrid mode and without it.
_QPS_HYBRID, _QPS_DIRECT = 129, 17
# Of each SM, and the most without hybrid mode.
_QPS_PER_SM, _MOST_QPS_DIRECT = 16, 9

XTensors = Tensor | tuple[Tensor, Tensor]
DispatchResult = tuple[XTensors, Tensor | None, Tensor | None, EPHandle, EventOverlap]


class ElasticBuffer(NotThere):
    """Dispatch and combine of V2 between the ranks of one host.

    Every call but the statics and the sizes is collective over the group. Sizes in bytes are kept
    and mean nothing: epcomm's buffers open at the first call of a shape.

    Attributes, as in the package: group, rank_idx, num_ranks, num_bytes, num_max_tokens_per_rank,
    the sizes of domains, and what the constructor was told.
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
        """Wrap the ranks. Local; no rank is waited for.

        Rows always come in the order of (source rank, token), so `deterministic` changes nothing.
        """
        self._ranks = Ranks(group)
        self._comm_stream = CommStream()
        self._calls = ElasticCalls(self._ranks, allow_multiple_reduction=allow_multiple_reduction)
        self.group = group
        self.rank_idx, self.num_ranks = self._ranks.rank, self._ranks.size
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
        self.num_bytes, self.num_cpu_bytes = num_bytes, num_cpu_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.explicitly_destroy = explicitly_destroy
        self.num_allocated_qps = num_allocated_qps or (
            _QPS_HYBRID if allow_hybrid_mode else _QPS_DIRECT
        )
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()

    def destroy(self) -> None:
        """Close the epcomm buffers, together with all ranks; no call is possible afterwards."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self._ranks.close()

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
        """Return the bytes that V2 would allocate, a multiple of 2 MB; num_topk 0 means 32."""
        del allow_hybrid_mode  # One host: there is nothing to be hybrid between.
        return sizes.buffer_bytes(
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
        """Wait for all ranks, on the host."""
        del use_comm_stream, with_cpu_sync, sequential
        self._ranks.check_open("barrier")
        dist.barrier(self.group)

    @staticmethod
    def capture() -> EventHandle:
        """Record an event after all work on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.Stream:
        """Return the stream of asynchronous calls."""
        return cast(torch.Stream, self._comm_stream.of(self._ranks.device))

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return the ranks over RDMA, and those over NVLink."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return the scale-out ranks and the scale-up ranks."""
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
        """Return the SMs whose memory traffic keeps NVLink busy, even. Local."""
        del num_scaleout_topk, rdma_gbs  # Of several hosts.
        return sizes.theoretical_num_sms(
            self.num_ranks,
            num_experts,
            num_topk,
            nvlink_gbs=nvlink_gbs,
            sm_read_gbs=sm_read_gbs,
            sm_write_gbs=sm_write_gbs,
            is_alone=not self.prefer_overlap_with_compute,
        )

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return the queue pairs that V2 would use, at most those allocated. Local."""
        wanted = (
            num_sms * _QPS_PER_SM + 1 if self.allow_hybrid_mode else min(num_sms, _MOST_QPS_DIRECT)
        )
        return min(wanted, self.num_allocated_qps)

    def dispatch(
        self,
        x: XTensors,
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
    ) -> DispatchResult:
        """Send each token to the ranks of its experts, or other rows along a handle.

        Args:
            x: [T, H], bfloat16; or ([T, H] float8_e4m3fn, [T, S] scales of 4 B, any strides).
            topk_idx: [T, K], int64, -1 means none; None with a handle.
            topk_weights: [T, K], float32, or None, alike on all ranks; with a handle too.
            cumulative_local_expert_recv_stats: [L], int32, to which counts are added.
            num_max_tokens_per_rank: M, equal on all ranks; None: as in the constructor.
            previous_event, previous_event_before_epilogue: what the call waits for.
            handle: of an earlier dispatch, whose routes the rows take.
            do_cpu_sync: exact sizes and counts on the host; else the worst case. Not with a handle.
            do_expand: a row for each (token, expert), by expert; else for each (token, rank). Along
                a handle only if it was made so.
            do_zero_padding: rows of alignment are zero; they are undefined else.

        Returns:
            The rows, at most M from a rank, by (source rank, token) or by (expert, source rank,
            token); [N, K] experts of this rank, -1 for others, None if expanded; weights [N, K], or
            [N] if expanded; the handle, which is the given one; the event, empty without
            async_with_compute_stream. Without CPU sync, rows behind those that came are undefined,
            and their ids are -1.

        Collective: all ranks of the group, same M, H, K and num_experts; T may differ.
        Host sync: one with do_cpu_sync, none without it and along a handle of this buffer. CPU
            ranks compare a handle of another buffer first.
        Graph capture: where there is no host sync, once the shape was seen.
        Lifetime: the tensors are the caller's.
        Raises:
            ShapeError, CapacityError, ConfigError: an argument is wrong, or ranks disagree on M, H,
                K, E, a dtype or an option; on every rank. GPUs: docs/migrating_from_deepep.md.
            HandleError: the handle is of other sizes or no EPHandle, as above; or the buffer is
                destroyed.
        """
        self._ranks.check_open("dispatch")
        events = _events(previous_event, previous_event_before_epilogue)
        form = OutputForm(
            do_zero_padding=do_zero_padding, is_sf_col_major=use_tma_aligned_col_major_sf
        )
        ranks, top_k = self._ranks, 0
        if isinstance(handle, EPHandle):
            ranks.compare_owner("dispatch", handle.arrived.way.buffer)
        max_tokens = _or(num_max_tokens_per_rank, self.num_max_tokens_per_rank)
        try:
            checks.check_options(
                "dispatch", {"num_sms": num_sms, "num_qps": num_qps}, events, ranks
            )
            rows = checks.rows_of(x, ranks.where)
            ranks.follow(rows.x.device)
            if handle is None:
                checks.check_rows(rows, ranks)
                sizes = {
                    "num_max_tokens_per_rank": max_tokens,
                    "expert_alignment": _or(expert_alignment, 1),
                }
                top_k = checks.check_sizes(topk_idx, num_experts, sizes, ranks)
            else:
                given = {
                    "num_experts": num_experts,
                    "expert_alignment": expert_alignment,
                    "num_max_tokens_per_rank": num_max_tokens_per_rank,
                }
                forbidden = {"topk_idx": topk_idx, "do_cpu_sync": do_cpu_sync}
                checks.check_handle(handle, given, forbidden, ranks, do_expand=do_expand)
                checks.check_rows(rows, ranks)
                checks.check_along(rows, topk_weights, handle, ranks)
        except EPError as error:
            if isinstance(handle, EPHandle):
                self._calls.refuse_along(handle, topk_weights, error)
            if handle is not None:
                ranks.refuse_combine(Mode.NORMAL, error)
            ranks.refuse(Mode.NORMAL, error, is_static=do_cpu_sync is False)
        with self._call(rows.x, list(events.values()), async_with_compute_stream) as call:
            if handle is not None:
                out = self._calls.dispatch_along(
                    rows, topk_weights, handle, form, do_expand=do_expand
                )
            else:
                request = DispatchRequest(
                    rows=rows,
                    topk_idx=cast(Tensor, topk_idx),
                    topk_weights=topk_weights,
                    recv_stats=cumulative_local_expert_recv_stats,
                    num_experts=cast(int, num_experts),
                    max_tokens=max_tokens,
                    expert_alignment=_or(expert_alignment, 1),
                    num_sms=num_sms or self.get_theoretical_num_sms(cast(int, num_experts), top_k),
                    asked_sms=num_sms or None,
                    do_handle_copy=do_handle_copy,
                    do_cpu_sync=do_cpu_sync is not False,
                    do_expand=do_expand,
                )
                out = self._calls.dispatch(request, form)
            given_tensors = [rows.x, rows.scales, topk_idx, topk_weights]
            event = self._calls.event(call, given_tensors, out.tensors())
        return out.rows.as_given(), out.topk_idx, out.topk_weights, out.handle, event

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
            x: [N, H], bfloat16, rows as dispatch() returned them; any number of times. If expanded,
                and the program has read or set handle.recv_src_metadata: any rows, which it names.
            topk_weights: [N, K], float32, of which those of experts of this rank are returned, or
                [N] if expanded, the weight of each row; alike on all ranks.
            bias: none, one or two of [T, H], bfloat16, with which the sums begin; these are
                float32, and rounded once.
            previous_event, previous_event_before_epilogue: what the call waits for.

        Returns:
            [T, H], bfloat16; [T, K], float32, 0 where no weight came, or None; the event.

        Collective: all ranks of the group.   Host sync: none.
        Graph capture: with a handle that was made without CPU sync.
        Raises:
            ShapeError, HandleError: x, topk_weights or bias are not those of the handle, or the
                handle is no EPHandle; on every rank. On GPUs on this rank alone: the sums of the
                others are NaN, or, where the handle is no EPHandle, they raise EPTimeout.
            HandleError: the buffer is destroyed.
        """
        self._ranks.check_open("combine")
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        try:
            checks.known_handle("combine", handle, self._ranks)
        except HandleError as error:
            self._ranks.refuse_combine(Mode.NORMAL, error)
        self._ranks.compare_owner("combine", handle.arrived.way.buffer)
        events = _events(previous_event, previous_event_before_epilogue)
        try:
            checks.check_options(
                "combine", {"num_sms": num_sms, "num_qps": num_qps}, events, self._ranks
            )
            checks.check_combine(x, handle, topk_weights, biases, self._ranks)
        except EPError as error:
            self._calls.refuse_combine(handle, error)
        request = CombineRequest(x=x, handle=handle, topk_weights=topk_weights, biases=biases)
        with self._call(x, list(events.values()), async_with_compute_stream) as call:
            combined, weights = self._calls.combine(request)
            event = self._calls.event(call, [x, topk_weights, *biases], [combined, weights])
        return combined, weights, event

    @contextmanager
    def _call(
        self, like: Tensor, events: Sequence[EventHandle | None], is_async: bool
    ) -> Iterator[AsyncCall]:
        """Run a call on its stream, after all of these events or the current stream."""
        with self._comm_stream.call(like.device, events, is_async=is_async) as call:
            yield call


def _events(
    first: EventHandle | None, before_epilogue: EventHandle | None
) -> dict[str, EventHandle | None]:
    """Return the events that a call waits for, by the names of its arguments."""
    given: dict[str, EventHandle | EventOverlap | None] = {
        "previous_event": first,
        "previous_event_before_epilogue": before_epilogue,
    }
    return {
        name: event.event if isinstance(event, EventOverlap) else event
        for name, event in given.items()
    }


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
