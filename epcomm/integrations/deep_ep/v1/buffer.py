"""Buffer of DeepEP V1: its calls and signatures, translated to epcomm's buffers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.errors import ConfigError, ShapeError
from epcomm.integrations.deep_ep.events import AsyncCall, CommStream, EventHandle, EventOverlap
from epcomm.integrations.deep_ep.layout import layout_of
from epcomm.integrations.deep_ep.normal import Rows, dispatch_rows, return_rows, send_along
from epcomm.integrations.deep_ep.ranks import Ranks
from epcomm.integrations.deep_ep.v1 import config as configs
from epcomm.integrations.deep_ep.v1.config import Config
from epcomm.integrations.deep_ep.v1.handle import NormalHandle, way_of
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
        self._ranks.check_open("get_dispatch_layout")
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
        """
        self._ranks.check_open("dispatch")
        rows = Rows.of(x)
        with self._call(rows.x, previous_event, async_finish, allocate_on_comm_stream) as call:
            if handle is not None:
                along = send_along(way_of(handle, "dispatch", self._ranks.where), rows)
                event = call.event([rows.x, rows.scales, along.x, along.scales])
                return along.as_given(), None, None, None, None, event
            if is_token_in_rank is None or topk_idx is None or topk_weights is None:
                raise ShapeError("dispatch: topk_idx, topk_weights and is_token_in_rank are needed")
            assert num_tokens_per_expert is not None
            received = dispatch_rows(
                self._ranks, rows, topk_idx, topk_weights, num_tokens_per_expert.shape[0]
            )
            channels = (config or self.get_dispatch_config(self.group_size)).num_channels
            made = NormalHandle.of(self._ranks, received.way, is_token_in_rank, channels)
            counts = [align_up(each, expert_alignment) for each in received.num_tokens_per_expert]
            event = call.event(
                [rows.x, rows.scales, topk_idx, topk_weights, *received.tensors(), *made]
            )
        ids, weights = received.topk_ids, received.topk_weights
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
        """Sum over the ranks of each token, without weights; weights are summed beside it."""
        self._ranks.check_open("combine")
        way = way_of(handle, "combine", self._ranks.where)
        biases = [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias]
        with self._call(x, previous_event, async_finish, allocate_on_comm_stream) as call:
            combined, weights = return_rows(way, x, topk_weights)
            if biases:
                combined = torch.stack([combined, *biases]).float().sum(0).to(x.dtype)
            event = call.event([x, topk_weights, *biases, combined, weights])
        return combined, weights, event

    def _call(
        self, like: Tensor, previous: EventOverlap | None, is_async: bool, allocates_here: bool
    ) -> AbstractContextManager[AsyncCall]:
        return self._comm_stream.call(
            like.device, previous, is_async=is_async, allocates_here=allocates_here
        )
