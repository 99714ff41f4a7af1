"""ElasticBuffer of DeepEP V2: its calls and signatures, translated to epcomm's buffers."""

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.errors import EPError, HandleError, ShapeError
from epcomm.integrations.deep_ep import normal
from epcomm.integrations.deep_ep.checks import FLOAT32, Absent, Check
from epcomm.integrations.deep_ep.events import AsyncCall, CommStream, EventHandle, EventOverlap
from epcomm.integrations.deep_ep.ranks import Ranks, Service
from epcomm.integrations.deep_ep.v2 import sizes
from epcomm.integrations.deep_ep.v2.handle import (
    PLAIN,
    QUANTIZED,
    Arrived,
    DispatchRequest,
    EPHandle,
    Positions,
)
from epcomm.ops.slots import as_members, gather_scalars, reduce_rows, spread_to_slots
from epcomm.types import RowsPer, align_up

# Queue pairs of each SM, and those that the package allocates in hybrid mode and without it.
_QPS_PER_SM, _QPS_HYBRID, _QPS_DIRECT = 16, 129, 17

_PEERS = "use torch.distributed.isend and irecv"
_GATHER = "use torch.distributed.all_gather_into_tensor"
_ENGRAM = "use the deep_ep package itself, on hosts with RDMA"

DispatchResult = tuple[normal.XTensors, Tensor | None, Tensor | None, EPHandle, EventOverlap]


