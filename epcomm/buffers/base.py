"""The contract of a Buffer, which moves rows, and of Backend, its base."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from epcomm.buffers.sizes import CallShape, Region
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.call import DispatchCall
from epcomm.calls.order import Calls
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.platforms.machine import Machine
from epcomm.protocol import BatchFlags
from epcomm.records import ExchangePlan, Pending, SlotIndex, Steps, at_once
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import Int8Profile, RowsPer, WireTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """The result of Buffer.dispatch().

    rows: [R, H], or [L, R / L, H] in the layout MASKED; rows without a slot are undefined.
    index: in MASKED, slot s is row s of the flattened rows, and each expert has capacity R / L.
    slot_weights: [C], float32; None if dispatch sends no weights.
    any_flags: the flags of all ranks, or-ed.
    """

    rows: WireTensor
    index: SlotIndex
    slot_weights: Tensor | None
    exchange_plan: ExchangePlan
    any_flags: BatchFlags


@dataclass(frozen=True, kw_only=True, eq=False)
class RowTopkDispatched(Dispatched):
    """A result with the experts and weights of each row, as row_topk() of epcomm/ops/slots.py.

    row_topk: expert ids on this rank [R, K], int64, -1 for none, and weights [R, K].
    """

    row_topk: tuple[Tensor, Tensor]


class Backend(ABC):
    """The base of buffers and fused operators, with the properties that a plan needs.

    name: the registry name; a backend has classes for modes, and for exact and static sizes.
    modes: the modes that this class serves.
    int8_profile: the INT8 arithmetic if the configuration sets none.
    needs_one_host: all ranks must be able to share memory.
    needs_host_waits: the host must wait in the collectives of the group.
    needs_nvlink: GPUs must be able to write one another's memory, with atomics.
    needs_process_group: the group must be one of torch.distributed.
    serves_replicated: it serves only tokens that all ranks share; other classes do not.
    takes_wire_tensors: DispatchCall.hidden_states may be a WireTensor.
    needs_distinct_ids: a row of ids that names an expert twice is a fault on all ranks; otherwise
        each entry is a slot.
    sums_groups: it supports BufferSpec.sum_groups.
    sums_row_scalars: combine adds the row scalars of all rows of a token; otherwise it returns the
        scalars from the rank of the expert and ignores the others.
    """

    needs_one_host: ClassVar[bool] = False
    needs_host_waits: ClassVar[bool] = False
    needs_nvlink: ClassVar[bool] = False
    needs_process_group: ClassVar[bool] = False
    serves_replicated: ClassVar[bool] = False
    takes_wire_tensors: ClassVar[bool] = True
    needs_distinct_ids: ClassVar[bool] = False
    sums_groups: ClassVar[bool] = False
    sums_row_scalars: ClassVar[bool] = True

    name: ClassVar[str]
    modes: ClassVar[frozenset[Mode]]
    int8_profile: ClassVar[Int8Profile] = Int8Profile.RINT127

    @classmethod
    @abstractmethod
    def probe(cls, machine: Machine) -> Availability:
        """Return whether this backend can run on a rank of `machine`. Local; allocates nothing."""

    @classmethod
    @abstractmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        """Return the capabilities of the backend in `mode`. Local; allocates nothing."""

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        """Return reasons against a layer that caps() does not cover. Local; allocates nothing."""
        return ()

    @classmethod
    def lacks_with(cls, machine: Machine, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        """Return the reasons against a layer on `machine`. Local; allocates nothing."""
        return ()

    @classmethod
    def lacks_between(cls, spec: BufferSpec) -> tuple[str, ...]:
        """Return the reasons against ranks on spec.hosts (None: one host).

        Local; the answer depends only on the arguments, so it is equal on all ranks.
        """
        return ()

    @classmethod
    def source_order(cls, spec: BufferSpec, world_size: int) -> Sequence[int]:
        """Return the order of source ranks in an expert's slots; valid if caps().ordered. Local."""
        return range(world_size)

    @classmethod
    @abstractmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        """Return the memory of a call's forward pass, in order of use. Local; allocates nothing.

        The sum of the regions is an upper bound, because not all exist at the same time. They
        include the runner's packed slots and results, but not y.
        """

    @classmethod
    @abstractmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        """Return the bytes that one rank sends to others in one call, as traffic() counts them.

        If ranks relay rows, the result is the maximum, because `call` has no counts of them.

        Args:
            spec: as for the constructor.
            call: this rank's part of the call.
            backward: count the backward of combine and dispatch instead of the forward pass.

        Local; allocates nothing.
        """

    @abstractmethod
    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        """Store the arguments; prepare() allocates."""

    @abstractmethod
    def prepare(self) -> None:
        """Allocate. The EPGroup has compared the specification on all ranks.

        Collective: yes.   Host sync: yes.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise the faults recorded on the device since the last check; none unless is_static.

        Local; all ranks have the same faults.   Host sync: yes.
        Raises:
            CapacityError, ShapeError, ConfigError, HandleError: the fault, with the ranks it names.
        """

    @abstractmethod
    def traffic(self) -> BufferTraffic:
        """Return the bytes sent to other ranks so far."""

    @abstractmethod
    def close(self) -> None:
        """Free what prepare() allocated. Local, idempotent."""

    def abandon(self) -> None:
        """Close after an error, without other ranks; keeps memory whose release is collective."""
        self.close()


