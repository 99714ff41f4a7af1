"""The contract of a Buffer: what moves rows, and what it can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from epcomm.buffers.faults import BatchFlags
from epcomm.buffers.sizes import CallShape, Region
from epcomm.buffers.traffic import BufferTraffic
from epcomm.collectives.base import Collectives
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.quantization import quantize
from epcomm.records import Pending, Route, SlotIndex
from epcomm.types import (
    Int8Profile,
    Layout,
    RowsPer,
    WeightsAppliedBy,
    WireDtype,
    WireFormat,
    WireTensor,
)


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether a backend can run on this rank, and if not, what it lacks and what to do."""

    ok: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BufferSpec:
    """What a buffer must carry; equal on all ranks, compared once in prepare().

    hidden_size: H.   top_k: K.   num_local_experts: L.
    dispatch_format, combine_format, backward_format: rows on the wire, in either direction.
    max_tokens_per_rank: M, or None for no limit.
    max_recv_slots: static budget of slots a rank receives, or None for exact sizes.
    slot_alignment: each expert's slots start at a multiple of this.
    compares_calls: ranks compare their calls where that needs an exchange of its own.
    num_sms: processors of a GPU that kernels of its own may take, None for the buffer's choice.
    batches_in_flight: dispatches that may wait for their combine, None for the buffer's choice.
    intermediate_size: I, for fused operators, which compute the experts; buffers do not, and have
        None, as has a plan that was made without experts.
    """

    hidden_size: int
    top_k: int
    num_local_experts: int
    dispatch_format: WireFormat
    combine_format: WireFormat
    backward_format: WireFormat
    max_tokens_per_rank: int | None = None
    max_recv_slots: int | None = None
    slot_alignment: int = 1
    compares_calls: bool = False
    num_sms: int | None = None
    batches_in_flight: int | None = None
    intermediate_size: int | None = None

    def as_record(self) -> dict[str, str | int | None]:
        """Plain values for Collectives.agree."""
        return {
            "hidden_size": self.hidden_size,
            "top_k": self.top_k,
            "num_local_experts": self.num_local_experts,
            "dispatch_format": f"{self.dispatch_format} {self.dispatch_format.scale_dtype}",
            "combine_format": f"{self.combine_format} {self.combine_format.scale_dtype}",
            "backward_format": f"{self.backward_format} {self.backward_format.scale_dtype}",
            "max_tokens_per_rank": self.max_tokens_per_rank,
            "max_recv_slots": self.max_recv_slots,
            "slot_alignment": self.slot_alignment,
            "compares_calls": self.compares_calls,
            "num_sms": self.num_sms,
            "batches_in_flight": self.batches_in_flight,
            "intermediate_size": self.intermediate_size,
        }


