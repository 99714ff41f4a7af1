"""The contract of a Buffer: what moves rows, and what it can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
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
from epcomm.records import ExchangePlan, Pending, SlotIndex
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import Int8Profile, RowsPer, WireTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """The result of Buffer.dispatch().

    rows: [R, H], or [L, R / L, H] in the layout MASKED; rows without a slot are undefined.
    index: in MASKED, slot s is row s of the flattened rows, and each expert has capacity for R / L.
    slot_weights: [C], float32; None where weights do not travel.
    any_flags: the flags of all ranks, or-ed.
    row_topk: what row_topk() of epcomm/ops/slots.py makes of the index, where a kernel of the
        dispatch has written it already, as DispatchCall.wants_row_topk asks; else None.
    """

    rows: WireTensor
    index: SlotIndex
    slot_weights: Tensor | None
    exchange_plan: ExchangePlan
    any_flags: BatchFlags
    row_topk: tuple[Tensor, Tensor] | None = None


class Backend(ABC):
    """The base of buffers and fused operators: what a plan asks of them before it chooses.

    name: of the registry; a backend has a class for each mode, and for exact and static sizes.
    modes: those that this class serves.
    int8_profile: arithmetic of INT8 where the configuration names none.
    needs_one_host: it serves ranks that can share memory, and no others.
    needs_host_waits: its host waits for the others, and must do so in the collectives too.
    needs_nvlink: GPUs of its ranks write one another's memory, with atomics.
    needs_process_group: it serves groups of torch.distributed alone.
    serves_replicated: for tokens that all ranks share, and for no others.
    takes_wire_tensors: rows may be quantised before they come, see DispatchCall.hidden_states.
    needs_distinct_ids: a row of ids that names an expert twice is a fault on all ranks; elsewhere
        each entry is a slot.
    sums_row_scalars: combine adds the row scalars of all rows of a token; else it returns those of
        the rank of the expert, and ignores the others.
    """

    needs_one_host: ClassVar[bool] = False
    needs_host_waits: ClassVar[bool] = False
    needs_nvlink: ClassVar[bool] = False
    needs_process_group: ClassVar[bool] = False
    serves_replicated: ClassVar[bool] = False
    takes_wire_tensors: ClassVar[bool] = True
    needs_distinct_ids: ClassVar[bool] = False
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
        """Return what the backend can do in `mode`. Local; allocates nothing."""

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        """Return the reasons against a layer, beyond caps(). Local; allocates nothing."""
        return ()

    @classmethod
    def lacks_with(cls, machine: Machine, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        """Return the reasons why it cannot serve a layer on `machine`. Local; allocates nothing."""
        return ()

    @classmethod
    def lacks_between(cls, spec: BufferSpec) -> tuple[str, ...]:
        """Return the reasons why it cannot serve ranks on spec.hosts, None for one host.

        Local; every rank gives the same answer, for nothing of this rank is looked at.
        """
        return ()

    @classmethod
    def source_order(cls, spec: BufferSpec, world_size: int) -> Sequence[int]:
        """Return the ranks in the order in which their tokens lie in an expert's slots. Local.

        So it is where caps().ordered.
        """
        return range(world_size)

    @classmethod
    @abstractmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        """Return the memory of a call's forward pass, in order of use. Local; allocates nothing.

        Regions live for different times, so their sum is an upper bound. The runner's packed slots
        and results are among them, y is not.
        """

    @classmethod
    @abstractmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        """Return the bytes that one rank sends to others in one call: what traffic() will count.

        Where ranks relay rows, which the shape of a call does not say, as many as they can be.

        Args:
            spec: as for the constructor.
            call: this rank's part.
            backward: of the backward of combine and dispatch, instead of dispatch and combine.

        Local; allocates nothing.
        """

    @abstractmethod
    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        """Keep the arguments; prepare() does the rest."""

    @abstractmethod
    def prepare(self) -> None:
        """Allocate. The EPGroup has compared the specification on all ranks.

        Collective: yes.   Host sync: yes.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise what has failed on the device since the last check; if not is_static, nothing.

        Local; all ranks know the same faults.   Host sync: yes.
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
        """Close after an error, without other ranks; memory whose release is collective stays."""
        self.close()


