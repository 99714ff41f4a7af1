"""Buffer of DeepEP V1: its calls and signatures, translated to epcomm's buffers."""

from functools import lru_cache
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.buffers.deep_ep.rows import low_latency_bytes
from epcomm.errors import ConfigError, EPError, ShapeError
from epcomm.integrations.deep_ep.checks import FLOAT32, IDS, Absent, Check
from epcomm.integrations.deep_ep.events import CommStream, EventHandle, EventOverlap
from epcomm.integrations.deep_ep.layout import layout_of
from epcomm.integrations.deep_ep.normal import (
    RowExchange,
    Rows,
    XTensors,
    announce_along,
    refuse_along,
    refuse_dispatch,
    return_rows,
    send_along,
    sum_of_biases,
)
from epcomm.integrations.deep_ep.ranks import Ranks, Service
from epcomm.integrations.deep_ep.v1 import low_latency, normal
from epcomm.integrations.deep_ep.v1.config import Config
from epcomm.types import align_up

if TYPE_CHECKING:
    from mpi4py import MPI

DispatchResult = tuple[
    XTensors,
    Tensor | None,
    Tensor | None,
    list[int] | None,
    tuple[Tensor, ...] | None,
    EventOverlap,
]
LowLatencyResult = tuple[
    XTensors, Tensor, tuple[Tensor, Tensor, int, int, int], EventOverlap, low_latency.Receive | None
]

_BFLOAT16 = (torch.bfloat16,)
_ONE_HOST = (
    "call dispatch() and combine() on ranks of one host, or epcomm's own API, with backend "
    "collective or deep_ep_v1"
)

# Making a Config takes as long as a small call.
_config_of = lru_cache(Config)


