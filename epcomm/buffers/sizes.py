"""Tell how large a call is: memory by region, and a rank's part of it; numbers alone, no tensors.

Buffers answer both questions before anything is allocated (Buffer.region_bytes, Buffer.wire_bytes),
so that a plan needs no group and no device. Worked example, rows of 144 B, W = 4, K = 2, M = 16:

    received rows: a token adds at most 2 rows somewhere, 288 B; all 64 tokens of all ranks may
    come to one rank, 9,216 B
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    by_link: the same by link, where ranks are known to be on several hosts; else None.
    """

    rank: int
    tokens_of_rank: Sequence[int]
    rows_sent: int
    rows_received: int
    slots_sent: int = 0
    slots_received: int = 0
    by_link: CallByLink | None = None

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
        return cls(
            rank=0,
            tokens_of_rank=(num_tokens,) * world_size,
            rows_sent=num_rows,
            rows_received=num_rows,
            slots_sent=num_tokens * top_k,
            slots_received=num_tokens * top_k,
            by_link=None if hosts is None else CallByLink.most(num_tokens, top_k, hosts),
        )


@dataclass(frozen=True, kw_only=True)
class CallByLink:
    """One rank's part of a call by link, where ranks are on several hosts.

    rows_sent_between, rows_received_between: of the rows of CallShape, one a (token, rank), those
        to and from ranks of other hosts.
    outer: the part of this rank in an exchange of the ranks with its place in their hosts, in which
        each stands for its host and all experts there: a row a (token, host). All of it goes
        between hosts. rank: the number of this host.   tokens_of_rank: T of those ranks.
    inner: its part in an exchange of the ranks of its host, whose tokens are the rows that the
        outer exchange brought, with the tokens of each rank that need its own host: a row a
        (row, rank). None of it leaves the host. rank: the place of this rank.
        outer and inner are None where hosts have different numbers of ranks.
    """

    rows_sent_between: int
    rows_received_between: int
    outer: CallShape | None = None
    inner: CallShape | None = None

    @classmethod
    def most(cls, num_tokens: int, top_k: int, hosts: HostLayout) -> CallByLink:
        """Return the parts of a call of T tokens on each rank that need as much as they can.

        Each token needs min(K, ranks of other hosts) of these flat, min(K, hosts - 1) other hosts
        in the outer exchange, and in the inner ones of all hosts together min(K, W - hosts) ranks
        beside those that the outer exchange brings it to.
        """
        num_rows = num_tokens * min(top_k, len(hosts.ranks_elsewhere(0)))
        flat = cls(rows_sent_between=num_rows, rows_received_between=num_rows)
        if not hosts.is_even:
            return flat
        num_hosts = hosts.num_hosts
        num_forwarded = num_tokens * min(top_k, hosts.world_size - num_hosts)
        inner = CallShape(
            rank=0,
            tokens_of_rank=(num_tokens * min(top_k, num_hosts),) * (hosts.world_size // num_hosts),
            rows_sent=num_forwarded,
            rows_received=num_forwarded,
            slots_sent=num_tokens * top_k,
            slots_received=num_tokens * top_k,
        )
        return replace(flat, outer=CallShape.most(num_tokens, top_k, num_hosts), inner=inner)


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
