"""The calls of low latency of V1."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.config import Mode
from epcomm.errors import CapacityError, ConfigError
from epcomm.integrations.deep_ep.events import EventOverlap
from epcomm.integrations.deep_ep.missing import missing_error, refuse_missing
from epcomm.integrations.deep_ep.ranks import Ranks
from epcomm.integrations.deep_ep.v1 import checks, low_latency, pairs, slots
from epcomm.integrations.deep_ep.v1.base import Opened, XTensors

if TYPE_CHECKING:
    from mpi4py import MPI

LowLatencyResult = tuple[
    XTensors,
    Tensor,
    tuple[Tensor, Tensor, int, int, int],
    EventOverlap,
    Callable[[], None] | None,
]


class LowLatencyCalls(Opened):
    """Dispatch and combine of low latency, which are collective over the group."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        comm: MPI.Comm | None,
        *,
        low_latency_mode: bool,
        enable_shrink: bool,
    ) -> None:
        super().__init__(
            group, comm, low_latency_mode=low_latency_mode, enable_shrink=enable_shrink
        )
        # Ranks that calls leave out already.
        self._excluded: frozenset[int] = frozenset()
        self._mask_status = torch.zeros(self.group_size, dtype=torch.int32, device="cpu")
        self._slot_memory = slots.SlotMemory()
        self._rows_to_return: dict[tuple[int, ...], Tensor] = {}

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
        *,
        use_nvfp4: bool = False,
        x_global_scale: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> LowLatencyResult:
        """Send rows to the slabs of their experts, [L, W * M, H]; quantised here with use_fp8.

        The arguments after the star are those of branches of DeepEP, and must be off.

        Returns:
            Slabs (with column-major scales, or without), rows of each slab [L] int32, handle,
            event, and the hook that receives, if return_recv_hook.

        Collective: yes; M and E equal on all ranks.   Host sync: on a CPU alone.
        Lifetime: on a CPU the caller owns what it gets.
        Raises:
            ShapeError, CapacityError: some rank refuses its call; on every rank.
            NotImplementedError: some rank asks for what is not there; an EPError on the others.
        """
        name = "low_latency_dispatch"
        ranks = self._begin_low_latency(name, x)
        missing = missing_error(
            name,
            {
                "dispatch_wait_recv_cost_stats": (
                    dispatch_wait_recv_cost_stats is not None,
                    "leave it out, and use a profiler",
                ),
                "use_nvfp4=True": (use_nvfp4, "pass use_fp8=True or False"),
                "x_global_scale": (x_global_scale is not None, "it belongs to use_nvfp4"),
                "topk_weights": (topk_weights is not None, "pass them to low_latency_combine()"),
            },
            ranks.where,
        )
        max_tokens = num_max_dispatch_tokens_per_rank
        stats = cumulative_local_expert_recv_stats
        wrong_scales = checks.scale_error(ranks, use_fp8 and use_ue8m0 and not round_scale)
        wrong_rows = checks.low_latency_dispatch_error(ranks, x, topk_idx, max_tokens, num_experts)
        error = (
            missing
            or wrong_scales
            or wrong_rows
            or checks.hook_error(ranks, name, is_async=async_finish, with_hook=return_recv_hook)
            or checks.stats_error(ranks, stats, num_experts // ranks.size)
        )
        wire = low_latency.Wire(fp8=use_fp8, power_of_two=round_scale, packed=use_ue8m0)
        sizes = low_latency.Sizes(
            max_tokens=max_tokens, num_experts=num_experts, num_ranks=ranks.size
        )
        if error is not None:
            spec = None
            # No rank opens a buffer for such scales.
            if wrong_scales is None and isinstance(wrong_rows, CapacityError | None):
                spec = slots.spec_of((x.shape[1], topk_idx.shape[1]), sizes, wire)
            ranks.refuse(Mode.LOW_LATENCY, error, spec=spec)
        with self._call(x, None, async_finish) as call:
            if ranks.returns_slots():
                memory = self._slot_memory
                slabs, receive = slots.begin_dispatch(
                    ranks, memory, x, topk_idx, sizes, wire, has_hook=return_recv_hook
                )
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
        *,
        overlap: bool = False,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        src_signals: Tensor | None = None,
        block_m: int | None = None,
        threshold: int | None = None,
        num_sms: int | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Sum the rows of each token times their weights, in float32 and in the order of k.

        As in V1, topk_idx and topk_weights are read when the rows are received. The arguments after
        the star are those of branches of DeepEP: the last three mean something with overlap=True
        alone, and the others must be off.

        Collective: yes.   Host sync: on a CPU alone.   Lifetime: the caller owns the result.
        Raises:
            ShapeError, HandleError: some rank refuses its call; on every rank.
            NotImplementedError: some rank asks for what is not there; an EPError on the others.
        """
        name = "low_latency_combine"
        ranks = self._begin_low_latency(name)
        del block_m, threshold, num_sms
        missing = missing_error(
            name,
            {
                "use_logfmt=True": (use_logfmt, "leave it out: rows return in bfloat16"),
                "combine_wait_recv_cost_stats": (
                    combine_wait_recv_cost_stats is not None,
                    "leave it out, and use a profiler",
                ),
                "overlap=True": (overlap, "run the experts before combine"),
                **{
                    signal: (given is not None, "it belongs to overlap")
                    for signal, given in (
                        ("packed_recv_count", packed_recv_count),
                        ("comp_signal", comp_signal),
                        ("src_signals", src_signals),
                    )
                },
            },
            ranks.where,
        )
        known = low_latency.handle_of(handle, ranks)
        if known is None:
            error = low_latency.handle_error(handle, name, ranks)
            ranks.refuse_combine(Mode.LOW_LATENCY, error)
        if zero_copy:
            x = self._combine_memory(known)
        topk, shapes = (topk_idx, topk_weights), (known.slab_shape, known.num_tokens)
        error = (
            missing
            or checks.hook_error(ranks, name, is_async=async_finish, with_hook=return_recv_hook)
            or checks.low_latency_combine_error(ranks, x, topk, shapes, out)
        )
        if error is not None:
            known.refuse_combine(error)
        with self._call(x, None, async_finish) as call:
            combined, receive = known.begin_combine(x, topk_idx, topk_weights, out)
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
        # Each caller's own alias: what autograd records of writes must not stay with the memory.
        known = low_latency.handle_of(handle, ranks)
        if known is None:
            raise low_latency.handle_error(handle, "get_next_low_latency_combine_buffer", ranks)
        return self._combine_memory(known).detach()

    def _begin_low_latency(self, function: str, like: object = None) -> Ranks:
        """Begin a call without the ranks that are masked."""
        ranks = self._begin(function, like, low_latency=True)
        if self.enable_shrink:
            masked = frozenset(self._mask_status.nonzero().flatten().tolist())
            if masked - self._excluded:
                ranks.exclude(sorted(masked))
                self._excluded = masked
        return ranks

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
