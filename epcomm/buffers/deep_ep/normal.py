"""The part that buffers over both deep_ep packages share, except low latency of V1.

A token goes once to each rank that needs it. Dispatch returns rows with the ids of each, from which
the expert-major index is built here. Combine sums rows without weights, which the runner applies,
or the reduction of slots to rows. Backward goes along the handle. With max_recv_slots the host
reads nothing: dispatch returns W * M rows, and ids of rows that no rank sent are -1.

deep_ep runs its kernels on a stream that waits for the current one, and without async_finish the
current one waits for them. So a begun call needs no event of deep_ep: it calls deep_ep on the side
stream (epcomm/calls/side_stream.py), in begin(). A dispatch with exact sizes pauses first, because
in it deep_ep waits on the host for counts, and so for all that the side stream holds. In begin()
the caller could not launch a product in the meantime, and a chunk would wait for the experts of the
chunk before. The next begin() or wait() calls deep_ep: rows are sent beside the products that the
caller has launched since.
"""

from abc import abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, Dispatched
from epcomm.buffers.deep_ep.rows import Rows, as_argument, as_wire, row_bytes_of, weights_argument
from epcomm.buffers.row_layout import wire_tensor_of
from epcomm.buffers.sizes import (
    CallShape,
    Region,
    index_region,
    max_slots_of,
    rows_region,
    slot_regions,
)
from epcomm.buffers.traffic import BufferTraffic
from epcomm.buffers.vendor import COMBINE, DISPATCH, VendorCalls
from epcomm.calls.call import DispatchCall
from epcomm.calls.faults import assume_all_need_grad
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.ops.slots import (
    AnyMembers,
    aligned_counts,
    build_slot_index,
    count_experts,
    reduce_rows,
    slots_by_row,
    spread_to_slots,
)
from epcomm.platforms.deep_ep import DeepEPKind
from epcomm.platforms.deep_ep_package import WIRE_DTYPES, device_types, load_deep_ep, probe_deep_ep
from epcomm.platforms.machine import Machine
from epcomm.protocol import BatchFlags
from epcomm.records import ExchangePlan, SlotIndex, Steps, to_the_end
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import Layout, RowsPer

HandleT = TypeVar("HandleT")
# At most 32 experts a token. Source: deep_ep, csrc, where each has a lane of a warp.
_MAX_TOP_K = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class DeepEPExchangePlan(ExchangePlan):
    """The package's handle, and the index over the rows.

    slots_by_row: the slots of each received row, in k order; None where a row is a slot.
    rows_to_rank, rows_from_rank: [W], on the device.
    has_failed: bool scalar on the device; None if dispatch raises faults.
    """

    handle: Any
    slots_by_row: AnyMembers | None
    rows_to_rank: Tensor
    rows_from_rank: Tensor
    has_failed: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceivedBatch:
    """The result of dispatch() of a package.

    local_ids: [R, K], int64, experts of this rank or -1; undefined where a row is a slot.
    weights: [R, K], float32; [R] where a row is a slot.
    host_counts: slots of each expert; empty where the host did not wait.
    rows_to_rank, rows_from_rank: as in DeepEPExchangePlan.
    """

    rows: Rows
    local_ids: Tensor
    weights: Tensor
    host_counts: tuple[int, ...]
    handle: Any
    rows_to_rank: Tensor
    rows_from_rank: Tensor