@dataclass(frozen=True, kw_only=True)
class BufferCaps:
    """What a buffer can do; every claim is proved by testing/buffer_suite.

    layout: what it hands to the experts.
    trainable: operations stand alone, weights travel and slots come in order, so autograd may use
        it; activation checkpointing joins the rows of one dispatch with the gradients of another.
    graph_safe: may be captured in a device graph.
    ordered: slots come in (expert, source rank, token) order.
    wire_dtypes: what dispatch carries.
    weights_applied_by: who may apply topk_weights.
    max_tokens_per_rank, max_top_k: limits of the mechanism, None for none.
    hidden_multiple: H must be a multiple of this.
    batches_in_flight: dispatches that may wait for their combine, unless their rows are copied
        (owns_rows); None for any number. One more, and the oldest is refused by HandleError.
    batches_on_request: BufferSpec.batches_in_flight may ask for another number, for more memory.
    late_receive: dispatch_async leaves the receive step to wait().
    reuses_route: redispatch works along an old route.
    is_static: sizes are agreed beforehand (max_tokens_per_rank, max_recv_slots) and faults wait
        on the device for check().
    serves_replicated: for tokens that all ranks share, and for no others.
    host_reads: times a dispatch makes the host wait for the device.
    combine_codecs: private compressions of combine, by name.
    combines_once: a dispatch may be combined once; a second combine raises HandleError.
    owns_rows: rows are ordinary tensors; else they live until the dispatch that is so many later
        as there may be batches in flight, but where gradients are on they are copied.
    has_slot_budget: BufferSpec.max_recv_slots bounds its static sizes; else they suffice for all.
    announces_faults: a bad call is told to all ranks, or waits for check() on all of them; else
        only with BufferSpec.compares_calls, and otherwise its own rank alone knows.
    fills_holes: entries of -1 travel, to an expert that the row does not use, with weight 0 (see
        ops/masked_entries.py), and are computed and counted.
    fills_empty: a rank without tokens sends one, of ones, to K experts from its own first on, with
        weight 0, which is computed and counted; its y is empty all the same.
    int8_profiles: arithmetics in which its INT8 rows may be made: any, unless a package makes them.
    device_types: of groups that it serves, None for all.
    needs_process_group: it serves groups of torch.distributed alone.
    """

    layout: Layout
    trainable: bool
    graph_safe: bool
    ordered: bool
    wire_dtypes: frozenset[WireDtype]
    weights_applied_by: frozenset[WeightsAppliedBy]
    max_tokens_per_rank: int | None = None
    max_top_k: int | None = None
    hidden_multiple: int = 1
    batches_in_flight: int | None = None
    batches_on_request: bool = False
    late_receive: bool = False
    reuses_route: bool = True
    is_static: bool = False
    serves_replicated: bool = False
    host_reads: int = 1
    combine_codecs: frozenset[str] = frozenset()
    combines_once: bool = False
    owns_rows: bool = True
    has_slot_budget: bool = True
    announces_faults: bool = True
    fills_holes: bool = False
    fills_empty: bool = False
    int8_profiles: frozenset[Int8Profile] = frozenset(Int8Profile)
    device_types: frozenset[str] | None = None
    needs_process_group: bool = False


class RowQuantizer(Protocol):
    """The signature of quantize() without its choices."""

    def __call__(
        self, hidden_states: Tensor, wire_format: WireFormat, /, *, out: WireTensor | None = None
    ) -> WireTensor: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchCall:
    """One rank's part of a dispatch.

    hidden_states: [T, H], unquantised.   topk_ids: [T, K], int64.   topk_weights: [T, K], float32;
        beside float64 rows this and all that is float32 below is float64.
    expert_names: of the tensors of the experts whose bits `flags` has, in their order.
    error: why this rank takes part with T = 0, if it does.
    quantize: brings hidden states to a format, into the memory of a message where a buffer can.
    int8_profile: its arithmetic of INT8 rows, for buffers that make them while they send.
    dispatcher: number of the dispatcher that calls, see CallOrder.add_dispatcher(); 0 for none.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    flags: BatchFlags
    expert_names: tuple[str, ...] = ()
    error: EPError | None = None
    quantize: RowQuantizer = quantize
    int8_profile: Int8Profile = Int8Profile.RINT127
    dispatcher: int = 0

    def wire_tensor(self, wire_format: WireFormat) -> WireTensor:
        """The hidden states as they travel. Lifetime: may share memory with hidden_states."""
        return self.quantize(self.hidden_states, wire_format)

    def write(self, out: WireTensor) -> None:
        """The hidden states as they travel, into `out`, whose rows may have any stride."""
        self.quantize(self.hidden_states, out.format, out=out)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """What a buffer received.

    rows: [R, H], or [L, R / L, H] in the layout MASKED; rows without a slot are undefined.
    index: in MASKED, slot s is row s of the flattened rows, and each expert has room for R / L.
    slot_weights: [C], float32; None where weights do not travel.
    any_flags: the flags of all ranks, or-ed.
    """

    rows: WireTensor
    index: SlotIndex
    slot_weights: Tensor | None
    route: Route
    any_flags: BatchFlags


@dataclass(frozen=True, kw_only=True, eq=False)
class Combined:
    """y: [T, H].   scalars: [T, K], float32, where row scalars were given."""

    y: Tensor
    scalars: Tensor | None


class Backend(ABC):
    """What a plan asks before it chooses: of a Buffer, or of a fused operator.

    name: of the registry; a backend has a class for each mode, and for exact and static sizes.
    modes: those that this class serves.
    int8_profile: arithmetic of INT8 where the configuration names none.
    needs_one_host: it serves ranks that can share memory, and no others.
    needs_host_waits: its host waits for the others, as the verbs of its transport must do too.
    needs_nvlink: GPUs of its ranks write one another's memory, with atomics.
    """

    needs_one_host: ClassVar[bool] = False
    needs_host_waits: ClassVar[bool] = False
    needs_nvlink: ClassVar[bool] = False

    name: ClassVar[str]
    modes: ClassVar[frozenset[Mode]]
    int8_profile: ClassVar[Int8Profile] = Int8Profile.RINT127

    @classmethod
    @abstractmethod
    def probe(cls, environment: Mapping[str, str]) -> Availability:
        """Whether this backend can run on this rank. Local; allocates nothing."""

    @classmethod
    @abstractmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        """What the backend can do in `mode`. Local; allocates nothing."""

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        """Why it cannot serve this layer, beyond what caps() says. Local; allocates nothing."""
        return ()

    @classmethod
    @abstractmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        """Memory of the forward pass of one call, in order of use. Local; allocates nothing.

        Regions live for different times, so their sum is an upper bound. The runner's packed slots
        and results are among them, y is not.
        """

    @classmethod
    @abstractmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        """Bytes that one rank sends to others in one call: what traffic() will count.

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
        """Bytes sent to other ranks so far."""

    @abstractmethod
    def close(self) -> None:
        """Free what prepare() allocated. Local, idempotent."""

    def abandon(self) -> None:
        """Close after an error, when other ranks may not come: what waits for them is not freed."""
        self.close()