@runtime_checkable
class ExcludesRanks(Protocol):
    """A backend whose calls go on without ranks that are dead."""

    def exclude_ranks(self, ranks: Sequence[int]) -> None:
        """Wait for none of these ranks any more, and send them nothing; see EPGroup."""
        ...


class Buffer(Backend):
    """The mechanism of one backend. Calls are collective and come in one order on all ranks.

    counts_calls: Calls counts a call when its ranks begin to compare it, and not before: what
        fails on one rank until then may still be told to all.
    """

    counts_calls: bool = False

    @abstractmethod
    def dispatch(self, call: DispatchCall) -> Dispatched:
        """Send one copy of each token to every rank that owns one of its experts.

        Collective: yes; T may differ and be 0.   Host sync: caps.host_syncs times.
        Lifetime: caps.batches_in_flight says.
        Raises:
            ShapeError, CapacityError, HandleError: some rank reported a fault; on every rank.
        """

    def dispatch_async(self, call: DispatchCall) -> Pending[Dispatched]:
        """Begin a dispatch; where caps.has_receive_hook, rows are received in wait()."""
        return Pending(lambda: self.dispatch(call))

    def combine_async(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
    ) -> Pending[Tensor]:
        """Begin a combine; where caps.has_receive_hook, sums are received in wait()."""

        def combine() -> Tensor:
            y, _ = self.combine(rows, exchange_plan, rows_per=rows_per, slot_weights=slot_weights)
            return y

        return Pending(combine)

    @abstractmethod
    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        """Send [T, H] along an existing exchange plan and return [R, H]: the dual of combine.

        Collective: yes.   Host sync: none.
        Lifetime: the caller owns the rows, unless there are caps.batches_in_flight and the dispatch
            was made without gradients: then the rows live as long as those of a dispatch.
        """

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
            exchange_plan: of the dispatch. With an error it may be None, if the batch that the
                other ranks combine is not known; buffers whose batches have separate memory then
                take the oldest batch.
            slot_weights: [C], float32, multiplied into slot rows, or None.
            row_scalars: [R, K], float32, sent beside the rows. Scalar (token, k) of the result is
                the sum over all rows of the token, whichever rank has its k-th expert.
            error: why this rank takes part without rows; its rows are [0, H], rows_per ROW.

        Returns:
            y: [T, H], and the scalars, [T, K], float32, where row_scalars were given. With an error
            their content is undefined.

        Sums are float32 in ascending (k, rank) order, cast once at each end.
        Collective: yes.   Deterministic: yes where caps.ordered.
        Host sync: none, unless spec.compares_calls.
        Raises:
            HandleError, ShapeError: some rank has an error; on every rank, before rows are sent.
                Where is_static, y is NaN instead and check() raises. Never with row_scalars, nor
                where the host does not wait in collectives and spec.compares_calls is not set: then
                the rank with an error is missing.
        """


class AddsBias(Buffer):
    """A buffer whose combine adds what is known of a token beside its experts."""

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
        """Combine as Buffer.combine() does, onto bias [T, H], float32, contiguous, if it is given.

        Bias comes first, then come the ranks in their order, and the sum is rounded once; float64
        beside float64 rows.
        """


class ReturnsSlots(Buffer):
    """A buffer that can return a row for each slot: it serves BufferSpec.returns_slots."""

    def combine_slots(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        topk_weights: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return expert results to the rank of their token and add them up there, by weight.

        In place of combine(), where the buffer was opened with BufferSpec.returns_slots: then its
        dispatch needs no router weights, and hands out none.

        Args:
            rows: [C, H], one a slot; MASKED rows flattened.
            exchange_plan: of the dispatch.
            topk_weights: [T, K], float32; those of masked entries are ignored.
            out: [T, H], contiguous, in the dtype of y: memory for y; None: a new tensor.

        y is the sum over k, in order, of weight * row in float32, cast once. Rows travel as they
        are, in the dtype of y.
        Collective: yes.   Deterministic: yes.   Host sync: none.
        Raises:
            as combine().
        """
        return self.combine_slots_async(rows, exchange_plan, topk_weights, out=out).wait()

    @abstractmethod
    def combine_slots_async(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        topk_weights: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Pending[Tensor]:
        """Begin combine_slots(); its arguments. y exists already: Pending.record has it."""