class ElasticBuffer:
    """Dispatch and combine of V2 between the ranks of one host.

    Every call but the statics and the sizes is collective over the group. Sizes in bytes have no
    effect: epcomm's buffers open at the first call of a shape.

    Raises:
        ShapeError, CapacityError, ConfigError: an argument is wrong, or ranks disagree on M, H, K,
            E, a dtype or an option; on every rank. GPUs: docs/migrating_from_deepep.md.
        HandleError: the handle is not an EPHandle, or the buffer is destroyed.
    """

    get_engram_storage_size_hint = Absent(_ENGRAM)
    engram_write = Absent(_ENGRAM)
    engram_fetch = Absent(_ENGRAM)
    get_pp_buffer_size_hint = Absent(_PEERS)
    pp_set_config = Absent(_PEERS)
    pp_send = Absent(_PEERS)
    pp_recv = Absent(_PEERS)
    get_agrs_num_max_session_bytes = Absent(_GATHER)
    get_agrs_buffer_size_hint = Absent(_GATHER)
    create_agrs_session = Absent(_GATHER)
    destroy_agrs_session = Absent(_GATHER)
    agrs_new_session = Absent(_GATHER)
    agrs_set_config = Absent(_GATHER)
    agrs_get_inplace_tensor = Absent(_GATHER)
    all_gather = Absent(_GATHER)

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

        allow_multiple_reduction: expanded rows of a token are summed and rounded at their rank
            before the sums are sent; otherwise each row is sent, and the sum is rounded once.
        deterministic: changes nothing: rows are always in the order of (source rank, token).
        """
        self._ranks = Ranks(group)
        self._comm_stream = CommStream()
        self.group = group
        self.rank_idx, self.num_ranks = self._ranks.rank, self._ranks.size
        if num_bytes is None:
            options = (use_fp8_dispatch, allow_hybrid_mode, allow_multiple_reduction)
            num_bytes = self.get_buffer_size_hint(
                group, num_max_tokens_per_rank, hidden, num_topk, *options
            )
        self.num_bytes, self.num_cpu_bytes = num_bytes, num_cpu_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.explicitly_destroy = explicitly_destroy
        most_qps = _QPS_HYBRID if allow_hybrid_mode else _QPS_DIRECT
        self.num_allocated_qps = num_allocated_qps or most_qps
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
        num_tokens, top_k = (group.size(), num_max_tokens_per_rank), num_topk or sizes.MAX_TOPK
        row_bytes, num_words = 2 * hidden, 0
        if use_fp8_dispatch:
            row_bytes, num_words = hidden, -(-hidden // sizes.HIDDEN_PER_SCALE_WORD)
        dispatch = sizes.dispatch_bytes(*num_tokens, row_bytes, num_words, top_k)
        combine = sizes.combine_bytes(*num_tokens, hidden, top_k, allow_multiple_reduction)
        return align_up(max(dispatch, combine), sizes.BUFFER_ALIGNMENT_BYTES)

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
        """Return the numbers of hosts and of ranks of a host: all ranks are on one host."""
        return 1, self.num_ranks

    get_logical_domain_size = get_physical_domain_size

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
        """Return the SMs, an even number, whose writes keep NVLink busy. Local.

        nvlink_gbs: GB/s of one direction, 0 for those of an H200.
        """
        del num_scaleout_topk, rdma_gbs  # These are for several hosts.
        del num_experts, num_topk, sm_read_gbs  # An SM reads a token once, and so writes more.
        num_others = max(self.num_ranks - 1, 1)
        num_sms = (nvlink_gbs or sizes.NVLINK_GBS) * self.num_ranks / num_others / sm_write_gbs
        least = sizes.MIN_SMS if self.prefer_overlap_with_compute else sizes.MIN_SMS_ALONE
        wanted = align_up(max(least, math.ceil(num_sms * sizes.SMS_MARGIN)), 2)
        return min(wanted, sizes.NUM_DEVICE_SMS)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return the queue pairs that V2 would use, at most those allocated. Local."""
        return min(num_sms * _QPS_PER_SM + 1, self.num_allocated_qps)

    def dispatch(
        self,
        x: normal.XTensors,
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
            topk_weights: [T, K], float32, or None, alike on all ranks; with a handle too. They take
                a second exchange, of 4 * K bytes a row, or 16 bytes if rows expand.
            cumulative_local_expert_recv_stats: [L], int32, to which counts are added.
            num_max_tokens_per_rank: M, equal on all ranks; None: as in the constructor.
            previous_event, previous_event_before_epilogue: what the call waits for.
            handle: of an earlier dispatch, whose routes the rows take.
            do_cpu_sync: exact sizes and counts on the host; else the worst case. Not with a handle.
            do_expand: a row for each (token, expert), by expert; else for each (token, rank). Along
                a handle only if its dispatch expanded rows.
            do_zero_padding: rows of alignment are zero, not undefined.

        Returns:
            The rows, at most M from a rank, by (source rank, token) or by (expert, source rank,
            token); [N, K] experts of this rank, -1 for others, None if expanded; weights [N, K], or
            [N] if expanded; the handle; the event, empty without async_with_compute_stream. Without
            CPU sync, rows after the received ones are undefined, and their ids are -1.

        Collective: all ranks of the group, same M, H, K and num_experts; T may differ.
        Host sync: one with do_cpu_sync; else none.
        Graph capture: where there is no host sync, once the shape was seen.
        Lifetime: the tensors are the caller's.
        """
        ranks, rows = self._ranks, normal.Rows.of(x)
        check = Check("dispatch", ranks, rows.x)
        events = (previous_event, previous_event_before_epilogue)
        request, max_tokens = None, num_max_tokens_per_rank
        if handle is None:
            request = DispatchRequest(
                rows=rows,
                # The checks report what is missing.
                topk_idx=cast("Tensor", topk_idx),
                topk_weights=topk_weights,
                recv_stats=cumulative_local_expert_recv_stats,
                num_experts=cast("int", num_experts),
                max_tokens=self.num_max_tokens_per_rank if max_tokens is None else max_tokens,
                expert_alignment=1 if expert_alignment is None else expert_alignment,
                num_sms=num_sms,
                do_handle_copy=do_handle_copy,
                do_cpu_sync=do_cpu_sync is not False,
                do_expand=do_expand,
            )
        try:
            _check_launch(check, num_sms, num_qps, events)
            if request is not None:
                request.check(check)
            else:
                given = {
                    "num_experts": num_experts,
                    "expert_alignment": expert_alignment,
                    "num_max_tokens_per_rank": max_tokens,
                    "do_expand": do_expand or None,
                }
                absent = {"topk_idx": topk_idx, "do_cpu_sync": do_cpu_sync}
                exchange = _check_along(check, handle, given, absent)
                check.rows_along(rows, exchange, PLAIN, QUANTIZED)
                if topk_weights is not None:
                    shape = (exchange.num_tokens, exchange.spec.top_k)
                    check.tensor("topk_weights", topk_weights, shape, FLOAT32)
        except EPError as error:
            if request is None:
                exchange = handle.exchange if isinstance(handle, EPHandle) else None
                has_weights = topk_weights is not None
                normal.refuse_along(ranks, Service.NORMAL, error, exchange, has_weights=has_weights)
            normal.refuse_dispatch(
                *(ranks, request.service, error, check.spec),
                has_weights=topk_weights is not None,
                sums_each_k=do_expand and not self.allow_multiple_reduction,
            )
        with self._comm_stream.call(
            rows.x.device, *events, is_async=async_with_compute_stream
        ) as call:
            if request is not None:
                assert check.spec is not None, "it was checked"
                arrived = request.send(ranks, check.spec)
                handle = self._handle_of(request, arrived)
                received, weights = arrived.received.rows, arrived.weights
                if cumulative_local_expert_recv_stats is not None:
                    counts = handle.num_unaligned_recv_tokens_per_expert
                    cumulative_local_expert_recv_stats.add_(counts)
            else:
                assert handle is not None, "one of both is there"
                received, weights = normal.send_along(ranks, handle.exchange, rows, topk_weights)
                if weights is not None and do_expand:
                    weights = spread_to_slots(weights, handle.index)
            positions = handle.positions
            if handle.do_expand and not do_expand:
                positions = handle.positions_of(do_expand=False)
            weights = None if weights is None else positions.from_elements(weights)
            out = handle.place_rows(
                received,
                positions,
                do_expand=do_expand,
                is_sf_col_major=use_tma_aligned_col_major_sf,
            )
            ids = None if do_expand else positions.from_elements(handle.local_ids)
            made = [out.x, out.scales, ids, weights]
            self._finish(made, handle, positions, do_zero_padding=do_zero_padding)
            event = self._event(call, [rows.x, rows.scales, topk_idx, topk_weights], made)
        return out.as_given(), ids, weights, handle, event

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        # The default of the package is None too.
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
                and the program has read or set handle.recv_src_metadata: any rows that it names.
            topk_weights: [N, K], float32, of which those of experts of this rank are returned, or
                [N] if expanded, the weight of each row; alike on all ranks.
            bias: none, one or two of [T, H], bfloat16, with which the sums begin; these are
                float32, and rounded once.
            previous_event, previous_event_before_epilogue: what the call waits for.

        Returns:
            [T, H], bfloat16; [T, K], float32, 0 where no weight was sent, or None; the event.

        Collective: all ranks of the group.   Host sync: none.
        Graph capture: with a handle that was made without CPU sync.
        Lifetime: the tensors are the caller's.
        """
        ranks = self._ranks
        check = Check("combine", ranks)
        events = (previous_event, previous_event_before_epilogue)
        if not isinstance(handle, EPHandle):
            error = check.handle_error(handle, "dispatch() of an ElasticBuffer")
            normal.refuse_along(ranks, Service.NORMAL, error)
        exchange, has_weights = handle.exchange, topk_weights is not None
        try:
            _check_launch(check, num_sms, num_qps, events)
            _check_combine(check, x, handle, topk_weights)
            biases = check.biases(bias, exchange)
        except EPError as error:
            sums_each_k = handle.do_expand and not self.allow_multiple_reduction
            times = exchange.spec.top_k if sums_each_k else 1
            normal.refuse_along(ranks, Service.NORMAL, error, exchange, num_combines=times)
        normal.announce_along(ranks, exchange, "combine", x, has_weights=has_weights)
        with self._comm_stream.call(x.device, *events, is_async=async_with_compute_stream) as call:
            if handle.do_expand:
                combined, weights = self._sum_slots(
                    x, topk_weights, handle, normal.sum_of_biases(biases)
                )
            else:
                elements, weights = handle.positions.to_elements(x), topk_weights
                if weights is not None:
                    # Only the rank of an expert returns its weight.
                    weights = handle.positions.to_elements(weights)
                    weights = weights.masked_fill(handle.local_ids < 0, 0.0)
                combined, weights = normal.return_rows(
                    exchange, elements, weights, normal.sum_of_biases(biases)
                )
            if handle.is_row is not None and ranks.reads_faults:
                exchange.buffer.check()
            event = self._event(call, [x, topk_weights, *biases], [combined, weights])
        return combined, weights, event

    def _handle_of(self, request: DispatchRequest, arrived: Arrived) -> EPHandle:
        """Make the handle of a dispatch; tests let the positions differ between calls."""
        top_k = request.topk_idx.shape[1]
        num_sms = request.num_sms or self.get_theoretical_num_sms(request.num_experts, top_k)
        return EPHandle(request, arrived, num_sms)

    def _finish(
        self,
        made: Sequence[Tensor | None],
        handle: EPHandle,
        positions: Positions,
        *,
        do_zero_padding: bool,
    ) -> None:
        """Write rows that were not received; tests write more. made: x, scales, ids, weights."""
        del handle
        if do_zero_padding:
            x, scales, _, weights = made
            for tensor in (x, scales, weights):
                positions.fill_padding(tensor)

    def _event(
        self, call: AsyncCall, given: Sequence[Tensor | None], made: Sequence[Tensor | None]
    ) -> EventOverlap:
        """Return the event at the end of a call, which read and wrote these tensors."""
        return call.event([*given, *made])

    def _sum_slots(
        self, x: Tensor, weights: Tensor | None, handle: EPHandle, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Sum expanded rows x [N, H] by token, onto bias [T, H]; return weights [N] as [T, K]."""
        exchange, named = handle.exchange, handle.named_slots()
        if named is None:
            slots_of_row = handle.slots_of_row
            x = handle.positions.to_elements(x)
            weights = None if weights is None else handle.positions.to_elements(weights)
        else:
            slots_of_row = torch.where(named < x.shape[0], named, -1)
        scalars = None
        if weights is not None:
            # Only the rank of an expert returns its weight.
            own_slots = torch.where(handle.local_ids < 0, -1, slots_of_row)
            scalars = gather_scalars(normal.detached(weights), own_slots)
        if self.allow_multiple_reduction and named is None:
            return normal.return_rows(exchange, x, scalars, bias, rows_per=RowsPer.SLOT)
        if self.allow_multiple_reduction:
            rows = reduce_rows(
                normal.detached(x), as_members(slots_of_row, slots_of_row.numel(), is_exact=False)
            )
            return normal.return_rows(exchange, _without_unknown(rows, named, x), scalars, bias)
        shape = (exchange.num_tokens, x.shape[1])
        total = torch.zeros(shape, dtype=torch.float32, device=x.device) if bias is None else bias
        sums = None
        for slots_of_k in slots_of_row.split(1, dim=1):
            rows = reduce_rows(
                normal.detached(x), as_members(slots_of_k, len(slots_of_k), is_exact=False)
            )
            y, returned = normal.return_rows(exchange, _without_unknown(rows, named, x), scalars)
            total, sums, scalars = total + y.float(), sums if scalars is None else returned, None
        return total.to(x.dtype), sums


def _without_unknown(rows: Tensor, named: Tensor | None, x: Tensor) -> Tensor:
    """Return rows [R, H], with NaN where a program named rows that x does not have."""
    if named is None:
        return rows
    return rows.masked_fill((named >= x.shape[0]).any(1, keepdim=True), float("nan"))


def _check_launch(
    check: Check, num_sms: object, num_qps: object, events: tuple[object, object]
) -> None:
    check.number("num_sms", num_sms)
    check.number("num_qps", num_qps)
    check.event("previous_event", events[0])
    check.event("previous_event_before_epilogue", events[1])


def _check_along(
    check: Check, handle: object, given: Mapping[str, object], absent: Mapping[str, object]
) -> normal.RowExchange:
    """Return the exchange of a handle; given: arguments that are None or those of the handle."""
    if not isinstance(handle, EPHandle):
        raise check.handle_error(handle, "dispatch() of an ElasticBuffer")
    for name, value in given.items():
        kept = getattr(handle, name)
        if value is not None and value != kept:
            fault = f"{name} is {value}, expected {kept} as in the dispatch that made the handle"
            raise check.error(HandleError, fault, "pass the same")
    for name, value in absent.items():
        if value is not None and value is not False:
            fault = f"{name} came with a handle, expected {name}=None: the handle has routes and"
            raise check.error(HandleError, f"{fault} waits for no counts", "leave it out")
    return handle.exchange


def _check_combine(check: Check, x: Tensor, handle: EPHandle, weights: object) -> None:
    """Raise if x, weights or recv_src_metadata are not what the handle asks for."""
    hidden_size, top_k = handle.exchange.spec.hidden_size, handle.topk_idx.shape[1]
    # A program that has read or set recv_src_metadata may have any number of expanded rows.
    table, most, is_named = vars(handle).get("recv_src_metadata"), handle.num_recv_tokens, False
    if handle.do_expand:
        most, is_named = handle.num_expanded_tokens, table is not None
    check.tensor("x", x, (None if is_named else most, hidden_size), (torch.bfloat16,))
    if is_named:
        lines = handle.num_recv_tokens
        if isinstance(table, Tensor) and table.dim():
            lines = min(table.shape[0], lines)
        check.tensor("handle.recv_src_metadata", table, (lines, top_k + 2), (torch.int32,))
        named = handle.named_slots()
        if named is not None and check.ranks.reads_faults and named.numel():
            last = int(named.max())
            if last >= x.shape[0]:
                fault = f"x has {x.shape[0]} rows, expected at least {last + 1}, as"
                fault = f"{fault} handle.recv_src_metadata names row {last}"
                raise check.error(ShapeError, fault, "pass a result for each row that it names")
    if weights is not None:
        shape = (x.shape[0],) if handle.do_expand else (x.shape[0], top_k)
        check.tensor("topk_weights", weights, shape, FLOAT32)
