"""The size of a call: memory by region, and a rank's part of it; numbers, no tensors.

Buffers answer both questions before anything is allocated (Buffer.region_bytes, Buffer.wire_bytes),
so that a plan needs no group and no device. Worked example, rows of 144 B, W = 4, K = 2, M = 16:

    received rows: a token adds at most 2 rows somewhere, 288 B; all 64 tokens of all ranks may
    come to one rank, 9,216 B
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epcomm.buffers.row_layout import RowLayout
from epcomm.ops.static_slots import max_slots

if TYPE_CHECKING:
    from epcomm.spec import BufferSpec, HostLayout

# Bytes of a slot beside its router weight: row_of_slot (int32), its place in slots_by_row (int64).
SLOT_INDEX_BYTES, SLOT_MEMBER_BYTES = 4, 8
# Bytes of a received row: an entry of slots_of_row for each k (int32), and its offset in
# slots_by_row (int64).
ROW_SLOT_BYTES, ROW_OFFSET_BYTES = 4, 8


@dataclass(frozen=True, kw_only=True)
class Region:
    """The memory of one kind that a rank holds for one call.

    name: what lies there.
    bytes_per_token: most bytes that one token adds, on all ranks together; None where the size
        does not depend on the tokens.
    max_bytes: most bytes on one rank, and exactly these where bytes_per_token is None; None where
        nothing limits the tokens.
    """

    name: str
    bytes_per_token: int | None = None
    max_bytes: int | None = None

    def __str__(self) -> str:
        if self.bytes_per_token is None:
            return f"{self.max_bytes} B"
        limit = "" if self.max_bytes is None else f", at most {self.max_bytes} B"
        return f"{self.bytes_per_token} B a token{limit}"


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """One rank's part of a call, as far as its bytes on the wire depend on it.

    call_shape() of epcomm/buffers/call_shape.py counts it from the routing.

    tokens_of_rank: [W], T of each rank.
    rows_sent: rows from this rank to other ranks, where a token goes only to those that need it.
    rows_received: rows from other ranks to this one, likewise.
    slots_sent, slots_received: (token, expert) pairs, likewise.
    rows_sent_between, rows_received_between: of the rows, those to and from ranks of other hosts,
        where hosts are known.
    """

    rank: int
    tokens_of_rank: Sequence[int]
    rows_sent: int
    rows_received: int
    slots_sent: int = 0
    slots_received: int = 0
    rows_sent_between: int = 0
    rows_received_between: int = 0

    @property
    def world_size(self) -> int:
        """The number of ranks, W."""
        return len(self.tokens_of_rank)

    @classmethod
    def most(
        cls, num_tokens: int, top_k: int, world_size: int, hosts: HostLayout | None = None
    ) -> CallShape:
        """Return a call of T tokens on each rank, each sent to min(K, W - 1) other ranks.

        hosts: where the ranks are, if on several hosts: then each token is sent to as many ranks
            of other hosts as it can need.
        """
        num_rows = num_tokens * min(top_k, world_size - 1)
        num_elsewhere = 0 if hosts is None else len(hosts.ranks_elsewhere(0))
        num_between = num_tokens * min(top_k, num_elsewhere)
        return cls(
            rank=0,
            tokens_of_rank=(num_tokens,) * world_size,
            rows_sent=num_rows,
            rows_received=num_rows,
            slots_sent=num_tokens * top_k,
            slots_received=num_tokens * top_k,
            rows_sent_between=num_between,
            rows_received_between=num_between,
        )


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """The bytes of one row in dispatch and in combine."""

    dispatch: int
    combine: int

    @classmethod
    def of(cls, spec: BufferSpec, *, backward: bool = False) -> RowBytes:
        """Return the bytes of rows in the forward pass, or in the backward pass.

        Forward, ids and weights travel with the elements, and sums travel alone. Backward,
        gradients travel alone, and with those of the weights in combine.
        """
        layout = RowLayout(
            hidden_size=spec.hidden_size,
            top_k=spec.top_k,
            format=spec.hidden_format if backward else spec.dispatch_format,
            has_ids=not backward,
        )
        if backward:
            bare = spec.hidden_format.data_bytes(spec.hidden_size)
            return cls(dispatch=bare, combine=layout.row_bytes)
        return cls(
            dispatch=layout.row_bytes, combine=spec.hidden_format.data_bytes(spec.hidden_size)
        )


def rows_region(name: str, row_bytes: int, *, per_token: int, max_rows: int | None) -> Region:
    """Return a region of rows: a token adds `per_token` rows, a rank holds at most `max_rows`."""
    return Region(
        name=name,
        bytes_per_token=per_token * row_bytes,
        max_bytes=None if max_rows is None else max_rows * row_bytes,
    )


def slot_weight_bytes(spec: BufferSpec) -> int:
    """Return the bytes of the router weight of a slot."""
    return spec.hidden_format.dtype.scalar_dtype.itemsize


def index_region(spec: BufferSpec, *, rows_per_token: int, max_rows: int | None) -> Region:
    """Return the region of the expert-major index over R received rows; see index_bytes()."""
    row_bytes = ROW_SLOT_BYTES * spec.top_k + ROW_OFFSET_BYTES
    slot_bytes = SLOT_INDEX_BYTES + slot_weight_bytes(spec) + SLOT_MEMBER_BYTES
    max_bytes = None
    if max_rows is not None:
        max_bytes = index_bytes(
            spec,
            num_rows=max_rows,
            num_slots=max_slots_of(spec, max_rows),
            num_members=max_rows * min(spec.top_k, spec.num_local_experts),
        )
    return Region(
        name="slot index",
        bytes_per_token=rows_per_token * row_bytes + spec.top_k * slot_bytes,
        max_bytes=max_bytes,
    )


def slot_regions(spec: BufferSpec, *, row_bytes: int, max_rows: int | None) -> tuple[Region, ...]:
    """Return the regions that the runner makes of R rows: packed slots and a result for each.

    Args:
        spec: of the buffer.
        row_bytes: from one received row to the next; packing copies the gap between rows too.
        max_rows: R, or None for no limit.
    """
    max_slots = None if max_rows is None else max_slots_of(spec, max_rows)
    result_bytes = spec.hidden_format.data_bytes(spec.hidden_size)
    return (
        rows_region("packed slots", row_bytes, per_token=spec.top_k, max_rows=max_slots),
        rows_region("expert results", result_bytes, per_token=spec.top_k, max_rows=max_slots),
    )


def most_slots_of(spec: BufferSpec, num_rows: int) -> int:
    """Return the slots that suffice for any routing of R rows, also if it repeats experts."""
    return max_slots(num_rows * spec.top_k, 1, spec.num_local_experts, spec.expert_alignment)


def max_slots_of(spec: BufferSpec, num_rows: int) -> int:
    """Return C, the slots that suffice for any routing of R rows."""
    return max_slots(num_rows, spec.top_k, spec.num_local_experts, spec.expert_alignment)


def index_bytes(spec: BufferSpec, *, num_rows: int, num_slots: int, num_members: int) -> int:
    """Return the bytes of SlotIndex, slot weights and each row's slots, as ops/slots.py makes them.

    Args:
        spec: of the buffer.
        num_rows: R.
        num_slots: C.
        num_members: slots in use, or as many as the host reserves for them.
    """
    rows = num_rows * (ROW_SLOT_BYTES * spec.top_k + ROW_OFFSET_BYTES)
    weight_bytes = slot_weight_bytes(spec)
    slots = num_slots * (SLOT_INDEX_BYTES + weight_bytes) + num_members * SLOT_MEMBER_BYTES
    # num_tokens_per_expert [L] and first_slot [L + 1], int32; an offset more than rows; a weight
    # more than slots, which takes the entries without a slot.
    experts = 4 * spec.num_local_experts + 4 * (spec.num_local_experts + 1)
    return rows + slots + experts + ROW_OFFSET_BYTES + weight_bytes