class DeepEPBuffer(VendorCalls, Buffer, Generic[HandleT]):
    """A buffer over one package, whose Buffer it opens in prepare().

    kinds: the packages that have it.   hidden_multiple: H must be a multiple of it.
    is_static: W * M rows and a budget of slots, and the host reads nothing; else sizes are exact.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL})
    kinds: ClassVar[Set[DeepEPKind]]
    hidden_multiple: ClassVar[int]
    is_static: ClassVar[bool]
    _buffer: Any

    @classmethod
    @abstractmethod
    def own_region(cls, spec: BufferSpec, world_size: int) -> Region:
        """Return the memory that the package allocates once. Local."""

    @abstractmethod
    def _open(self, package: ModuleType) -> object:
        """Return the Buffer of the package. Collective: yes.   Host sync: yes."""

    @abstractmethod
    def _send(self, rows: Rows, ids: Tensor, weights: Tensor) -> ReceivedBatch:
        """Send rows [T, H] to the ranks of their experts, with ids and weights [T, K].

        Collective: yes.   Host sync: one, none where is_static.
        """

    @abstractmethod
    def _send_along(self, rows: Tensor, handle: HandleT) -> Tensor:
        """Send [T, H] along an earlier dispatch. Collective: yes.   Host sync: none."""

    @abstractmethod
    def _return(
        self, rows: Tensor, handle: HandleT, row_scalars: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Sum rows and scalars by token. Collective: yes.   Host sync: none."""

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        return probe_deep_ep(cls.kinds, machine)

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return BufferCaps(
            layout=Layout.ROWS,
            trainable=True,
            ordered=True,
            wire_dtypes=WIRE_DTYPES,
            max_top_k=_MAX_TOP_K,
            hidden_multiple=cls.hidden_multiple,
            is_static=cls.is_static,
            reports_faults=False,
            device_types=device_types(),
        )

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        row, copies = row_bytes_of(spec), min(spec.top_k, world_size)
        max_tokens = spec.max_tokens_per_rank
        max_rows = None if max_tokens is None else max_tokens * world_size
        return (
            cls.own_region(spec, world_size),
            rows_region("received rows", row.dispatch, per_token=copies, max_rows=max_rows),
            index_region(spec, rows_per_token=copies, max_rows=max_rows),
            *slot_regions(spec, row_bytes=row.dispatch, max_rows=max_rows),
            rows_region("partial sums", row.combine, per_token=copies, max_rows=max_rows),
        )

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        row = row_bytes_of(spec, backward=backward)
        # deep_ep exchanges the counts itself.
        return BufferTraffic(
            dispatch_bytes=call.rows_sent * row.dispatch,
            combine_bytes=call.rows_received * row.combine,
        )

    def prepare(self) -> None:
        self._buffer = self._open(load_deep_ep(self.kinds))
        # Packages for CPU ranks send over the process group, which the caller uses too.
        self.begins_calls = self._device.type == "cuda"
        self._num_rows = (self._spec.max_tokens_per_rank or 0) * self._world_size
        if self.is_static:
            self._max_slots = self._spec.max_recv_slots or max_slots_of(self._spec, self._num_rows)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        return to_the_end(self.dispatch_steps(call))

    def dispatch_steps(self, call: DispatchCall) -> Steps[Dispatched]:
        self._check_open()
        rows = as_argument(wire_tensor_of(call, self._spec.dispatch_format))
        if self.is_static:
            return self._dispatch_static(call, rows)
        # The package waits for counts on the host, and so do ranks that compare their calls.
        yield
        ids, flags = self._guard(call)
        received = self._send(rows, ids, weights_argument(call.topk_weights))
        self._raise_own(call)
        index = build_slot_index(
            received.local_ids,
            count_experts(received.local_ids, self._spec.num_local_experts),
            received.host_counts,
            expert_alignment=self._spec.expert_alignment,
        )
        return self._dispatched(ids, received, index, flags, has_failed=None)

    def _dispatch_static(self, call: DispatchCall, rows: Rows) -> Dispatched:
        ids, fault = self._guard_on_device(call)
        received = self._send(rows, ids, weights_argument(call.topk_weights))
        num_local, alignment = self._spec.num_local_experts, self._spec.expert_alignment
        required = aligned_counts(count_experts(received.local_ids, num_local), alignment).sum()
        has_failed = self._record(call, fault, required)
        local_ids = torch.where(has_failed, -1, received.local_ids)
        counts = count_experts(local_ids, num_local)
        index = build_slot_index(local_ids, counts, self._max_slots, expert_alignment=alignment)
        return self._dispatched(ids, received, index, assume_all_need_grad(call.flags), has_failed)

    def _dispatched(
        self,
        ids: Tensor,
        received: ReceivedBatch,
        index: SlotIndex,
        flags: BatchFlags,
        has_failed: Tensor | None,
    ) -> Dispatched:
        wire = as_wire(received.rows, self._spec.dispatch_format)
        is_packed = index.row_of_slot is None
        self._count_bytes(DISPATCH, received.rows_to_rank, row_bytes_of(self._spec).dispatch)
        exchange_plan = DeepEPExchangePlan(
            num_tokens=ids.shape[0],
            num_rows=wire.data.shape[0],
            index=index,
            handle=received.handle,
            slots_by_row=None if is_packed else slots_by_row(index),
            rows_to_rank=received.rows_to_rank,
            rows_from_rank=received.rows_from_rank,
            has_failed=has_failed,
        )
        weights = received.weights
        return Dispatched(
            rows=wire,
            index=index,
            slot_weights=weights if is_packed else spread_to_slots(weights, index),
            exchange_plan=exchange_plan,
            any_flags=flags,
        )

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        assert isinstance(exchange_plan, DeepEPExchangePlan), "an exchange plan of this buffer"
        self._check_open()
        rows = self._send_along(hidden_states.contiguous(), exchange_plan.handle)
        backward = row_bytes_of(self._spec, backward=True)
        self._count_bytes(DISPATCH, exchange_plan.rows_to_rank, backward.dispatch)
        return rows

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan | None,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
        error: EPError | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if row_scalars is None:
            self._compare_combine(error)
        if error is not None:
            return rows, None
        self._check_open()
        assert isinstance(exchange_plan, DeepEPExchangePlan), "an exchange plan of this buffer"
        has_failed, members = exchange_plan.has_failed, exchange_plan.slots_by_row
        if rows_per is RowsPer.SLOT and members is not None:
            rows = reduce_rows(rows, members, slot_weights)
        elif rows_per is RowsPer.SLOT and slot_weights is not None:
            # Each slot is a row, and the package sums those of a token.
            rows = (rows.float() * slot_weights.unsqueeze(1)).to(rows.dtype)
        if has_failed is not None and members is not None:
            # The other ranks do not know that nothing was computed for them.
            rows = rows.masked_fill(has_failed, float("nan"))
        y, scalars = self._return(rows.contiguous(), exchange_plan.handle, row_scalars)
        row = row_bytes_of(self._spec, backward=row_scalars is not None)
        self._count_bytes(COMBINE, exchange_plan.rows_from_rank, row.combine)
        if has_failed is not None:
            y = y.masked_fill(has_failed, float("nan"))
        return y, scalars

    def _destroy(self) -> None:
        self._buffer.destroy()
