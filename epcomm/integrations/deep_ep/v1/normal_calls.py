"""The calls of normal mode of V1."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.integrations.deep_ep.events import EventOverlap
from epcomm.integrations.deep_ep.layout import layout_of
from epcomm.integrations.deep_ep.normal import (
    Rows,
    bias_of,
    refuse_along,
    return_rows,
    send_along,
)
from epcomm.integrations.deep_ep.v1 import checks
from epcomm.integrations.deep_ep.v1.base import Opened, XTensors
from epcomm.integrations.deep_ep.v1.config import Config, dispatch_config
from epcomm.integrations.deep_ep.v1.handle import NormalBatch, NormalHandle, handle_error
from epcomm.integrations.deep_ep.v1.normal import dispatch_v1, is_static, shape_of, with_length

DispatchResult = tuple[
    XTensors,
    Tensor | None,
    Tensor | None,
    list[int] | None,
    tuple[Tensor, ...] | None,
    EventOverlap,
]
_ONE_HOST = (
    "ranks of several hosts are not there in epcomm.integrations.deep_ep; call dispatch() and "
    "combine() on ranks of one host, or epcomm's own API, with backend collective or deep_ep_v1"
)


# A configuration costs as much as a small call.
_usual_config = lru_cache(dispatch_config)


class NormalCalls(Opened):
    """Dispatch and combine of normal mode, which are collective over the group."""

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
        self._begin("get_dispatch_layout", topk_idx)
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

        Collective: yes.   Host sync: one; none with a handle, and on a GPU with num_worst_tokens.
        Lifetime: the caller owns what it gets.
        Raises:
            ShapeError, CapacityError: the call of some rank cannot be; on every rank. Where the
                host waits for none: on that rank, and the sums of the others are NaN.
        """
        del num_tokens_per_rank, num_tokens_per_rdma_rank
        rows, name = Rows.of(x), "dispatch"
        ranks = self._begin(name, rows.x)
        self._saved_handles.drop_freed()
        config = config or _usual_config(self.num_sms, self.group_size)
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        least = {
            "expert_alignment": (expert_alignment, 1),
            "num_worst_tokens": (num_worst_tokens, 0),
        }
        error = checks.options_error(ranks, name, config, least) or checks.event_error(
            ranks, name, *streams
        )
        if not isinstance(num_worst_tokens, int):
            num_worst_tokens = 0
        if handle is not None:
            known = self._known(handle, rows, error)
            ranks.go_along("dispatch along a handle", rows.x)
            with self._call(rows.x, *streams) as call:
                along = with_length(send_along(known.way, rows), known.sizes[0])
                event = call.event([rows.x, rows.scales, along.x, along.scales])
            return along.as_given(), None, None, None, None, event
        topk, has_static_sizes = (
            (topk_idx, topk_weights),
            is_static(ranks, topk_idx, num_worst_tokens),
        )
        error = error or checks.dispatch_error(
            ranks, rows, topk, is_token_in_rank, num_tokens_per_expert
        )
        if error is None and has_static_sizes:
            error = checks.worst_error(ranks, rows, num_worst_tokens)
        num_sms = config.sms or None if isinstance(config, Config) else None
        if error is not None:
            spec = shape_of(
                ranks,
                rows,
                topk_idx,
                num_tokens_per_expert,
                num_sms=num_sms,
                num_worst_tokens=num_worst_tokens,
            )
            ranks.refuse(Mode.NORMAL, error, is_static=has_static_sizes, spec=spec)
        with self._call(rows.x, *streams) as call:
            assert is_token_in_rank is not None, "just checked"
            assert num_tokens_per_expert is not None, "just checked"
            received = dispatch_v1(
                ranks,
                rows,
                topk,
                is_token_in_rank,
                num_tokens_per_expert,
                num_sms=num_sms,
                num_worst_tokens=num_worst_tokens,
            )
            made = NormalHandle.of(
                received,
                is_token_in_rank,
                self._saved_handles,
                channels=config.num_channels,
                hidden_size=rows.x.shape[1],
            )
            event = call.event([rows.x, rows.scales, topk_idx, topk_weights, *received.tensors()])
        counts = _aligned(received.num_tokens_per_expert, expert_alignment)
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
        """Sum rows over the ranks of each token, without weights.

        topk_weights [R, K] are summed in the same way, entry by entry, beside ids of -1 too: pass 0
        there if only the rank of an expert is to give its weight.

        A bias, [T, H] in the dtype of x, or two of them, are the beginning of the sums, which are
        float32 and rounded once.

        Collective: yes.   Host sync: none.   Lifetime: the caller owns what it gets.
        Raises:
            ShapeError, HandleError: the call of some rank cannot be; on every rank.
        """
        ranks = self._begin("combine")
        known = self._batch_of(handle, "combine")
        biases = [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias]
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        config = config or _usual_config(self.num_sms, self.group_size)
        error = (
            checks.options_error(ranks, "combine", config, {})
            or checks.event_error(ranks, "combine", *streams)
            or checks.combine_error(ranks, x, known.sizes, topk_weights, biases, known.way)
        )
        if error is not None:
            if not known.way.buffer.needs_nvlink:
                ranks.refuse_combine(Mode.NORMAL, error)
            known.way.buffer.refuse_combine(error)
            raise error
        ranks.go_along("combine", x, has_weights=topk_weights is not None)
        with self._call(x, *streams) as call:
            combined, weights = return_rows(known.way, x, topk_weights, bias_of(biases))
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
        *,
        num_worst_tokens: int = 0,
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

    def _batch_of(self, handle: object, function: str) -> NormalBatch:
        """Return the batch of a handle, or refuse the call on all ranks."""
        batch = self._saved_handles.find(handle)
        if batch is None:
            where = self._ranks.where
            self._ranks.refuse_combine(Mode.NORMAL, handle_error(handle, function, where))
        self._ranks.compare_owner(function, batch.way.buffer)
        return batch

    def _known(self, handle: object, rows: Rows, error: EPError | None) -> NormalBatch:
        """Return the batch along which to send rows, or refuse the call on all ranks.

        error: what else is wrong with the call, or None.
        """
        batch = self._batch_of(handle, "dispatch")
        error = error or checks.cached_error(self._ranks, rows, batch.sizes, batch.way)
        if error is not None:
            refuse_along(batch.way, error)
        return batch


def _aligned(counts: tuple[int, ...], alignment: int) -> list[int]:
    """Return counts of experts, aligned up; hundreds of them in the time of a small call."""
    if alignment == 1:
        return list(counts)
    return [-(-each // alignment) * alignment for each in counts]