class Buffer(Backend):
    """Mechanism of one backend. Calls are collective and come in one order on all ranks.

    counts_calls: CallOrder counts a call when its ranks begin to compare it, and not before: what
        fails on one rank until then may still be told to all.
    """

    counts_calls: bool = False

    @abstractmethod
    def dispatch(self, call: DispatchCall) -> Dispatched:
        """Send one copy of each token to every rank that owns one of its experts.

        Collective: yes; T may differ and be 0.   Host sync: caps.host_reads times.
        Lifetime: caps.owns_rows says.
        Raises:
            ShapeError, CapacityError, HandleError: some rank announced a fault; on every rank.
        """

    def dispatch_async(self, call: DispatchCall) -> Pending[Dispatched]:
        """Begin a dispatch; where caps.late_receive, rows are received in wait()."""
        return Pending(lambda: self.dispatch(call))

    def combine_async(
        self, rows: Tensor, route: Route, *, rows_per: RowsPer, slot_weights: Tensor | None = None
    ) -> Pending[Combined]:
        """Begin a combine; where caps.late_receive, sums are received in wait()."""
        return Pending(
            lambda: self.combine(rows, route, rows_per=rows_per, slot_weights=slot_weights)
        )

    @abstractmethod
    def redispatch(self, hidden_states: Tensor, route: Route) -> Tensor:
        """Send [T, H] along an old route and return [R, H]: the dual of combine.

        Collective: yes.   Host sync: none.
        Lifetime: the caller owns the rows, unless caps.owns_rows is False and the dispatch was made
            without gradients: then as those of a dispatch.
        """

    @abstractmethod
    def combine(
        self,
        rows: Tensor,
        route: Route,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        """Sum expert results per (token, rank), send the sums home and add them up.

        Args:
            rows: [C, H] (rows_per SLOT) or [R, H] (rows_per ROW); MASKED rows flattened.
            slot_weights: [C], float32, multiplied into slot rows, or None.
            row_scalars: [R, K], float32, sent beside the rows and brought to (token, k).

        Sums are float32 in ascending (k, rank) order, cast once at each end.
        Collective: yes.   Deterministic: yes where caps.ordered.
        Host sync: none, unless spec.compares_calls.
        Raises:
            HandleError, ShapeError: some rank refuses its call (refuse_combine); on every rank,
                before rows are sent. Where is_static, y is NaN instead and check() tells. Never
                with row_scalars, nor where the host does not wait in verbs and spec.compares_calls
                is not set: then a rank that refuses is missing.
        """

    @abstractmethod
    def refuse_combine(self, error: EPError) -> None:
        """Take part in the combine() of the other ranks without rows, so that they hear of `error`.

        Collective: yes, in place of combine().   Host sync: as combine().
        Raises:
            error: where the others raise too.
        """

    def refuse_combine_of(self, route: Route, error: EPError) -> None:
        """As refuse_combine(), where it is known which batch the other ranks combine.

        Buffers whose batches have memory of their own need it, if several are in flight.
        """
        self.refuse_combine(error)