@runtime_checkable
class ExcludesRanks(Protocol):
    """A backend that can continue without dead ranks."""

    def exclude_ranks(self, ranks: Sequence[int]) -> None:
        """Stop waiting for these ranks and sending to them; see EPGroup.exclude_ranks()."""
        ...


class Buffer(Backend):
    """The mechanism of one backend. All ranks make the same calls in the same order.

    counts_calls: every call starts with headers, which increment Calls.next_batch. Until then a
        failure on one rank can still be reported to all.
    begins_calls: calls may be begun, see epcomm/calls/transfers.py.
    """

    counts_calls: bool = False
    begins_calls: bool = False

    @abstractmethod
    def dispatch(self, call: DispatchCall) -> Dispatched:
        """Send one copy of each token to every rank that owns one of its experts.

        Collective: yes; T may differ and be 0.   Host sync: caps.host_syncs times.
        Lifetime: see BufferCaps.batches_in_flight.
        Raises:
            ShapeError, CapacityError, HandleError: some rank reported a fault; on every rank.
        """

    def dispatch_steps(self, call: DispatchCall) -> Steps[Dispatched]:
        """Dispatch, and pause where the host would wait for the device, if begins_calls."""
        return at_once(partial(self.dispatch, call))

    def dispatch_async(self, call: DispatchCall) -> Pending[Dispatched]:
        """Begin a dispatch, if caps.has_receive_hook; wait() receives the rows."""
        raise NotImplementedError(f"{self.name} has no receive hook (BufferCaps)")

    def combine_async(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
    ) -> Pending[Tensor]:
        """Begin a combine, if caps.has_receive_hook; wait() receives the sums."""
        raise NotImplementedError(f"{self.name} has no receive hook (BufferCaps)")

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        """Send [T, H] along an existing exchange plan and return [R, H]: the dual of combine.

        With BufferSpec.backward_format rows are quantised here and dequantised on arrival.
        Collective: yes.   Host sync: none.
        Lifetime: the caller owns the rows. If caps.batches_in_flight is set and the dispatch was
            made without gradients, they live as long as the rows of a dispatch.
        """
        raise NotImplementedError(f"{self.name} has no cached dispatch (BufferCaps.trainable)")

    @abstractmethod
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
        """Sum expert results per (token, rank), return the sums and add them up by token.

        Args:
            rows: [C, H] (rows_per SLOT) or [R, H] (rows_per ROW); MASKED rows flattened.
            exchange_plan: the plan of the dispatch. With an error it may be None if the batch is
                unknown; buffers with separate memory for batches then use the oldest batch.
            slot_weights: [C], float32, multiplied into slot rows, or None.
            row_scalars: [R, K], float32, sent with the rows, which then are gradients. Scalar
                (token, k) of the result is the sum over all rows of the token, whichever rank has
                its k-th expert.
            error: the reason why this rank takes part without rows, or None; with an error, rows
                are [0, H] and rows_per is ROW.

        Returns:
            y: [T, H], and the scalars, [T, K], float32, if row_scalars were given. With an error
            their content is undefined.

        Sums are float32 in ascending (k, rank) order, cast once at each end.
        Collective: yes.   Deterministic: if caps.ordered.
        Host sync: none, unless spec.compares_calls.
        Raises:
            HandleError, ShapeError: some rank has an error; on every rank, before rows are sent. If
                is_static, y is NaN instead and check() raises. Not raised with row_scalars, nor if
                the host does not wait in collectives and spec.compares_calls is not set: then the
                rank with the error does not take part.
        """


class AddsBias(Buffer):
    """A buffer whose combine can add a bias to each token."""

    @abstractmethod
    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan | None,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
        error: EPError | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Combine like Buffer.combine(), and add the bias if it is given.

        bias: [T, H], float32 (float64 with float64 rows), contiguous. The sum starts with the bias,
            adds the ranks in order, and is rounded once.
        """


class ReturnsRowTopk(Buffer):
    """A buffer that returns a RowTopkDispatched for a RowTopkCall.

    RowTopkCall.num_sms limits its kernels; in other buffers only BufferSpec.num_sms does.
    """


class ReturnsSlots(Buffer):
    """A buffer that can return one row per slot, for BufferSpec.returns_slots."""

    @abstractmethod
    def combine_slots_async(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        topk_weights: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Pending[Tensor]:
        """Begin to return expert results to the ranks of their tokens and sum them, by weight.

        Replaces combine() if the buffer was opened with BufferSpec.returns_slots; its dispatch then
        neither needs nor returns router weights. Pending.record is y.

        Args:
            rows: [C, H], one per slot; MASKED rows flattened.
            exchange_plan: the plan of the dispatch.
            topk_weights: [T, K], float32; weights of masked entries are ignored.
            out: memory for y, [T, H], contiguous, in the dtype of y; None: a new tensor.

        y is the sum over k, in order, of weight * row in float32, cast once. Rows are sent in the
        dtype of y.
        Collective: yes.   Deterministic: yes.   Host sync: none.
        Raises: as combine().
        """
