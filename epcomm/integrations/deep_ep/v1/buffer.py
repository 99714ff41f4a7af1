"""Buffer of DeepEP V1: its calls and signatures, translated to epcomm's buffers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.integrations.deep_ep.events import AsyncCall, CommStream, EventHandle, EventOverlap
from epcomm.integrations.deep_ep.layout import layout_of
from epcomm.integrations.deep_ep.missing import refuse_missing
from epcomm.integrations.deep_ep.normal import Rows, RowWay, return_rows, send_along
from epcomm.integrations.deep_ep.ranks import Ranks
from epcomm.integrations.deep_ep.v1 import checks, low_latency, pairs, slots
from epcomm.integrations.deep_ep.v1 import config as configs
from epcomm.integrations.deep_ep.v1.config import Config
from epcomm.integrations.deep_ep.v1.handle import NormalHandle, handle_of
from epcomm.integrations.deep_ep.v1.normal import dispatch_v1, with_worst_rows
from epcomm.types import align_up

if TYPE_CHECKING:
    from mpi4py import MPI

XTensors = Tensor | tuple[Tensor, Tensor]
DispatchResult = tuple[
    XTensors,
    Tensor | None,
    Tensor | None,
    list[int] | None,
    tuple[Tensor, ...] | None,
    EventOverlap,
]
LowLatencyResult = tuple[
    XTensors,
    Tensor,
    tuple[Tensor, Tensor, int, int, int],
    EventOverlap,
    Callable[[], None] | None,
]

_ONE_HOST = (
    "ranks of several hosts are not there in epcomm.integrations.deep_ep; call dispatch() and "
    "combine() on ranks of one host, or take epcomm's backend hierarchical"
)


class Buffer:
    """Normal and low-latency dispatch and combine of V1.

    Every call but the statics is collective over the group. Sizes in bytes are kept and mean
    nothing: epcomm's buffers open at the first call of a shape, and grow.
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
        comm: MPI.Comm | None = None,
    ) -> None:
        ranks = comm if group is None else group
        if ranks is None:
            raise ConfigError(
                "Buffer: group and comm are None, expected one of them; pass a process group or a "
                "communicator of mpi4py"
            )
        self._ranks = Ranks(ranks)
        self._comm_stream = CommStream()
        self.rank, self.group_size = self._ranks.rank, self._ranks.size
        self.group = group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        # Ranks that calls leave out already.
        self._excluded: frozenset[int] = frozenset()
        self._mask_status = torch.zeros(self.group_size, dtype=torch.int32)
        self._slot_memory = slots.SlotMemory()
        self._rows_to_return: dict[tuple[int, ...], Tensor] = {}

    def destroy(self) -> None:
        """Close the epcomm buffers, together with all ranks; no call is possible afterwards."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self._ranks.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return whether FP8 and low latency are there."""
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
        return configs.low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return the Config that V1 recommends for a number of ranks."""
        return configs.dispatch_config(Buffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return the Config that V1 recommends for a number of ranks."""
        return configs.combine_config(Buffer.num_sms, num_ranks)

    def get_comm_stream(self) -> torch.cuda.Stream | torch.cpu.Stream:
        """Return the stream of asynchronous calls."""
        return self._comm_stream.of(self._ranks.device)

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
        self._begin("get_dispatch_layout")
        with self._call(topk_idx, previous_event, async_finish, allocate_on_comm_stream) as call:
            layout = layout_of(topk_idx, num_experts, self.group_size)
            found = (layout.tokens_per_rank, layout.tokens_per_expert, layout.is_in_rank)
            event = call.event([topk_idx, *found])
        per_rank, per_expert, is_in_rank = found
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
        """Send rows to the ranks of their experts; with a handle, the ways of an earlier call.

        Returns:
            Received x as it came (with scales or without), local ids, weights, rows per local
            expert aligned up (an empty list with num_worst_tokens), handle, event; None instead of
            ids, weights, counts and handle if a handle came.

        Collective: yes.   Host sync: one, none with a handle.
        Lifetime: the caller owns what it gets.
        Raises:
            ShapeError, CapacityError: the call of some rank cannot be; on every rank.
        """
        ranks = self._begin("dispatch")
        del num_tokens_per_rank, num_tokens_per_rdma_rank
        rows = Rows.of(x)
        with self._call(rows.x, previous_event, async_finish, allocate_on_comm_stream) as call:
            if handle is not None:
                along = send_along(self._way_of_rows(handle, rows), rows)
                event = call.event([rows.x, rows.scales, along.x, along.scales])
                return along.as_given(), None, None, None, None, event
            topk = (topk_idx, topk_weights)
            error = checks.dispatch_error(
                ranks, rows, topk, is_token_in_rank, num_tokens_per_expert
            )
            if error is not None:
                ranks.refuse(error)
            assert is_token_in_rank is not None, "just checked"
            assert num_tokens_per_expert is not None, "just checked"
            config = config or self.get_dispatch_config(self.group_size)
            received = dispatch_v1(
                ranks,
                rows,
                topk,
                is_token_in_rank,
                num_tokens_per_expert,
                num_sms=config.sms or None,
            )
            received = with_worst_rows(ranks, received, num_worst_tokens)
            made = NormalHandle.of(
                received,
                is_token_in_rank,
                channels=config.num_channels,
                hidden_size=rows.x.shape[1],
            )
            event = call.event([rows.x, rows.scales, topk_idx, topk_weights, *received.tensors()])
        counts = [align_up(each, expert_alignment) for each in received.num_tokens_per_expert]
        if topk_idx is None:
            return received.rows.as_given(), None, None, counts, made, event
        ids, weights = received.topk_ids, received.topk_weights
        counts = [] if num_worst_tokens else counts
        return received.rows.as_given(), ids, weights, counts, made, event

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
        """Sum over the ranks of each token, without weights; weights are summed beside it.

        A bias is added to the sum in bfloat16, which V1 adds in float32 before it casts.

        Collective: yes.   Host sync: none.   Lifetime: the caller owns what it gets.
        Raises:
            ShapeError, HandleError: the call of some rank cannot be; on every rank.
        """
        ranks = self._begin("combine")
        known = handle_of(handle, "combine", ranks.where)
        biases = [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias]
        error = checks.combine_error(ranks, x, known.sizes, topk_weights, biases)
        if error is not None:
            known.way.buffer.refuse_combine(error)
            raise error
        with self._call(x, previous_event, async_finish, allocate_on_comm_stream) as call:
            combined, weights = return_rows(known.way, x, topk_weights)
            if biases:
                combined = torch.stack([combined, *biases]).float().sum(0).to(x.dtype)
            event = call.event([x, topk_weights, *biases, combined, weights])
        return combined, weights, event

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
        """Refuse: ranks are of one host."""
        raise NotImplementedError(f"internode_dispatch: {_ONE_HOST}")

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
        """Refuse: ranks are of one host."""
        raise NotImplementedError(f"internode_combine: {_ONE_HOST}")

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Do nothing: modes and shapes have memory of their own here."""
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
    ) -> LowLatencyResult:
        """Send rows to the slabs of their experts, [L, W * M, H]; quantised here with use_fp8.

        Returns:
            Slabs (with column-major scales, or without), rows of each slab [L] int32, handle,
            event, and the hook that receives, if return_recv_hook.

        Collective: yes; M and E equal on all ranks.   Host sync: on a CPU alone.
        Lifetime: on a CPU the caller owns what it gets.
        Raises:
            ShapeError, CapacityError: the call of some rank cannot be; on every rank.
        """
        name = "low_latency_dispatch"
        ranks = self._begin_low_latency(name)
        refuse_missing(
            name,
            {
                "dispatch_wait_recv_cost_stats": (
                    dispatch_wait_recv_cost_stats is not None,
                    "leave it out, and use a profiler",
                )
            },
        )
        max_tokens = num_max_dispatch_tokens_per_rank
        stats = cumulative_local_expert_recv_stats
        error = (
            checks.hook_error(ranks, name, is_async=async_finish, with_hook=return_recv_hook)
            or checks.low_latency_dispatch_error(ranks, x, topk_idx, max_tokens, num_experts)
            or checks.stats_error(ranks, stats, num_experts // ranks.size)
            or checks.scale_error(ranks, use_fp8 and use_ue8m0 and not round_scale)
        )
        if error is not None:
            ranks.refuse(error)
        wire = low_latency.Wire(fp8=use_fp8, power_of_two=round_scale, packed=use_ue8m0)
        sizes = low_latency.Sizes(
            max_tokens=max_tokens, num_experts=num_experts, num_ranks=ranks.size
        )
        with self._call(x, None, async_finish) as call:
            if ranks.returns_slots():
                memory = self._slot_memory
                slabs, receive = slots.begin_dispatch(ranks, memory, x, topk_idx, sizes, wire)
            else:
                slabs, receive = pairs.begin_dispatch(ranks, x, topk_idx, sizes, wire)

            def hook() -> None:
                receive()
                if stats is not None:
                    stats.add_(slabs.counts)

            if not return_recv_hook:
                hook()
            event = call.event([x, topk_idx, slabs.x, slabs.scales, slabs.counts])
        recv_x = slabs.x if slabs.scales is None else (slabs.x, slabs.scales)
        return recv_x, slabs.counts, slabs.handle, event, hook if return_recv_hook else None

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
        """Sum the rows of each token times their weights, in float32 and in the order of k.

        As in V1, topk_idx and topk_weights are read when the rows are received.

        Collective: yes.   Host sync: on a CPU alone.   Lifetime: the caller owns the result.
        Raises:
            ShapeError, HandleError: the call of some rank cannot be; on every rank.
        """
        name = "low_latency_combine"
        ranks = self._begin_low_latency(name)
        refuse_missing(
            name,
            {
                "use_logfmt=True": (use_logfmt, "leave it out: rows return in bfloat16"),
                "combine_wait_recv_cost_stats": (
                    combine_wait_recv_cost_stats is not None,
                    "leave it out, and use a profiler",
                ),
            },
        )
        known = low_latency.handle_of(handle, ranks)
        if zero_copy:
            x = self._combine_memory(known)
        topk, shapes = (topk_idx, topk_weights), (known.slab_shape, known.num_tokens)
        error = checks.hook_error(
            ranks, name, is_async=async_finish, with_hook=return_recv_hook
        ) or checks.low_latency_combine_error(ranks, x, topk, shapes, out)
        if error is not None:
            known.refuse_combine(error)
        with self._call(x, None, async_finish) as call:
            combined, receive = known.begin_combine(ranks, x, topk_idx, topk_weights, out)
            if not return_recv_hook:
                receive()
            event = call.event([x, topk_idx, topk_weights, combined])
        return combined, event, receive if return_recv_hook else None

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out of low latency, from the next call on; on GPUs alone.

        The other ranks make the same call. A rank that was left out stays so until the Buffer is
        made anew.
        """
        self._masks()[rank_to_mask] = int(mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write 1 for each masked rank into int32 [W]."""
        mask_status.copy_(self._masks().view(mask_status.shape))

    def low_latency_clean_mask_buffer(self) -> None:
        """Mask no rank, if none was left out of a call yet.

        Raises:
            NotImplementedError: a rank was left out already.
        """
        refuse_missing(
            "low_latency_clean_mask_buffer",
            {"taking a rank back": (bool(self._excluded), "make a new Buffer on all ranks")},
        )
        self._masks().zero_()

    def get_next_low_latency_combine_buffer(
        self, handle: tuple[Tensor, Tensor, int, int, int]
    ) -> Tensor:
        """Return memory for the rows of a combine, bfloat16 [L, W * M, H], for zero_copy."""
        ranks = self._begin("get_next_low_latency_combine_buffer", low_latency=True)
        return self._combine_memory(low_latency.handle_of(handle, ranks))

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Return memory of the size of the buffer of V1; nothing that travels lies in it.

        Programs clear the buffer of V1 after a failure. Lifetime: the caller owns it.
        """
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        shape = size or torch.Size([max(num_bytes - offset, 0) // dtype.itemsize])
        return torch.zeros(shape, dtype=dtype, device=self._begin("get_local_buffer_tensor").device)

    def _begin(self, function: str, *, low_latency: bool = False) -> Ranks:
        self._ranks.check_open(function)
        if low_latency and not self.low_latency_mode:
            raise ConfigError(
                f"{function}: the Buffer was made without low_latency_mode ({self._ranks.where}), "
                "expected low_latency_mode=True; pass it to Buffer()"
            )
        return self._ranks

    def _begin_low_latency(self, function: str) -> Ranks:
        """Begin a call without the ranks that are masked."""
        ranks = self._begin(function, low_latency=True)
        if self.enable_shrink:
            masked = frozenset(self._mask_status.nonzero().flatten().tolist())
            if masked - self._excluded:
                ranks.exclude(sorted(masked))
                self._excluded = masked
        return ranks

    def _way_of_rows(self, handle: tuple[Tensor, ...], rows: Rows) -> RowWay:
        """Return the way that rows are to be sent along, or refuse them."""
        ranks = self._ranks
        known = handle_of(handle, "dispatch", ranks.where)
        error = checks.cached_error(ranks, rows, known.sizes)
        if error is not None:
            known.way.buffer.refuse_combine(error)
            raise error
        return known.way

    def _masks(self) -> Tensor:
        ranks = self._begin("low_latency_mask_buffer", low_latency=True)
        if not self.enable_shrink:
            raise ConfigError(
                f"low_latency_mask_buffer: the Buffer was made without enable_shrink "
                f"({ranks.where}), expected enable_shrink=True; pass it to Buffer()"
            )
        return self._mask_status

    def _combine_memory(self, handle: low_latency.LowLatencyHandle) -> Tensor:
        """Return the rows that a combine with zero_copy sends, one memory a shape."""
        shape = handle.slab_shape
        memory = self._rows_to_return.get(shape)
        if memory is None:
            memory = torch.empty(shape, dtype=torch.bfloat16, device=self._ranks.device)
            self._rows_to_return[shape] = memory
        return memory

    def _call(
        self,
        like: Tensor,
        previous: EventOverlap | None,
        is_async: bool,
        allocates_here: bool = False,
    ) -> AbstractContextManager[AsyncCall]:
        return self._comm_stream.call(
            like.device, previous, is_async=is_async, allocates_here=allocates_here
        )