class Buffer:
    """Normal and low-latency dispatch and combine of V1.

    Every call but the statics is collective over the group. Sizes in bytes have no effect: epcomm's
    buffers open at the first call of a shape, and grow.

    Raises:
        ShapeError, CapacityError, ConfigError, HandleError: some rank refuses its call; on every
            rank. On GPUs without a host sync: on that rank, and the sums of the others are NaN.
        NotImplementedError: some rank uses a missing feature; an EPError on the others.
    """

    # The number applies to all buffers of the process, as in V1.
    num_sms: int = 20

    internode_dispatch = Absent(_ONE_HOST)
    internode_combine = Absent(_ONE_HOST)

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
        *,
        use_fabric: bool = False,
    ) -> None:
        """Wrap the ranks. Local; no rank is waited for.

        use_fabric: of older versions: how memory was shared between hosts.
        """
        ranks = comm if group is None else group
        if ranks is None:
            raise ConfigError(
                "Buffer: group and comm are None, expected one of them; pass a process group or a "
                "communicator of mpi4py"
            )
        self._ranks = Ranks(ranks)
        self._comm_stream = CommStream()
        self._saved_handles = normal.SavedHandles()
        self._low_latency = low_latency.LowLatency(self._ranks)
        self._rows_to_return: dict[tuple[int, ...], Tensor] = {}
        self.group = group
        self.rank, self.group_size = self._ranks.rank, self._ranks.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.explicitly_destroy = explicitly_destroy
        # Ranks that are already excluded from calls.
        self._excluded: frozenset[int] = frozenset()
        self._mask_status = torch.zeros(self.group_size, dtype=torch.int32, device="cpu")

    def destroy(self) -> None:
        """Close the epcomm buffers, together with all ranks; no call is possible afterwards."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self._ranks.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return whether FP8 and low latency are available."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the SMs of the kernels of normal mode, for all buffers of the process."""
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
        """Return num_rdma_bytes of V1 for low latency; num_ranks does not matter."""
        return low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a Config of Buffer.num_sms SMs; num_ranks does not matter."""
        return _config_of(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_comm_stream(self) -> torch.cuda.Stream | torch.cpu.Stream:
        """Return the stream of asynchronous calls."""
        return self._comm_stream.of(self._ranks.device)

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Return memory of the size of the buffer of V1; no call uses it.

        Programs clear the buffer of V1 after a failure. Lifetime: the caller owns it.
        """
        device = self._begin("get_local_buffer_tensor").ranks.device
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        shape = size or torch.Size([max(num_bytes - offset, 0) // dtype.itemsize])
        return torch.zeros(shape, dtype=dtype, device=device)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Return tokens per rank, per RDMA rank (None) and per expert, is_token_in_rank, an event.

        Local.   Host sync: none.
        """
        check = self._begin("get_dispatch_layout", topk_idx)
        _check_launch(check, None, previous_event, async_finish, allocate_on_comm_stream)
        with self._comm_stream.call(topk_idx.device, previous_event, is_async=async_finish) as call:
            layout = layout_of(topk_idx, num_experts, self.group_size)
            event = call.event([topk_idx, *layout])
        per_rank, per_expert, is_in_rank = layout
        return per_rank, None, per_expert, is_in_rank, event

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
        """Send rows to the ranks of their experts; with a handle, along the routes of another call.

        Returns:
            The received rows (with scales if x has them), local ids, weights, the aligned number of
            rows of each local expert (an empty list with num_worst_tokens), handle, event; None
            instead of ids, weights, counts and handle if a handle is passed.

        Collective: yes.   Host sync: one; none with a handle, and on a GPU with num_worst_tokens.
        Lifetime: the caller owns the results.
        """
        rows = Rows.of(x)
        check = self._begin("dispatch", rows.x)
        self._saved_handles.drop_freed()
        config = config or _config_of(self.num_sms)
        exchange = None if handle is None else self._exchange_of(check, handle)
        service, request = Service.NORMAL, None
        if num_worst_tokens and topk_idx is not None and self._ranks.has(Service.ROW_BUDGET):
            # In V1 a dispatch without ids has no static sizes.
            service = Service.ROW_BUDGET
        try:
            check.size("expert_alignment", expert_alignment)
            check.number("num_worst_tokens", num_worst_tokens)
            _check_launch(check, config, previous_event, async_finish, allocate_on_comm_stream)
            if exchange is not None:
                check.rows_along(rows, exchange, normal.PLAIN, normal.QUANTIZED)
            else:
                request = normal.NormalRequest(
                    rows=rows,
                    topk_idx=topk_idx,
                    topk_weights=topk_weights,
                    # The checks report what is missing.
                    is_in_rank=cast("Tensor", is_token_in_rank),
                    per_expert=cast("Tensor", num_tokens_per_expert),
                    num_worst_tokens=num_worst_tokens,
                    num_sms=config.sms or None,
                    service=service,
                )
                request.check(check)
        except EPError as error:
            if exchange is not None:
                refuse_along(self._ranks, service, error, exchange)
            refuse_dispatch(self._ranks, service, error, check.spec)
        call = self._comm_stream.call(rows.x.device, previous_event, is_async=async_finish)
        if exchange is not None:
            with call as under_way:
                along, _ = send_along(self._ranks, exchange, rows)
                along = normal.with_length(along, exchange.max_rows)
                event = under_way.event([rows.x, rows.scales, along.x, along.scales])
            return along.as_given(), None, None, None, None, event
        assert request is not None, "just made"
        assert check.spec is not None, "just checked"
        with call as under_way:
            received = request.send(self._ranks, check.spec)
            made = normal.NormalHandle.of(
                received.exchange, request.is_in_rank, self._saved_handles, config.num_channels
            )
            out, ids, weights = received.rows, received.topk_ids, received.topk_weights
            given = [rows.x, rows.scales, topk_idx, topk_weights]
            event = under_way.event([*given, out.x, out.scales, ids, weights])
        counts = list(received.num_tokens_per_expert)
        # Aligning hundreds of counts takes as long as a small call.
        if expert_alignment > 1:
            counts = [align_up(count, expert_alignment) for count in counts]
        if topk_idx is None:
            return out.as_given(), None, None, counts, made, event
        return out.as_given(), ids, weights, [] if num_worst_tokens else counts, made, event

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
        """Sum rows over the ranks of each token, without weights.

        topk_weights [R, K] are summed in the same way, entry by entry, also where the id is -1:
        pass 0 there if only the rank of an expert is to return its weight. Sums, which are float32
        and rounded once, begin with the bias: [T, H] in the dtype of x, or two of them.

        Collective: yes.   Host sync: none.   Lifetime: the caller owns the results.
        """
        check = self._begin("combine")
        exchange = self._exchange_of(check, handle)
        try:
            _check_launch(check, config, previous_event, async_finish, allocate_on_comm_stream)
            shape = (exchange.max_rows, exchange.spec.hidden_size)
            check.tensor("x", x, shape, (exchange.sum_dtype,))
            if topk_weights is not None:
                shape = (exchange.max_rows, exchange.spec.top_k)
                check.tensor("topk_weights", topk_weights, shape, FLOAT32)
            biases = check.biases(bias, exchange)
        except EPError as error:
            refuse_along(self._ranks, Service.NORMAL, error, exchange, num_combines=1)
        announce_along(self._ranks, exchange, "combine", x, has_weights=topk_weights is not None)
        with self._comm_stream.call(x.device, previous_event, is_async=async_finish) as call:
            combined, weights = return_rows(exchange, x, topk_weights, sum_of_biases(biases))
            event = call.event([x, topk_weights, *biases, combined, weights])
        return combined, weights, event

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Do nothing, because modes and shapes have separate memory here."""
        self._begin("clean_low_latency_buffer")

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
        *,
        use_nvfp4: bool = False,
        x_global_scale: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> LowLatencyResult:
        """Send rows to the slabs of their experts, [L, W * M, H]; quantised here with use_fp8.

        The arguments after the star belong to branches of DeepEP, and must be off.

        Returns:
            Slabs (with column-major scales, or without), rows of each slab [L] int32, handle,
            event, and the hook that receives, if return_recv_hook.

        Collective: yes; M and E equal on all ranks.   Host sync: on a CPU only.
        Lifetime: on a CPU the caller owns the results.
        """
        check = self._begin_low_latency("low_latency_dispatch", x)
        most, stats = num_max_dispatch_tokens_per_rank, cumulative_local_expert_recv_stats
        try:
            check.tensor("x", x, (None, None), _BFLOAT16)
            if x.shape[1] == 0:
                fault = f"x is {list(x.shape)}, expected at least one column"
                raise check.error(ShapeError, fault)
            top_k = check.top_k(x.shape[0], topk_idx)
            check.size("num_max_dispatch_tokens_per_rank", most, ShapeError)
            num_local = check.num_local_experts(num_experts, ShapeError)
            if use_fp8 and use_ue8m0 and not round_scale:
                fault = "use_ue8m0=True came with round_scale=False, expected round_scale=True"
                raise check.error(ConfigError, fault, "only powers of two fit into a byte")
            check.spec = spec = low_latency.slots_spec(
                *(x.shape[1], top_k, num_local, most),
                use_fp8=use_fp8,
                round_scale=round_scale,
                use_ue8m0=use_ue8m0,
            )
            check.tensor("topk_idx", topk_idx, (x.shape[0], None), IDS)
            check.num_tokens(x.shape[0], "num_max_dispatch_tokens_per_rank", most)
            check.ids(topk_idx, num_experts)
            check.absent(
                dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats,
                use_nvfp4=use_nvfp4,
                x_global_scale=x_global_scale,
                topk_weights=topk_weights,
            )
            _check_hook(check, async_finish, return_recv_hook)
            check.recv_stats(stats, num_local)
        except EPError as error:
            refuse_dispatch(self._ranks, Service.LOW_LATENCY, error, check.spec)
        with self._comm_stream.call(x.device, is_async=async_finish) as call:
            slabs = self._low_latency.dispatch(check, x, topk_idx, spec, has_hook=return_recv_hook)

            def hook() -> None:
                slabs.receive()
                if stats is not None:
                    stats.add_(slabs.counts)

            if not return_recv_hook:
                hook()
            rows, counts = slabs.rows, slabs.counts
            event = call.event([x, topk_idx, rows.x, rows.scales, counts])
        return rows.as_given(), counts, slabs.handle, event, hook if return_recv_hook else None

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
        *,
        overlap: bool = False,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        src_signals: Tensor | None = None,
        block_m: int | None = None,
        threshold: int | None = None,
        num_sms: int | None = None,
    ) -> tuple[Tensor, EventOverlap, low_latency.Receive | None]:
        """Sum the rows of each token times their weights, in float32 and in the order of k.

        Rows return by the routing of the dispatch, so that the values of topk_idx are not read.
        As in V1, topk_weights are read when the rows are received. The arguments after the star
        belong to branches of DeepEP: the last three have an effect only with overlap=True, and the
        others must be off.

        Collective: yes.   Host sync: on a CPU only.   Lifetime: the caller owns the result.
        """
        check = self._begin_low_latency("low_latency_combine")
        if not self._is_own(handle):
            error = check.handle_error(handle, "low_latency_dispatch() of this Buffer")
            refuse_along(self._ranks, Service.LOW_LATENCY, error)
        if zero_copy:
            x = self._combine_memory(handle)
        num_tokens = handle.num_tokens
        try:
            check.absent(
                use_logfmt=use_logfmt,
                combine_wait_recv_cost_stats=combine_wait_recv_cost_stats,
                overlap=overlap,
                packed_recv_count=packed_recv_count,
                comp_signal=comp_signal,
                src_signals=src_signals,
            )
            _check_hook(check, async_finish, return_recv_hook)
            check.tensor("x", x, handle.slab_shape, _BFLOAT16)
            check.tensor("topk_idx", topk_idx, (num_tokens, handle.spec.top_k), IDS)
            check.tensor("topk_weights", topk_weights, topk_idx.shape, FLOAT32)
            if out is not None:
                check.tensor("out", out, (num_tokens, x.shape[2]), _BFLOAT16)
        except EPError as error:
            refuse_along(self._ranks, Service.LOW_LATENCY, error, handle.exchange, num_combines=1)
        with self._comm_stream.call(x.device, is_async=async_finish) as call:
            combined, receive = self._low_latency.combine(handle, x, topk_weights, out)
            if not return_recv_hook:
                receive()
            event = call.event([x, topk_weights, combined])
        return combined, event, receive if return_recv_hook else None

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out of low latency, from the next call on; on GPUs only.

        The other ranks make the same call. An excluded rank stays excluded until a new Buffer is
        made.
        """
        self._masks()[rank_to_mask] = int(mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write 1 for each masked rank into int32 [W]."""
        mask_status.copy_(self._masks().view(mask_status.shape))

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmask all ranks, if no call has excluded a rank yet."""
        if self._excluded:
            raise NotImplementedError(
                f"low_latency_clean_mask_buffer: ranks {sorted(self._excluded)} are excluded, and "
                "cannot be taken back; make a new Buffer on all ranks"
            )
        self._masks().zero_()

    def get_next_low_latency_combine_buffer(
        self, handle: tuple[Tensor, Tensor, int, int, int]
    ) -> Tensor:
        """Return memory for the rows of a combine, bfloat16 [L, W * M, H], for zero_copy."""
        check = self._begin("get_next_low_latency_combine_buffer", is_low_latency=True)
        if not self._is_own(handle):
            raise check.handle_error(handle, "low_latency_dispatch() of this Buffer")
        # Each caller gets an alias, so that autograd's version counter does not stay with the
        # memory.
        return self._combine_memory(handle).detach()

    def _begin(self, function: str, like: object = None, *, is_low_latency: bool = False) -> Check:
        """Begin a call whose tensors are where `like` is; return the checks of its arguments."""
        check = Check(function, self._ranks, like)
        if is_low_latency and not self.low_latency_mode:
            fault = "the Buffer was made without low_latency_mode, expected low_latency_mode=True"
            raise check.error(ConfigError, fault, "pass it to Buffer()")
        return check

    def _begin_low_latency(self, function: str, like: object = None) -> Check:
        """Begin a call without the ranks that are masked."""
        check = self._begin(function, like, is_low_latency=True)
        if self.enable_shrink:
            masked = frozenset(self._mask_status.nonzero().flatten().tolist())
            if masked - self._excluded:
                self._ranks.exclude(sorted(masked))
                self._excluded = masked
        return check

    def _exchange_of(self, check: Check, handle: object) -> RowExchange:
        """Return the exchange of a handle, or refuse the call on all ranks."""
        exchange = self._saved_handles.find(handle)
        if exchange is None:
            error = check.handle_error(handle, "dispatch() of this Buffer")
            refuse_along(self._ranks, Service.NORMAL, error)
        return exchange

    def _is_own(self, handle: object) -> TypeGuard[low_latency.LowLatencyHandle]:
        """Return whether low_latency_dispatch() of this Buffer made a handle."""
        return isinstance(handle, low_latency.LowLatencyHandle) and handle.ranks is self._ranks

    def _masks(self) -> Tensor:
        check = self._begin("low_latency_mask_buffer", is_low_latency=True)
        if not self.enable_shrink:
            fault = "the Buffer was made without enable_shrink, expected enable_shrink=True"
            raise check.error(ConfigError, fault, "pass it to Buffer()")
        return self._mask_status

    def _combine_memory(self, handle: low_latency.LowLatencyHandle) -> Tensor:
        """Return the rows that a combine with zero_copy sends, one memory a shape."""
        shape, device = handle.slab_shape, self._ranks.device
        if shape not in self._rows_to_return:
            self._rows_to_return[shape] = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return self._rows_to_return[shape]


def _check_launch(
    check: Check, config: object, event: EventOverlap | None, is_async: bool, allocates_here: bool
) -> None:
    if config is not None and not isinstance(config, Config):
        fault = f"config is {type(config).__name__}, expected Config or None"
        raise check.error(ConfigError, fault)
    check.event("previous_event", event)
    if allocates_here and not (is_async and event is not None and event.event is not None):
        fault = "allocate_on_comm_stream=True came without previous_event or without async_finish"
        remedy = "pass Buffer.capture() and async_finish=True"
        raise check.error(ConfigError, f"{fault}=True, expected both", remedy)


def _check_hook(check: Check, is_async: bool, with_hook: bool) -> None:
    if is_async and with_hook:
        fault = "async_finish and return_recv_hook are both True, expected one at most"
        raise check.error(ConfigError, fault, "set return_recv_hook alone")
