"""The contract of a Buffer: what moves rows, and what it can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from epcomm.buffers.sizes import CallShape, Region
from epcomm.buffers.traffic import BufferTraffic
from epcomm.collectives.base import Collectives
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.platforms.machine import Machine
from epcomm.protocol import BatchFlags
from epcomm.quantization import quantize, row_major
from epcomm.records import ExchangePlan, Pending, SlotIndex
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import (
    Int8Profile,
    RowsPer,
    WireFormat,
    WireTensor,
    data_of,
)


class RowQuantizer(Protocol):
    """The signature of quantize() without its choices."""

    def __call__(
        self, hidden_states: Tensor, wire_format: WireFormat, /, *, out: WireTensor | None = None
    ) -> WireTensor: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchCall:
    """One rank's part of a dispatch.

    hidden_states: [T, H], unquantised, or a WireTensor of rows that are quantised already, in the
        dispatch format of the buffer, with scales of any layout and strides: those travel as they
        are. Where Backend.takes_wire_tensors is not set, and with gradients, they do not.
    topk_ids: [T, K], int64.   topk_weights: [T, K], float32; beside float64 rows this and all that
        is float32 below is float64. Where slots come home apart, any tensor, which is not read.
    expert_names: of the tensors of the experts whose bits `flags` has, in their order.
    error: why this rank takes part with T = 0, if it does.
    quantize: brings hidden states to a format, into the memory of a message where a buffer can.
    int8_profile: its arithmetic of INT8 rows, for buffers that make them while they send.
    dispatcher: number of the dispatcher that calls, see CallOrder.add_dispatcher(); 0 for none.
    num_sms: SMs of a GPU that kernels may take for this call and along its exchange plan, at most
        those that the buffer was opened for; None for these. Read where Buffer.takes_num_sms.
    size: what callers compare on all ranks beside the specification, such as a limit of tokens; 0
        for nothing. Read where hosts compare calls.
    wants_row_topk: the caller asks for Dispatched.row_topk, and may leave the index unread.
    """

    hidden_states: Tensor | WireTensor
    topk_ids: Tensor
    topk_weights: Tensor
    flags: BatchFlags
    expert_names: tuple[str, ...] = ()
    error: EPError | None = None
    quantize: RowQuantizer = quantize
    int8_profile: Int8Profile = Int8Profile.RINT127
    dispatcher: int = 0
    num_sms: int | None = None
    size: int = 0
    wants_row_topk: bool = False

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return data_of(self.hidden_states).shape[0]

    @property
    def unquantized(self) -> Tensor:
        """Return the hidden states, which must be no WireTensor."""
        assert isinstance(self.hidden_states, Tensor), "this call was to be quantised here"
        return self.hidden_states

    def wire_tensor(self, wire_format: WireFormat) -> WireTensor:
        """Return the hidden states as they travel. Lifetime: may share memory with them."""
        if isinstance(self.hidden_states, Tensor):
            return self.quantize(self.hidden_states, wire_format)
        return row_major(self.hidden_states)

    def write(self, out: WireTensor) -> None:
        """Write the hidden states as they travel into `out`, whose rows may have any stride."""
        if isinstance(self.hidden_states, Tensor):
            self.quantize(self.hidden_states, out.format, out=out)
            return
        wire = row_major(self.hidden_states)
        out.data.copy_(wire.data)
        if out.scales is not None and wire.scales is not None:
            out.scales.copy_(wire.scales)


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Combined:
    """The result of Buffer.combine().

    y: [T, H].   scalars: [T, K], float32, where row scalars were given.
    """

    y: Tensor
    scalars: Tensor | None


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
    returns_slots: it serves specifications whose slots come home apart, BufferSpec.returns_slots.
    """

    needs_one_host: ClassVar[bool] = False
    needs_host_waits: ClassVar[bool] = False
    needs_nvlink: ClassVar[bool] = False
    needs_process_group: ClassVar[bool] = False
    serves_replicated: ClassVar[bool] = False
    takes_wire_tensors: ClassVar[bool] = True
    needs_distinct_ids: ClassVar[bool] = False
    sums_row_scalars: ClassVar[bool] = True
    returns_slots: ClassVar[bool] = False

    name: ClassVar[str]
    modes: ClassVar[frozenset[Mode]]
    int8_profile: ClassVar[Int8Profile] = Int8Profile.RINT127

    @classmethod
    @abstractmethod
    def probe(cls, machine: Machine) -> Availability:
        """Tell whether this backend can run on a rank of `machine`. Local; allocates nothing."""

    @classmethod
    @abstractmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        """Return what the backend can do in `mode`. Local; allocates nothing."""

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        """Say why it cannot serve a layer, beyond what caps() says. Local; allocates nothing."""
        return ()

    @classmethod
    def lacks_with(cls, machine: Machine, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        """Say why it cannot serve this layer on this `machine`. Local; allocates nothing."""
        return ()

    @classmethod
    def lacks_between(cls, spec: BufferSpec) -> tuple[str, ...]:
        """Say why it cannot serve ranks on the hosts that spec.hosts names, None for one host.

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
    def __init__(self, collectives: Collectives, spec: BufferSpec) -> None:
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


class AddsBias(ABC):
    """Makes combine(), and combine_onto() what is known of a token beside it, of one method."""

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        """Sum the rows of each token; see Buffer.combine()."""
        return self._combine_onto(None, rows, exchange_plan, rows_per, slot_weights, row_scalars)

    def combine_onto(
        self,
        bias: Tensor,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        """Combine as Buffer.combine() does, onto bias [T, H], float32, contiguous.

        Bias comes first, then come the ranks in their order, and the sum is rounded once; float64
        beside float64 rows.
        """
        return self._combine_onto(bias, rows, exchange_plan, rows_per, None, row_scalars)

    @abstractmethod
    def _combine_onto(
        self,
        bias: Tensor | None,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        rows_per: RowsPer,
        slot_weights: Tensor | None,
        row_scalars: Tensor | None,
    ) -> Combined:
        """Combine, onto bias or onto nothing."""


class Buffer(Backend):
    """The mechanism of one backend. Calls are collective and come in one order on all ranks.

    counts_calls: CallOrder counts a call when its ranks begin to compare it, and not before: what
        fails on one rank until then may still be told to all.
    takes_num_sms: it keeps to DispatchCall.num_sms; else BufferSpec.num_sms alone limits kernels.
    """

    counts_calls: bool = False
    takes_num_sms: bool = False

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
    ) -> Pending[Combined]:
        """Begin a combine; where caps.has_receive_hook, sums are received in wait()."""
        return Pending(
            lambda: self.combine(rows, exchange_plan, rows_per=rows_per, slot_weights=slot_weights)
        )

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
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        """Sum expert results per (token, rank), return the sums and add them up by token.

        Args:
            rows: [C, H] (rows_per SLOT) or [R, H] (rows_per ROW); MASKED rows flattened.
            slot_weights: [C], float32, multiplied into slot rows, or None.
            row_scalars: [R, K], float32, sent beside the rows. Scalar (token, k) of the result is
                the sum over all rows of the token, whichever rank has its k-th expert.

        Sums are float32 in ascending (k, rank) order, cast once at each end.
        Collective: yes.   Deterministic: yes where caps.ordered.
        Host sync: none, unless spec.compares_calls.
        Raises:
            HandleError, ShapeError: some rank refuses its call (refuse_combine); on every rank,
                before rows are sent. Where is_static, y is NaN instead and check() tells. Never
                with row_scalars, nor where the host does not wait in collectives and
                spec.compares_calls is not set: then a rank that refuses is missing.
        """

    def combine_slots(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        topk_weights: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Combined:
        """Return expert results to the rank of their token and add them up there, by weight.

        In place of combine(), in buffers that were opened with BufferSpec.returns_slots: their
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

    def combine_slots_async(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        topk_weights: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Pending[Combined]:
        """Begin combine_slots(); its arguments. y exists already: Pending.record has it."""
        raise NotImplementedError(
            f"{self.name} returns sums, not a row for each slot (returns_slots)"
        )

    @abstractmethod
    def refuse_combine(self, error: EPError) -> None:
        """Take part in the combine() of the other ranks without rows, so that they hear of `error`.

        Collective: yes, in place of combine().   Host sync: as combine().
        Raises:
            error: where the others raise too.
        """

    def refuse_combine_of(self, exchange_plan: ExchangePlan, error: EPError) -> None:
        """Refuse as refuse_combine() does, where it is known which batch the other ranks combine.

        Buffers whose batches have memory of their own need it, if several are in flight.
        """
        self.refuse_combine(error)
