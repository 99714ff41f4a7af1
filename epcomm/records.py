"""The frozen records that pass between routing, dispatch, experts and combine.

Letters: T tokens of this rank, K experts a token, H hidden, R received rows, C slots allocated,
L experts of this rank. A slot is one (token, expert) pair on the rank that owns the expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from epcomm.errors import HandleError
from epcomm.types import Layout, RowsPer, WeightsAppliedBy, WireTensor

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class TopKOutput:
    """The routing of one batch.

    topk_ids: [T, K], int64, physical expert ids; -1 means no expert. Ids are distinct within a row,
        as routers choose them. Of an expert named twice each entry is a slot and both are added in
        the layout ROWS; MASKED, ascend and deep_ep_v2 raise a ShapeError on every rank. Where the
        slots exceed a static size, every rank raises a CapacityError.
    topk_weights: [T, K], float32; beside float64 rows float64; another floating dtype is cast. The
        weight of a -1 entry is ignored.
    is_physical: a router chose the ids from the layer's ReplicaTable. To a layer with a placement
        others are logical; nothing else reads it.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    is_physical: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaTable:
    """The physical experts among which tokens of this rank choose, on the device.

    Of the replicas of an expert, token t of call c takes number (first + t + c) modulo how many
    there are: round robin, and the same in every run. A call without tokens is none.

    replicas: [E, R], int32, contiguous; physical ids of each logical expert, padded with -1.
    num_replicas: [E], int32, how many of a row are ids; an expert without any becomes -1.
    calls: [], int64, 0 at first; each call adds 2**32 to it, and c is their number modulo 2**30.
        The lower bits are for kernels, whose programs add parts. None: c is 0, as where a call is
        computed again, or ranks have to choose alike.
    first: what lets ranks begin with different replicas, such as the rank.
    """

    replicas: Tensor
    num_replicas: Tensor
    calls: Tensor | None = None
    first: int = 0

    def choose(self, topk_ids: Tensor) -> Tensor:
        """Return physical ids, [T, K], int64, of logical ones, and count the call.

        -1 stays -1; what is no logical id becomes no physical id, which the dispatcher refuses, on
        all ranks.

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
        # There are at most as many physical experts as the table has places.
        unknown = torch.where(topk_ids < 0, topk_ids, topk_ids + self.replicas.numel())
        return torch.where(topk_ids == known, physical.masked_fill(found == 0, -1), unknown)


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotIndex:
    """The expert-major index over received rows; slots of one expert are neighbours.

    row_of_slot: [C], int32, the row that slot s reads, -1 for padding; None: slot s is row s.
    slots_of_row: [R, K], int32, the inverse in k order, -1 for none; None as row_of_slot.
    num_tokens_per_expert: [L], int32, on the device.
    first_slot: [L+1], int32, on the device; starts are multiples of expert_alignment.
    host_num_tokens_per_expert: the same counts on the host where they came for free, else None.
    is_dense: every slot in [0, C) is in use: no padding, no unused tail.
    """

    row_of_slot: Tensor | None
    slots_of_row: Tensor | None
    num_tokens_per_expert: Tensor
    first_slot: Tensor
    host_num_tokens_per_expert: tuple[int, ...] | None
    expert_alignment: int = 1
    is_dense: bool = False


class ExchangePlan:
    """The immutable plan of one dispatch: indices, splits, offsets; every buffer has its own kind.

    An exchange plan owns its memory and may be used any number of times: for backward,
    recomputation and cached dispatches.
    """

    index: SlotIndex
    num_tokens: int
    num_rows: int

    def rows_from_ranks(self) -> Tensor:
        """Return how many rows came from each rank, [W], integers; in buffers of exact sizes."""
        raise NotImplementedError(f"{type(self).__name__} does not have the rows of each rank")


class Handle:
    """The single-use claim of one dispatch on its combine."""

    __slots__ = (
        "_owner",
        "_spent",
        "call",
        "dtype",
        "exchange_plan",
        "needs_backward",
        "num_tokens",
    )

    def __init__(
        self,
        *,
        owner: object,
        call: int,
        num_tokens: int,
        exchange_plan: ExchangePlan | None = None,
        needs_backward: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Begin with dispatch number `call` of `owner`.

        exchange_plan, needs_backward: see open(), for a batch whose rows have come.
        num_tokens: T as the caller gave it; the exchange plan of a refused batch has none.
        dtype: of the hidden states as the caller gave them, and of y; None: as they travel.
        """
        self._owner = owner
        self._spent: str | None = None
        self.exchange_plan: ExchangePlan
        self.call = call
        self.num_tokens = num_tokens
        self.dtype = dtype
        if exchange_plan is not None:
            self.open(exchange_plan, needs_backward)

    def open(self, exchange_plan: ExchangePlan, needs_backward: bool) -> None:
        """Take the exchange plan of the batch when its rows have come.

        needs_backward: some rank of the group runs the backward of this batch, so all do.
        """
        self.exchange_plan, self.needs_backward = exchange_plan, needs_backward

    def check(self, owner: object) -> None:
        """Raise HandleError unless `owner` made this handle and it is still unspent."""
        if self._owner is not owner:
            raise HandleError(
                f"combine: the batch of dispatch call {self.call} belongs to another dispatcher; "
                "combine it with the dispatcher that dispatched it"
            )
        if self._spent is not None:
            raise HandleError(
                f"combine: the batch of dispatch call {self.call} {self._spent}; dispatch again"
            )

    def spend(self, reason: str) -> None:
        """Make every later `check` raise, with the first reason given."""
        if self._spent is None:
            self._spent = reason


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsCombineInput:
    """The expert results for the ROWS layout.

    hidden_states: [C, H], one row a slot, or [R, H], one row a received row, as `rows_per` says.
    slot_weights: [C], dtype of the router weights, when combine must apply them, else None.
    """

    hidden_states: Tensor
    rows_per: RowsPer
    slot_weights: Tensor | None
    handle: Handle


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsDispatchOutput:
    """The received tokens in the ROWS layout: one row per (token, rank), an index over the rows.

    hidden_states: [R, H]; the row stride may exceed H. Rows without a slot are undefined.
    index: the expert-major slots over the rows.
    slot_weights: [C], float32 (float64 beside such rows), differentiable on trainable paths; None
        where none travelled.
    weights_applied_by: who multiplies by slot_weights.
    combine_rows: [C, H], memory that combine can send from without a copy, or None.
    """

    hidden_states: WireTensor
    index: SlotIndex
    slot_weights: Tensor | None
    weights_applied_by: WeightsAppliedBy
    handle: Handle
    combine_rows: Tensor | None = None

    layout = Layout.ROWS

    @property
    def num_tokens_per_expert(self) -> Tensor:
        """The slots of each local expert: [L], int32, on the device."""
        return self.index.num_tokens_per_expert

    @property
    def num_slots(self) -> int:
        """The number of slots allocated, C."""
        if self.index.row_of_slot is None:
            return self.hidden_states.data.shape[0]
        return self.index.row_of_slot.shape[0]

    @property
    def exchange_plan(self) -> ExchangePlan:
        """Return the exchange plan of this dispatch."""
        return self.handle.exchange_plan

    def combine_input(
        self, hidden_states: Tensor, *, rows_per: RowsPer = RowsPer.SLOT
    ) -> RowsCombineInput:
        """Wrap expert results for `Dispatcher.combine`, which checks them.

        Local. What is wrong with the rows is for all ranks to hear, and combine() tells them.

        Args:
            hidden_states: [C, H] or, with rows_per=ROW, [R, H].
            rows_per: what one row stands for; ROW rows are already weighted and reduced, which
                they cannot be where combine applies the weights.
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
    """The expert results for the MASKED layout: [L, C, H], the first n of each expert."""

    hidden_states: Tensor
    slot_weights: Tensor | None
    handle: Handle


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedDispatchOutput:
    """The received tokens in the MASKED layout.

    hidden_states: [L, C, H]; of expert l the first num_tokens_per_expert[l] rows are defined.
    num_tokens_per_expert: [L], int32, on the device.
    slot_weights: [L, C], float32, or None where weights did not travel.
    mean_tokens_per_expert: rows of an expert if all ranks dispatch as many tokens as this one and
        experts are chosen equally often, rounded up; it may choose tiles. None: not known.
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
        """Return the exchange plan of this dispatch."""
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

    Waits come in one order on all ranks, like the calls.
    """

    def __init__(self, finish: Callable[[], T_co], *, record: T_co | None = None) -> None:
        """Hold `finish`, which completes the operation and returns its record.

        record: the same, where its tensors exist before they are filled.
        """
        self._finish: Callable[[], T_co] | None = finish
        self._record = record

    @property
    def record(self) -> T_co | None:
        """Return the record whose tensors wait() fills, or None where it makes them.

        Until then what they hold is undefined. Low latency over NVLink has them; there a dispatch
        hands out the same memory whenever the turn of its receive buffer comes.
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


def empty_topk(top_k: int, device: torch.device) -> TopKOutput:
    """Return the routing of a rank without tokens: topk_ids [0, K], topk_weights [0, K]."""
    return TopKOutput(
        topk_ids=torch.empty(0, top_k, dtype=torch.int64, device=device),
        topk_weights=torch.empty(0, top_k, dtype=torch.float32, device=device),
    )
