"""Normal mode and low latency of deep_ep V2: rows of the elastic buffer, with ids.

Backward under activation checkpointing joins two dispatches, so that rows must come in one order:
deterministic=True, a sort and a pass over the rows inside deep_ep. With static sizes dispatch
returns W * M rows, of which the counts on the device say how many are real; ids, weights and rows
after these are undefined. Calls along a handle name its number of SMs: without one deep_ep reads
the number of experts, which a cached call does not have.
"""

from collections.abc import Set
from dataclasses import replace
from types import ModuleType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.buffers.base import Dispatched
from epcomm.buffers.deep_ep.normal import DeepEPBuffer, ReceivedBatch
from epcomm.buffers.deep_ep.rows import ElasticHandle, Rows, row_bytes_of, weights_argument
from epcomm.buffers.sizes import Region, max_slots_of
from epcomm.calls.call import DispatchCall
from epcomm.calls.faults import assume_all_need_grad
from epcomm.config import Mode
from epcomm.ops.slots import aligned_counts, mark_pairs
from epcomm.platforms.deep_ep import DeepEPKind
from epcomm.platforms.deep_ep_package import WITH_ELASTIC_BUFFER, format_reasons
from epcomm.records import SlotIndex
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import WireDtype

# Source of the limits: deep_ep, csrc/elastic/buffer.hpp and impls.
_HIDDEN_MULTIPLE = 256
_MAX_LOCAL_EXPERTS, _MAX_EXPERTS, _MAX_RANKS, _MAX_HOSTS = 256, 2048, 1024, 32


