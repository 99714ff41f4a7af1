"""The frozen records passed between routing, dispatch, experts and combine.

Letters: T tokens of this rank, K experts per token, H hidden size, R received rows, C allocated
slots, L experts of this rank. A slot is one (token, expert) pair on the rank that owns the expert.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from epcomm.errors import HandleError
from epcomm.types import Layout, RowsPer, WeightsAppliedBy, WireTensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
# A call in steps: it yields nothing, and returns its result.
Steps: TypeAlias = Generator[None, None, T]


@dataclass(frozen=True, kw_only=True, eq=False)
class TopKOutput:
    """The routing of one batch.

    topk_ids: [T, K], int64, physical expert ids; -1 means no expert. Ids should be distinct within
        a row. If a row names an expert twice, the layout ROWS makes a slot for each entry and adds
        both; MASKED, ascend and deep_ep_v2 raise ShapeError on every rank. If the slots exceed a
        static size, every rank raises CapacityError.
    topk_weights: [T, K], float32, or float64 with float64 rows; another floating dtype is cast. The
        weight of a -1 entry is ignored.
    topk_groups: [T, K], int64, the sum group of the logical expert of each entry, any value for -1;
        needed only with EPConfig.sum_groups where experts have a placement. A layer sets it.
    is_physical: the ids are physical ids from the layer's ReplicaTable; if False, a layer with a
        placement treats them as logical ids. Read only by such layers.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    is_physical: bool = False
    topk_groups: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaTable:
    """The replicas that tokens of this rank use, on the device.

    Token t of call c uses replica (first + t + c) modulo the number of replicas of its expert:
    round robin, and the same in every run. Calls without tokens do not count.

    replicas: [E, R], int32, contiguous; physical ids of each logical expert, padded with -1.
    num_replicas: [E], int32, number of ids in each row; an expert without replicas becomes -1.
    calls: [], int64, initially 0; each call adds 2**32, and c is the number of calls modulo 2**30.
        The lower bits are for kernels, whose programs add parts. None: c is 0, so that recomputed
        calls, or all ranks, choose the same replicas.
    first: an offset that differs between ranks, such as the rank, to spread the load.
    """

    replicas: Tensor
    num_replicas: Tensor
    calls: Tensor | None = None
    first: int = 0

    def choose(self, topk_ids: Tensor) -> Tensor:
        """Return the physical ids, [T, K], int64, of logical ids, and count the call.

        -1 stays -1. An invalid logical id becomes an invalid physical id, for which dispatch raises
        on all ranks.

        Local.   Host sync: none.   Graph capture: yes.   Deterministic: yes.
        """
        num_tokens, num_experts = topk_ids.shape[0], self.replicas.shape[0]
        turn = torch.arange(num_tokens, device=topk_ids.device).unsqueeze(1) + self.first
        if self.calls is not None and num_tokens:
            turn = turn + ((self.calls >> 32) & (2**30 - 1))
            self.calls.add_(2**32)
        known = topk_ids.clamp(0, num_experts - 1)
        found = self.num_replicas[known]
        physical = self.replicas[known, turn % found.clamp(min=1)].long()
        # There are at most replicas.numel() physical experts.
        unknown = torch.where(topk_ids < 0, topk_ids, topk_ids + self.replicas.numel())
        return torch.where(topk_ids == known, physical.masked_fill(found == 0, -1), unknown)


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotIndex:
    """The expert-major index over received rows; the slots of one expert are contiguous.

    row_of_slot: [C], int32, the row that slot s reads, -1 for padding; None: slot s is row s.
    slots_of_row: [R, K], int32, the inverse in k order, -1 for none; None if row_of_slot is None.
    num_tokens_per_expert: [L], int32, on the device.
    first_slot: [L+1], int32, on the device; multiples of expert_alignment.
    host_num_tokens_per_expert: the same counts on the host; None if they would need a host sync.
    is_dense: all C slots are in use: no padding, no unused tail.
    """

    row_of_slot: Tensor | None = None
    slots_of_row: Tensor | None = None
    num_tokens_per_expert: Tensor
    first_slot: Tensor
    host_num_tokens_per_expert: tuple[int, ...] | None = None
    expert_alignment: int = 1
    is_dense: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangePlan:
    """The plan of one dispatch: indices, splits, offsets. Each buffer has a subclass.

    An exchange plan owns its memory and may be used any number of times: for backward,
    recomputation and cached dispatches.

    num_tokens: tokens of this rank.   num_rows: rows that it received.
    """

    num_tokens: int
    num_rows: int
    index: SlotIndex

    def rows_from_ranks(self) -> Tensor:
        """Return the number of rows from each rank, [W], integers; only in exact-size buffers."""
        raise NotImplementedError(f"{type(self).__name__} does not count the rows of each rank")


