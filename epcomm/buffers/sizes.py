"""The sizes of a call: memory by region, and one rank's counts of rows.

Buffer.region_bytes and Buffer.wire_bytes use them without allocation, so a plan needs no group and
no device. Worked example, rows of 144 B, W = 4, K = 2, M = 16:

    received rows: a token adds at most 2 rows in total, 288 B; one rank may receive all 64 tokens
    of all ranks, 9,216 B
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from epcomm.buffers.row_layout import RowLayout
from epcomm.spec import BufferSpec, HostLayout
from epcomm.types import WireFormat, align_up

# Bytes of a slot besides its router weight: row_of_slot (int32), its entry in slots_by_row (int64).
SLOT_INDEX_BYTES, SLOT_MEMBER_BYTES = 4, 8
# Bytes of a received row: an entry of slots_of_row for each k (int32), and its offset in
# slots_by_row (int64).
ROW_SLOT_BYTES, ROW_OFFSET_BYTES = 4, 8


@dataclass(frozen=True, kw_only=True)
class Region:
    """The memory that a rank needs for one purpose in one call.

    name: the purpose, such as `received rows`.
    bytes_per_token: most bytes that one token adds, on all ranks together; None if the size does
        not depend on the tokens.
    max_bytes: most bytes on one rank, or the exact size if bytes_per_token is None; None if the
        number of tokens has no limit.
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
    """The counts of one rank's part of a call that determine its bytes on the wire.

    tokens_of_rank: [W], T of each rank.
    rows_sent: rows from this rank to other ranks, one for each rank that needs the token.
    rows_received: rows from other ranks to this one.
    rows_returned: rows that combine returns to other ranks; None: rows_received.
    slots_sent, slots_received: the slots of these rows.
    rows_sent_between, rows_received_between: the rows to and from ranks of other hosts, if the
        hosts are known.   rows_returned_between: None: rows_received_between.
    """

    rank: int
    tokens_of_rank: Sequence[int]
    rows_sent: int
    rows_received: int
    slots_sent: int = 0
    slots_received: int = 0
    rows_sent_between: int = 0
    rows_received_between: int = 0
    rows_returned: int | None = None
    rows_returned_between: int | None = None

    @property
    def sums_sent(self) -> int:
        """The rows that this rank returns to other ranks."""
        return self.rows_received if self.rows_returned is None else self.rows_returned

    @property
    def sums_sent_between(self) -> int:
        """The rows that this rank returns to ranks of other hosts."""
        between = self.rows_returned_between
        return self.rows_received_between if between is None else between

    @property
    def world_size(self) -> int:
        """The number of ranks, W."""
        return len(self.tokens_of_rank)

    @classmethod
    def of(
        cls,
        topk_ids_of_rank: Sequence[Tensor],
        rank: int,
        *,
        num_local_experts: int,
        hosts: HostLayout | None = None,
        group_size: int | None = None,
    ) -> Self:
        """Return the part of `rank` in the call that dispatches and combines these tokens.

        Worked example: 2 hosts of 2 ranks (0 1 | 2 3) with one expert each. If rank 0 has one
        token, for experts 1, 2 and 3, rank 0 sends 3 rows, 2 of them between hosts.

        Args:
            topk_ids_of_rank: topk_ids of each of the W ranks, [T, K], int64, -1 for no expert.
            num_local_experts: L.
            hosts: the hosts of the ranks; None if there is one host or the hosts are unknown.
            group_size: the experts of a sum group, with BufferSpec.sum_groups; 1 if one row per
                slot returns.

        Local.   Host sync: yes.
        """
        # The rank of the expert of each entry, -1 for none.
        owners = [ids.cpu() // num_local_experts for ids in topk_ids_of_rank]
        ranks = [other for other in range(len(owners)) if other != rank]
        elsewhere = () if hosts is None else hosts.ranks_elsewhere(rank)
        # Entries of each token whose expert is on another rank, or of another rank on this one.
        sent = {other: (owners[rank] == other).sum(1) for other in ranks}
        received = {other: (owners[other] == rank).sum(1) for other in ranks}

        def num_rows(slots_of_token: Mapping[int, Tensor], others: Sequence[int]) -> int:
            return sum(int((slots_of_token[other] > 0).sum()) for other in others)

        def num_pairs(others: Sequence[int]) -> int | None:
            if group_size is None:
                return None
            return sum(
                len(set(row[owner == rank].tolist()))
                for other in others
                for row, owner in zip(
                    topk_ids_of_rank[other].cpu() // group_size, owners[other], strict=True
                )
            )

        return cls(
            rank=rank,
            tokens_of_rank=tuple(map(len, owners)),
            rows_returned=num_pairs(ranks),
            rows_returned_between=num_pairs(elsewhere),
            rows_sent=num_rows(sent, ranks),
            rows_received=num_rows(received, ranks),
            slots_sent=sum(int(slots.sum()) for slots in sent.values()),
            slots_received=sum(int(slots.sum()) for slots in received.values()),
            rows_sent_between=num_rows(sent, elsewhere),
            rows_received_between=num_rows(received, elsewhere),
        )

    @classmethod
    def most(
        cls,
        num_tokens: int,
        top_k: int,
        world_size: int,
        hosts: HostLayout | None = None,
        *,
        returned_columns: int = 1,
    ) -> Self:
        """Return a call of T tokens on each rank, each sent to min(K, W - 1) other ranks.

        hosts: the hosts of the ranks, or None; each token is sent to as many ranks of other hosts
            as possible.
        returned_columns: see BufferSpec.returned_columns().
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
            rows_returned=num_tokens * min(top_k, (world_size - 1) * returned_columns),
            rows_returned_between=num_tokens * min(top_k, num_elsewhere * returned_columns),
        )


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """The bytes of one row in dispatch and in combine."""

    dispatch: int
    combine: int

    @classmethod
    def of(cls, spec: BufferSpec, world_size: int | None = None, *, backward: bool = False) -> Self:
        """Return the bytes of rows in the forward pass, or in the backward pass.

        world_size: W, if a row in combine has all that returns for one (token, rank).

        Forward: dispatch sends elements, ids and weights; combine sends sums. Backward: dispatch
        sends gradients; combine sends gradients of rows and weights.
        """
        num_columns = 1 if world_size is None else spec.returned_columns(world_size)
        hidden_size, top_k, plain = spec.hidden_size, spec.top_k, spec.hidden_format
        returned_size = num_columns * hidden_size
        if not backward:
            layout = RowLayout(
                hidden_size=hidden_size, top_k=top_k, format=spec.dispatch_format, has_ids=True
            )
            sums = quantized_layout(spec, spec.combine_format)
            returned = num_columns * sums.row_bytes if sums else plain.data_bytes(returned_size)
            return cls(dispatch=layout.row_bytes, combine=returned)
        bare = quantized_layout(spec, spec.backward_format)
        gradients = quantized_layout(spec, spec.backward_format, top_k)
        if bare is not None and gradients is not None:
            return cls(dispatch=bare.row_bytes, combine=num_columns * gradients.row_bytes)
        layout = RowLayout(hidden_size=returned_size, top_k=top_k, format=plain, has_ids=False)
        return cls(dispatch=plain.data_bytes(hidden_size), combine=layout.row_bytes)


def quantized_layout(spec: BufferSpec, wire: WireFormat | None, top_k: int = 0) -> RowLayout | None:
    """Return the layout of quantised rows with top_k scalars, or None without a format."""
    if wire is None:
        return None
    return RowLayout(hidden_size=spec.hidden_size, top_k=top_k, format=wire, has_ids=False)


def sum_regions(
    spec: BufferSpec, per_token: int, *, sent: int | None, returned: int | None, columns: int = 1
) -> tuple[Region, ...]:
    """Return the regions of the rows that combine sends, and of those that return to this rank.

    Quantised sums exist unquantised before and after the exchange too.

    per_token: rows that a token adds.   columns: the sums of a row.
    sent, returned: the most rows of a rank, or None for no limit.
    """
    size, layout = columns * spec.hidden_size, quantized_layout(spec, spec.combine_format)
    row_bytes = spec.hidden_format.data_bytes(size)
    sizes = [("partial sums", row_bytes, sent), ("returned rows", row_bytes, returned)]
    if layout is not None:
        row_bytes = columns * layout.row_bytes
        sizes[1:] = [("quantised sums", row_bytes, sent), ("returned rows", row_bytes, returned)]
        sizes.append(("dequantised sums", torch.float32.itemsize * size, returned))
    return tuple(
        rows_region(name, row_bytes, per_token=per_token, max_rows=max_rows)
        for name, row_bytes, max_rows in sizes
    )


def rows_region(name: str, row_bytes: int, *, per_token: int, max_rows: int | None) -> Region:
    """Return a region of rows: a token adds `per_token` rows, a rank holds at most `max_rows`."""
    return Region(
        name=name,
        bytes_per_token=per_token * row_bytes,
        max_bytes=None if max_rows is None else max_rows * row_bytes,
    )


def index_region(spec: BufferSpec, *, rows_per_token: int, max_rows: int | None) -> Region:
    """Return the region of the expert-major index over R received rows; see index_bytes()."""
    row_bytes = ROW_SLOT_BYTES * spec.top_k + ROW_OFFSET_BYTES
    weight_bytes = spec.hidden_format.dtype.scalar_dtype.itemsize
    slot_bytes = SLOT_INDEX_BYTES + weight_bytes + SLOT_MEMBER_BYTES
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
    """Return the regions that the runner needs for R rows: packed slots and their results.

    row_bytes: stride of received rows; packing copies the gap between rows too.
    max_rows: R, or None for no limit.
    """
    max_slots = None if max_rows is None else max_slots_of(spec, max_rows)
    result_bytes = spec.hidden_format.data_bytes(spec.hidden_size)
    return (
        rows_region("packed slots", row_bytes, per_token=spec.top_k, max_rows=max_slots),
        rows_region("expert results", result_bytes, per_token=spec.top_k, max_rows=max_slots),
    )


def most_slots_of(spec: BufferSpec, num_rows: int) -> int:
    """Return the slots that suffice for any routing of R rows, even with repeated experts."""
    return _aligned_slots(spec, num_rows * spec.top_k)


def max_slots_of(spec: BufferSpec, num_rows: int) -> int:
    """Return C, the slots that suffice for any routing of R rows to distinct experts."""
    return _aligned_slots(spec, num_rows * min(spec.top_k, spec.num_local_experts))


def _aligned_slots(spec: BufferSpec, num_used: int) -> int:
    most_padding = spec.num_local_experts * (spec.expert_alignment - 1)
    return align_up(num_used + most_padding, spec.expert_alignment)


def index_bytes(spec: BufferSpec, *, num_rows: int, num_slots: int, num_members: int) -> int:
    """Return the bytes of SlotIndex, slot weights and slots_by_row, as ops/slots.py makes them.

    num_rows: R.   num_slots: C.
    num_members: entries of slots_by_row: the slots in use, or the number that is reserved.
    """
    rows = num_rows * (ROW_SLOT_BYTES * spec.top_k + ROW_OFFSET_BYTES)
    weight_bytes = spec.hidden_format.dtype.scalar_dtype.itemsize
    slots = num_slots * (SLOT_INDEX_BYTES + weight_bytes) + num_members * SLOT_MEMBER_BYTES
    # num_tokens_per_expert [L] and first_slot [L + 1], int32. There is one more offset than rows,
    # and one more weight than slots, which receives the entries without a slot.
    experts = 4 * spec.num_local_experts + 4 * (spec.num_local_experts + 1)
    return rows + slots + experts + ROW_OFFSET_BYTES + weight_bytes