class DeepEPV2Buffer(DeepEPBuffer[ElasticHandle]):
    """Serves normal mode with exact sizes; the host waits for the counts, once a dispatch.

    expands: there is a row for each (token, expert) pair, and no backward. Otherwise rows are
        ordered by (source rank, token), and gradients go along the same handles.
    """

    name: ClassVar[str] = "deep_ep_v2"
    kinds: ClassVar[Set[DeepEPKind]] = WITH_ELASTIC_BUFFER
    hidden_multiple: ClassVar[int] = _HIDDEN_MULTIPLE
    is_static: ClassVar[bool] = False
    # Kernels of the package assert that the experts of a token are distinct.
    needs_distinct_ids: ClassVar[bool] = True
    sums_row_scalars: ClassVar[bool] = False
    expands: ClassVar[bool] = False

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        limits = (
            ("ranks", world_size, _MAX_RANKS),
            ("experts", spec.num_local_experts * world_size, _MAX_EXPERTS),
            ("experts of one rank", spec.num_local_experts, _MAX_LOCAL_EXPERTS),
        )
        reasons = format_reasons(spec)
        if spec.max_tokens_per_rank is None:
            # In mode auto the limit is for decode, and a prefill with exact sizes has none.
            reasons.append(
                "allocates once; set max_tokens_per_rank, and in mode auto max_recv_slots too, or "
                "mode normal"
            )
        reasons += [f"{size} {what}, at most {most}" for what, size, most in limits if size > most]
        return tuple(reasons)

    @classmethod
    def lacks_between(cls, spec: BufferSpec) -> tuple[str, ...]:
        found = 1 if spec.hosts is None else spec.hosts.num_hosts
        return (f"{found} hosts, at most {_MAX_HOSTS}",) if found > _MAX_HOSTS else ()

    @classmethod
    def own_region(cls, spec: BufferSpec, world_size: int) -> Region:
        # Rows of every rank in dispatch and combine; its size hint is a little more.
        row, max_rows = row_bytes_of(spec), (spec.max_tokens_per_rank or 0) * world_size
        return Region(name="deep_ep's rows", max_bytes=max_rows * max(row.dispatch, row.combine))

    def _open(self, package: ModuleType) -> object:
        is_fp8 = self._spec.dispatch_format.dtype is WireDtype.FP8_E4M3
        return package.ElasticBuffer(
            self._process_group,
            num_max_tokens_per_rank=self._spec.max_tokens_per_rank,
            hidden=self._spec.hidden_size,
            num_topk=self._spec.top_k,
            # Gradients are sent in bfloat16 along the same handle, and need its capacity.
            use_fp8_dispatch=is_fp8 and self.expands,
            deterministic=not self.expands,
            explicitly_destroy=True,
        )

    def _send(self, rows: Rows, ids: Tensor, weights: Tensor) -> ReceivedBatch:
        received, local_ids, weights, handle, _ = self._buffer.dispatch(
            rows,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=self._num_experts,
            num_max_tokens_per_rank=self._spec.max_tokens_per_rank,
            expert_alignment=self._spec.expert_alignment if self.expands else 1,
            do_cpu_sync=not self.is_static,
            do_expand=self.expands,
        )
        if self.is_static and not self.expands:
            # Ids after the last received row are undefined.
            is_received = _is_received(handle, local_ids.shape[0])
            local_ids = torch.where(is_received.unsqueeze(1), local_ids, -1)
        return ReceivedBatch(
            rows=received,
            local_ids=local_ids,
            weights=weights,
            host_counts=tuple(handle.num_recv_tokens_per_expert_list),
            handle=handle,
            rows_to_rank=mark_pairs(ids // self._spec.num_local_experts, self._world_size).sum(0),
            rows_from_rank=self._rows_from_ranks(handle),
        )

    def _send_along(self, rows: Tensor, handle: ElasticHandle) -> Tensor:
        return self._buffer.dispatch(rows, handle=handle, num_sms=handle.num_sms)[0]

    def _return(
        self, rows: Tensor, handle: ElasticHandle, row_scalars: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        y, scalars, _ = self._buffer.combine(
            rows, handle, topk_weights=row_scalars, num_sms=handle.num_sms
        )
        return y, scalars

    def _rows_from_ranks(self, handle: ElasticHandle) -> Tensor:
        """Return the number of rows from each rank, [W], int64, on the device.

        Prefix sums of the handle go by NVLink domains, so tokens are counted.
        """
        tokens, max_tokens = handle.recv_src_metadata[:, 0].long(), self._spec.max_tokens_per_rank
        assert max_tokens is not None, "plan() has checked the limit"
        # Tokens are numbered rank * M + t. Numbers after the last received row are undefined.
        is_received = _is_received(handle, tokens.shape[0])
        ranks = torch.where(is_received, tokens // max_tokens, self._world_size)
        counts = torch.zeros(self._world_size + 1, dtype=torch.int64, device=tokens.device)
        return counts.scatter_add_(0, ranks, torch.ones_like(ranks))[: self._world_size]


class DeepEPV2StaticBuffer(DeepEPV2Buffer):
    """Serves normal mode with W * M rows and a budget of slots; the host reads nothing."""

    is_static: ClassVar[bool] = True


class DeepEPV2LowLatencyBuffer(DeepEPV2StaticBuffer):
    """Serves low latency, any routing of M tokens a rank; the host reads nothing.

    Rows have a router weight each, are packed by expert, and come in any order within an expert.
    Padding follows the rows of each expert. There is no backward, because combine of expanded rows
    takes no gradients of weights.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.LOW_LATENCY})
    expands: ClassVar[bool] = True

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(super().caps(mode), trainable=False, ordered=False, has_slot_budget=False)

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        row = row_bytes_of(spec)
        num_slots = max_slots_of(spec, (spec.max_tokens_per_rank or 0) * world_size)
        return (
            cls.own_region(spec, world_size),
            Region(name="received slots", max_bytes=num_slots * row.dispatch),
            Region(name="expert results", max_bytes=num_slots * row.combine),
        )

    def _dispatch_static(self, call: DispatchCall, rows: Rows) -> Dispatched:
        ids, fault = self._guard_on_device(call)
        has_failed = self._record(call, fault)
        received = self._send(rows, ids, weights_argument(call.topk_weights))
        alignment = self._spec.expert_alignment
        # The real rows of each expert end here, and those of the next begin at the next multiple.
        ends = received.handle.psum_num_recv_tokens_per_expert
        starts = F.pad(aligned_counts(ends, alignment), (1, 0))
        index = SlotIndex(
            num_tokens_per_expert=(ends - starts[:-1]).to(torch.int32),
            first_slot=starts.to(torch.int32),
            expert_alignment=alignment,
        )
        return self._dispatched(ids, received, index, assume_all_need_grad(call.flags), has_failed)


def _is_received(handle: ElasticHandle, num_rows: int) -> Tensor:
    """Return which of R rows arrived, [R], bool."""
    num_received = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
    return torch.arange(num_rows, device=num_received.device) < num_received
