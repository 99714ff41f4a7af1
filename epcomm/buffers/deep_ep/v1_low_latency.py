"""Low latency of deep_ep V1: MASKED rows, quantised in its kernel, weighted in its combine.

Every expert has capacity for M rows of each rank, rounded up to a multiple of expert_alignment.
Rows of one rank are neighbours, ranks come in any order. Combine multiplies by the weights at the
rank of the token. The receive step runs in wait(): until then no SM works. A send clears the counts
of the call before it, which is received first.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, Dispatched
from epcomm.buffers.deep_ep.rows import (
    MESSAGE_HEADER_BYTES,
    LegacyHandle,
    Rows,
    low_latency_bytes,
    low_latency_scale_bytes,
)
from epcomm.buffers.sizes import CallShape, Region
from epcomm.buffers.traffic import BufferTraffic
from epcomm.buffers.vendor import COMBINE, DISPATCH, VendorCalls
from epcomm.calls.call import DispatchCall
from epcomm.config import Mode
from epcomm.errors import EPError, HandleError
from epcomm.ops.slots import count_experts
from epcomm.platforms import deep_ep_package
from epcomm.platforms.deep_ep import queue_reasons
from epcomm.platforms.machine import Machine
from epcomm.protocol import BatchFlags
from epcomm.records import ExchangePlan, Pending, SlotIndex
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import Layout, RowsPer, ScaleLayout, WireDtype, WireTensor, align_up

# Source of the limits: deep_ep, csrc/kernels/legacy: SWITCH_HIDDEN, kNumMaxTopK.
_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
_MAX_TOP_K = 11
_MAX_LOCAL_EXPERTS = 1024
# The constructor takes the ranks of one host, or of several whole hosts.
_HOST_RANKS = 8
# The package counts units of 16 bytes in an int32.
_MAX_MESSAGE_BYTES = 16 * (2**31 - 1)
_BATCHES_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class LowLatencyExchangePlan(ExchangePlan):
    """The plan of a low-latency dispatch, with what its combine needs.

    topk_ids: [T, K], as they were sent.   topk_weights: [T, K], float32, a copy.
    batch: the number of its dispatch.
    """

    handle: LegacyHandle
    topk_ids: Tensor
    topk_weights: Tensor
    has_failed: Tensor
    batch: int


class DeepEPV1LowLatencyBuffer(VendorCalls, Buffer):
    """Serves low latency with static sizes, without host sync, in graphs, two batches in flight."""

    name: ClassVar[str] = "deep_ep_v1"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.LOW_LATENCY})
    # The kernel of the package quantises.
    takes_wire_tensors: ClassVar[bool] = False
    # Each expert has capacity for one slot of each token.
    needs_distinct_ids: ClassVar[bool] = True

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        return deep_ep_package.probe_deep_ep(deep_ep_package.WITH_LEGACY_BUFFER, machine)

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return BufferCaps(
            layout=Layout.MASKED,
            trainable=False,
            ordered=False,
            wire_dtypes=deep_ep_package.WIRE_DTYPES,
            combine_dtypes=frozenset({WireDtype.LOGFMT10}),
            max_top_k=_MAX_TOP_K,
            batches_in_flight=_BATCHES_IN_FLIGHT,
            has_receive_hook=True,
            is_static=True,
            has_slot_budget=False,
            reports_faults=False,
            device_types=deep_ep_package.device_types(),
        )

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = deep_ep_package.format_reasons(spec)
        if spec.hidden_size not in _HIDDEN_SIZES:
            sizes = ", ".join(map(str, _HIDDEN_SIZES))
            reasons.append(f"is compiled for hidden_size {sizes}, not {spec.hidden_size}")
        if spec.num_local_experts > _MAX_LOCAL_EXPERTS:
            reasons.append(f"has at most {_MAX_LOCAL_EXPERTS} experts a rank")
        if world_size > _HOST_RANKS and world_size % _HOST_RANKS:
            reasons.append(f"serves whole hosts of {_HOST_RANKS} ranks, not {world_size} ranks")
        if spec.max_tokens_per_rank is None:
            return tuple(reasons)
        capacity = _rank_capacity(spec, world_size) * world_size
        if spec.dispatch_format.dtype is WireDtype.FP8_E4M3 and capacity % 4:
            reasons.append("FP8 rows need max_tokens_per_rank * ranks to be a multiple of 4")
        most, num_bytes = _MAX_MESSAGE_BYTES, message_bytes(spec, world_size)
        if num_bytes >= most:
            reasons.append(f"needs {num_bytes} B for messages, and takes less than {most} B")
        return tuple(reasons)

    @classmethod
    def lacks_with(cls, machine: Machine, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        package = machine.find_deep_ep()
        if spec.combine_format is not None and package is not None and not package.has_logfmt:
            return ("low_latency_combine() of the installed package has no use_logfmt",)
        if spec.max_tokens_per_rank is None:
            return ()
        return queue_reasons(_rank_capacity(spec, world_size), machine.environment)

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        num_slots = spec.num_local_experts * _rank_capacity(spec, world_size) * world_size
        wire, hidden_size = spec.dispatch_format, spec.hidden_size
        row_bytes = wire.data_bytes(hidden_size) + wire.scale_bytes(hidden_size)
        sizes = {
            "deep_ep's messages": message_bytes(spec, world_size),
            "received rows": num_slots * row_bytes,
            "expert results": num_slots * spec.hidden_format.data_bytes(hidden_size),
        }
        return tuple(Region(name=name, max_bytes=size) for name, size in sizes.items())

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        out, combine_bytes = _slot_bytes(spec)
        return BufferTraffic(
            dispatch_bytes=call.slots_sent * out, combine_bytes=call.slots_received * combine_bytes
        )

    def prepare(self) -> None:
        package: Any = deep_ep_package.load_deep_ep(deep_ep_package.WITH_LEGACY_BUFFER)
        spec = self._spec
        self._max_tokens = _rank_capacity(spec, self._world_size)
        self._expert_capacity = self._max_tokens * self._world_size
        self._max_slots = spec.num_local_experts * self._expert_capacity
        num_bytes = package.Buffer.get_low_latency_rdma_size_hint(
            self._max_tokens, spec.hidden_size, self._world_size, self._num_experts
        )
        # Normal kernels never touch this memory, so nothing has to be cleaned.
        self._buffer = package.Buffer(
            self._process_group,
            num_rdma_bytes=num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=spec.num_local_experts,
            explicitly_destroy=True,
        )
        # The numbers of the batches in flight; the third one ends the first.
        self._in_flight: deque[int] = deque(maxlen=_BATCHES_IN_FLIGHT)
        self._num_batches = 0
        # The receive step of the last call, which runs once: in wait(), or before the next send.
        self._receive_last: Callable[[], None] = lambda: None

    def dispatch(self, call: DispatchCall) -> Dispatched:
        return self.dispatch_async(call).wait()

    def dispatch_async(self, call: DispatchCall) -> Pending[Dispatched]:
        self._check_open()
        ids, fault = self._guard_on_device(call)
        has_failed = self._record(call, fault)
        is_power_of_two = self._spec.dispatch_format.scale_dtype == torch.float8_e8m0fnu
        self._receive_last()
        received, counts, handle, _, receive = self._buffer.low_latency_dispatch(
            *(call.unquantized.contiguous(), ids, self._max_tokens, self._num_experts),
            use_fp8=self._spec.dispatch_format.dtype is WireDtype.FP8_E4M3,
            round_scale=is_power_of_two,
            use_ue8m0=is_power_of_two,
            return_recv_hook=True,
        )
        batch = self._num_batches
        self._num_batches += 1
        self._in_flight.append(batch)
        experts = torch.arange(len(counts) + 1, dtype=torch.int32, device=counts.device)
        exchange_plan = LowLatencyExchangePlan(
            num_tokens=ids.shape[0],
            num_rows=self._max_slots,
            index=SlotIndex(
                num_tokens_per_expert=counts,
                first_slot=self._expert_capacity * experts,
                expert_alignment=self._spec.expert_alignment,
            ),
            handle=handle,
            topk_ids=ids,
            # Combine reads the weights, and the caller may have overwritten them by then.
            topk_weights=call.topk_weights.clone(memory_format=torch.contiguous_format),
            has_failed=has_failed,
            batch=batch,
        )
        sent = count_experts(ids, self._num_experts).view(self._world_size, -1).sum(1)
        self._count_bytes(DISPATCH, sent, _slot_bytes(self._spec)[0])
        receive_once = self._receive_last = cache(receive)

        def wait() -> Dispatched:
            self._check_in_flight(batch, "wait")
            receive_once()
            return Dispatched(
                rows=self._wire(received),
                index=exchange_plan.index,
                slot_weights=None,
                exchange_plan=exchange_plan,
                any_flags=BatchFlags.NONE,
            )

        return Pending(wait)

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
        assert row_scalars is None, "low latency has no backward"
        if error is not None:
            self._compare_combine(error)
            return rows, None
        assert exchange_plan is not None, "it is None with an error alone"
        pending = self.combine_async(
            rows, exchange_plan, rows_per=rows_per, slot_weights=slot_weights
        )
        return pending.wait(), None

    def combine_async(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
    ) -> Pending[Tensor]:
        assert isinstance(exchange_plan, LowLatencyExchangePlan), "an exchange plan of this buffer"
        assert rows_per is RowsPer.SLOT, "a row is a slot here"
        assert slot_weights is None, "weights are applied by combine"
        self._check_open()
        self._check_in_flight(exchange_plan.batch, "combine")
        self._compare_combine(None)
        self._receive_last()
        # Releases without the parameter send bfloat16.
        options = {} if self._spec.combine_format is None else {"use_logfmt": True}
        y, _, receive = self._buffer.low_latency_combine(
            rows.contiguous().view(self._spec.num_local_experts, self._expert_capacity, -1),
            *(exchange_plan.topk_ids, exchange_plan.topk_weights, exchange_plan.handle),
            return_recv_hook=True,
            **options,
        )
        # handle[1] is layout_range, [L, W]: the first row of each rank and the number of its rows.
        from_rank = (exchange_plan.handle[1] & 0xFFFFFFFF).sum(0)
        self._count_bytes(COMBINE, from_rank, _slot_bytes(self._spec)[1])
        self._in_flight.remove(exchange_plan.batch)
        receive_once = self._receive_last = cache(receive)

        def wait() -> Tensor:
            receive_once()
            return y.masked_fill(exchange_plan.has_failed, float("nan"))

        return Pending(wait)

    def _check_in_flight(self, batch: int, function: str) -> None:
        if batch not in self._in_flight:
            raise HandleError(
                f"{function}: batch {batch} was combined, or a later batch has overwritten its "
                f"memory, because at most {_BATCHES_IN_FLIGHT} may be in flight "
                f"({self._collectives.names.where}); combine a batch before the second dispatch "
                "after it"
            )

    def _wire(self, received: Rows) -> WireTensor:
        wire_format = self._spec.dispatch_format
        if isinstance(received, Tensor):
            return WireTensor(data=received, format=wire_format)
        data, scales = received
        is_packed = scales.dtype == torch.int32
        return WireTensor(
            data=data,
            format=wire_format,
            scales=scales,
            scale_layout=ScaleLayout(column_major=True, alignment=4, packed=is_packed),
        )

    def _destroy(self) -> None:
        self._buffer.destroy()


def _rank_capacity(spec: BufferSpec, world_size: int) -> int:
    """Return the tokens of a rank that the package has memory for: M, rounded up.

    M = 100 of 8 ranks with experts aligned to 128 gives 112, so that an expert has 896 rows.
    """
    assert spec.max_tokens_per_rank is not None, "plan() has checked the limit"
    unit = spec.expert_alignment // gcd(spec.expert_alignment, world_size)
    return align_up(spec.max_tokens_per_rank, unit)


def message_bytes(spec: BufferSpec, world_size: int) -> int:
    """Return the bytes of messages in both directions, twice, and of their signals."""
    num_experts = spec.num_local_experts * world_size
    return low_latency_bytes(_rank_capacity(spec, world_size), spec.hidden_size, num_experts)


def _slot_bytes(spec: BufferSpec) -> tuple[int, int]:
    """Return the bytes of one (token, expert) pair in dispatch and in combine.

    With logfmt10 the most: the kernel chooses, by block, between 10 bits and bfloat16.
    """
    wire, hidden = spec.dispatch_format, spec.hidden_size
    scale_bytes = 0 if wire.scale_dtype is None else low_latency_scale_bytes(hidden)
    return MESSAGE_HEADER_BYTES + wire.data_bytes(hidden) + scale_bytes, 2 * hidden