class Handle:
    """The single-use claim of one dispatch on its combine."""

    __slots__ = (
        *("_owner", "_spent", "call", "dtype"),
        *("exchange_plan", "needs_backward", "num_tokens", "where"),
    )

    def __init__(
        self,
        *,
        owner: object,
        num_tokens: int,
        dtype: torch.dtype | None = None,
        where: str = "unknown rank",
    ) -> None:
        """Make the handle of a dispatch of `owner` whose rows have not been received.

        num_tokens: T as the caller passed it; the exchange plan of a failed batch has 0.
        dtype: the dtype of the caller's hidden states and of y; None: the dtype on the wire.
        where: this rank for messages, such as `rank 3 of 8`.
        """
        self._owner, self.where = owner, where
        self._spent: str | None = None
        self.exchange_plan: ExchangePlan
        self.num_tokens, self.dtype = num_tokens, dtype
        self.call = 0
        self.needs_backward = False

    def open(self, exchange_plan: ExchangePlan, *, call: int, needs_backward: bool) -> None:
        """Set the exchange plan of the batch after its rows have been received.

        call: the number of the dispatch, for messages.
        needs_backward: all ranks run the backward of this batch, because some rank needs it.
        """
        self.exchange_plan, self.call = exchange_plan, call
        self.needs_backward = needs_backward

    def find_error(self, owner: object) -> HandleError | None:
        """Return why `owner` cannot combine this batch, or None."""
        if self._owner is not owner:
            return HandleError(
                f"combine: the batch of dispatch call {self.call} belongs to another dispatcher; "
                "combine it with the dispatcher that dispatched it"
            )
        if self._spent is not None:
            return HandleError(
                f"combine: the batch of dispatch call {self.call} {self._spent}; dispatch again"
            )
        return None

    def spend(self, reason: str) -> None:
        """Make every later combine fail, for the first reason given."""
        if self._spent is None:
            self._spent = reason

    def reopen(self) -> None:
        """Permit another combine after one that was begun and refused: it has sent no rows."""
        self._spent = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsCombineInput:
    """The expert results for the ROWS layout.

    hidden_states: [C, H], one row per slot, or [R, H], one row per received row; see rows_per.
    slot_weights: [C], dtype of the router weights; None if combine does not apply them.
    """

    hidden_states: Tensor
    rows_per: RowsPer
    slot_weights: Tensor | None
    handle: Handle


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsDispatchOutput:
    """The received tokens in the ROWS layout: one row per (token, rank), and an index over them.

    hidden_states: [R, H]; the row stride may exceed H. Rows without a slot are undefined.
    index: the expert-major index over the rows.
    slot_weights: [C], float32, or float64 with float64 rows; differentiable on trainable buffers;
        None if dispatch sent no weights.
    weights_applied_by: the part that multiplies by slot_weights.
    """

    hidden_states: WireTensor
    index: SlotIndex
    slot_weights: Tensor | None
    weights_applied_by: WeightsAppliedBy
    handle: Handle

    layout = Layout.ROWS

    @property
    def num_tokens_per_expert(self) -> Tensor:
        """The number of slots of each local expert: [L], int32, on the device."""
        return self.index.num_tokens_per_expert

    @property
    def num_slots(self) -> int:
        """The number of allocated slots, C."""
        if self.index.row_of_slot is None:
            return self.hidden_states.data.shape[0]
        return self.index.row_of_slot.shape[0]

    @property
    def exchange_plan(self) -> ExchangePlan:
        return self.handle.exchange_plan

    def combine_input(
        self, hidden_states: Tensor, *, rows_per: RowsPer = RowsPer.SLOT
    ) -> RowsCombineInput:
        """Wrap expert results for `Dispatcher.combine`, which checks them.

        Local.

        Args:
            hidden_states: [C, H] or, with rows_per=ROW, [R, H].
            rows_per: the unit of one row. ROW rows are already weighted and reduced, so ROW is
                invalid if combine applies the weights.
        """
        by_combine = self.weights_applied_by is WeightsAppliedBy.COMBINE
        return RowsCombineInput(
            hidden_states=hidden_states,
            rows_per=rows_per,
            slot_weights=self.slot_weights if by_combine else None,
            handle=self.handle,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedCombineInput:
    """The expert results for the MASKED layout.

    hidden_states: [L, C, H]; the first num_tokens_per_expert[l] rows of expert l are read.
    """

    hidden_states: Tensor
    slot_weights: Tensor | None
    handle: Handle


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedDispatchOutput:
    """The received tokens in the MASKED layout.

    hidden_states: [L, C, H]; the first num_tokens_per_expert[l] rows of expert l are defined.
    num_tokens_per_expert: [L], int32, on the device.
    slot_weights: [L, C], float32, or None if dispatch sent no weights.
    mean_tokens_per_expert: a hint for tile sizes: the tokens of an expert, rounded up, if all ranks
        dispatch as many tokens as this one and experts are chosen uniformly; None: unknown.
    """

    hidden_states: WireTensor
    num_tokens_per_expert: Tensor
    slot_weights: Tensor | None
    weights_applied_by: WeightsAppliedBy
    handle: Handle
    mean_tokens_per_expert: int | None = None

    layout = Layout.MASKED

    @property
    def exchange_plan(self) -> ExchangePlan:
        return self.handle.exchange_plan

    def combine_input(self, hidden_states: Tensor) -> MaskedCombineInput:
        """Wrap expert results [L, C, H] for `Dispatcher.combine`, which checks them. Local."""
        by_combine = self.weights_applied_by is WeightsAppliedBy.COMBINE
        return MaskedCombineInput(
            hidden_states=hidden_states,
            slot_weights=self.slot_weights if by_combine else None,
            handle=self.handle,
        )


DispatchOutput = RowsDispatchOutput | MaskedDispatchOutput
CombineInput = RowsCombineInput | MaskedCombineInput


class Pending(Generic[T_co]):
    """The unfinished half of an asynchronous dispatch or combine.

    All ranks call wait() in the same order, like the calls.
    """

    def __init__(self, finish: Callable[[], T_co], *, record: T_co | None = None) -> None:
        """Store `finish`, which completes the operation and returns its record.

        record: the same record, if its tensors exist before they are filled; else None.
        """
        self._finish: Callable[[], T_co] | None = finish
        self._record = record

    @property
    def record(self) -> T_co | None:
        """Return the record whose tensors wait() fills, or None if wait() allocates them.

        The tensors are undefined before wait(). Only low latency over NVLink has a record; there a
        dispatch returns the same memory whenever it uses the same receive buffer.
        """
        return self._record

    def wait(self) -> T_co:
        """Complete the operation and return its record.

        Raises:
            HandleError: the record was already taken.
        """
        if self._finish is None:
            raise HandleError("wait: this operation was already completed; keep its first result")
        finish, self._finish = self._finish, None
        return finish()


def at_once(call: Callable[[], T]) -> Steps[T]:
    """Make a call in one step."""
    return call()
    yield  # a generator, although it never pauses


def to_the_end(steps: Steps[T]) -> T:
    """Run the steps of a call without a pause, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def empty_topk(top_k: int, device: torch.device) -> TopKOutput:
    """Return the top-k entries of a rank without tokens: topk_ids [0, K], topk_weights [0, K]."""
    return TopKOutput(
        topk_ids=torch.empty(0, top_k, dtype=torch.int64, device=device),
        topk_weights=torch.empty(0, top_k, dtype=torch.float32, device=device),
        topk_groups=torch.empty(0, top_k, dtype=torch.int64, device=device),
    )
