"""Sum expert results by group of experts, in an order that does not depend on the ranks.

A pair is a (row, column) with at least one entry: the column of an entry is the group of its expert
or, where each entry is a pair, its k. Worked example, two groups of two experts, K = 3:

    ids     [[3, 0, 1]]     groups [[1, 0, 0]]      pairs (0, 0) with entries 1 and 2 of row 0,
                                                    and (0, 1) with entry 0

The result of a token is round(sum over groups, ascending, of round(sum over the entries of the
group, in k order, of weight * result)), all sums in sum_dtype() and each product rounded before it
is added (docs/same_bits.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.ops.slots import (
    AnyMembers,
    MemberTable,
    mark_pairs,
    members_of,
    number_pairs,
    reduce_rows,
    row_ops_for,
    sum_parts,
)
from epcomm.records import SlotIndex
from epcomm.spec import BufferSpec
from epcomm.types import sum_dtype


@dataclass(frozen=True, kw_only=True)
class SumGroups:
    """The columns of entries in a buffer with BufferSpec.sum_groups.

    num_groups: G.
    num_columns: the columns of a rank: its G / W groups; K if each entry is a pair of its own,
        because the source rank sums (BufferSpec.sums_at_source).
    sums_at_source: see BufferSpec.
    num_local: L.
    """

    num_groups: int
    num_columns: int
    sums_at_source: bool
    num_local: int

    @classmethod
    def of(cls, spec: BufferSpec, world_size: int) -> SumGroups | None:
        """Return the groups of a specification, or None without sum_groups."""
        groups = spec.sum_groups
        if groups is None:
            return None
        return cls(
            num_groups=groups,
            num_columns=spec.top_k if spec.sums_at_source else groups // world_size,
            sums_at_source=spec.sums_at_source,
            num_local=spec.num_local_experts,
        )

    def columns(self, ids: Tensor) -> Tensor:
        """Return the column of each entry, [N, K], -1 for none.

        ids: [N, K], physical experts, or experts of this rank; -1 for none. Columns of rank r begin
            at r * num_columns.
        """
        if not self.sums_at_source:
            return torch.div(ids, self.num_local // self.num_columns, rounding_mode="floor")
        entry = torch.arange(self.num_columns, device=ids.device)
        rank = torch.div(ids, self.num_local, rounding_mode="floor")
        return torch.where(ids < 0, -1, rank * self.num_columns + entry)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """The pairs of some rows, and the sources of each.

    row_of_pair: [P], int64; 0 past the pairs in use.
    table: [P, K], int32, contiguous; the source of entry k if it belongs to the pair, else -1.
    """

    row_of_pair: Tensor
    table: Tensor

    @classmethod
    def of(cls, sources: Tensor, columns: Tensor, numbers: Tensor, num_pairs: int) -> Pairs:
        """Return the pairs of N rows.

        Args:
            sources: [N, K], the source of each entry, -1 for none.
            columns: [N, K], the column of each entry, -1 for none.
            numbers: [N, C], the number of each pair.
            num_pairs: P, at least the number of pairs with an entry.

        Host sync: none.
        """
        device, (num_rows, top_k) = sources.device, sources.shape
        pair = numbers.gather(1, columns.clamp(min=0).long())
        # One more pair takes the entries without a column.
        pair = torch.where(columns < 0, num_pairs, pair)
        entry = torch.arange(top_k, device=device).expand(num_rows, top_k)
        table = torch.full((num_pairs + 1, top_k), -1, dtype=torch.int32, device=device)
        table[pair, entry] = sources.to(torch.int32)
        rows = torch.arange(num_rows, device=device).unsqueeze(1).expand(num_rows, top_k)
        row_of_pair = torch.zeros(num_pairs + 1, dtype=torch.int64, device=device)
        row_of_pair[pair] = rows
        return cls(row_of_pair=row_of_pair[:num_pairs], table=table[:num_pairs])

    def members(self, num_members: int, *, is_exact: bool = True) -> AnyMembers:
        """Return the sources of each pair, in k order; see members_of()."""
        return as_members(self.table, num_members, is_exact=is_exact)

    def scalars(self, row_scalars: Tensor) -> Tensor:
        """Return the scalars [P, K] of each pair's entries, 0 for others; row_scalars: [N, K]."""
        return torch.where(self.table >= 0, row_scalars[self.row_of_pair], 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class WideSums:
    """Sums by group of received rows, with a returned row of num_columns * H for each of them.

    Columns without an entry are zero. Sizes do not depend on the routing.

    groups: the groups of the buffer.
    table: [R * num_columns, K], as Pairs.table.
    num_members, is_exact: see members_of().
    topk: the entries of the tokens whose sums return to this rank; None unless the source sums.
    """

    groups: SumGroups
    table: Tensor
    num_members: int
    is_exact: bool
    topk: SourceEntries | None

    @classmethod
    def of(
        cls,
        groups: SumGroups,
        ids: Tensor,
        index: SlotIndex,
        topk: SourceEntries,
    ) -> WideSums:
        """Return the sums over an index.

        ids: [R, K], experts of this rank, -1 for none.
        """
        slots, counts = index.slots_of_row, index.host_num_tokens_per_expert
        assert slots is not None, "an index over rows has its inverse"
        num_pairs = ids.shape[0] * groups.num_columns
        numbers = torch.arange(num_pairs, device=ids.device).view(-1, groups.num_columns)
        most = slots.numel() if index.row_of_slot is None else index.row_of_slot.shape[0]
        return cls(
            groups=groups,
            table=Pairs.of(slots, groups.columns(ids), numbers, num_pairs).table,
            num_members=min(most, slots.numel()) if counts is None else sum(counts),
            is_exact=counts is not None,
            topk=topk if groups.sums_at_source else None,
        )

    def returned(self, rows: Tensor, slot_weights: Tensor | None) -> Tensor:
        """Return the sums of the expert results of each received row, [R, num_columns * H]."""
        members = as_members(self.table, self.num_members, is_exact=self.is_exact)
        weights = None if self.groups.sums_at_source else slot_weights
        sums = sum_weighted(rows, members, weights)
        return sums.view(-1, self.groups.num_columns * rows.shape[1])

    def total(self, returned: Tensor, bias: Tensor | None, *, has_weights: bool) -> Tensor:
        """Return y [T, H] of returned rows [W, T, num_columns * H], onto bias [T, H] or None."""
        columns = returned.unflatten(2, (self.groups.num_columns, -1))
        if self.topk is None:
            parts = columns.transpose(1, 2).flatten(0, 1)
            return sum_parts(parts, returned.dtype, bias)
        assert bias is None, "no client with a bias has experts of a group on several ranks"
        return self.topk.total(columns, self.groups, has_weights=has_weights)


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceEntries:
    """The entries of tokens whose sums a source rank computes: ids, groups and weights, [T, K]."""

    ids: Tensor
    groups: Tensor | None
    weights: Tensor

    def total(self, columns: Tensor, groups: SumGroups, *, has_weights: bool) -> Tensor:
        """Return y [T, H] of one row per entry, in columns [W, T, K, H]."""
        assert self.groups is not None, "checked by the dispatcher"
        num_tokens, top_k = columns.shape[1:3]
        entry = torch.arange(num_tokens * top_k, device=columns.device).view(num_tokens, top_k)
        owner = torch.div(self.ids, groups.num_local, rounding_mode="floor")
        entries = torch.where(self.ids < 0, -1, owner * num_tokens * top_k + entry)
        weights = self.weights if has_weights else None
        return sum_entries(columns.flatten(0, 2), entries, self.groups, groups.num_groups, weights)


def as_members(table: Tensor, num_members: int, *, is_exact: bool = True) -> AnyMembers:
    """Return the members of a table [N, K] in the form that reduce_rows() takes on its device."""
    if row_ops_for(table) is not None:
        return MemberTable(table=table.to(torch.int32).contiguous())
    return members_of(table, num_members, is_exact=is_exact)


def sum_weighted(rows: Tensor, members: AnyMembers, weights: Tensor | None) -> Tensor:
    """Sum as reduce_rows() does, but round each product with a weight before it is added.

    weights: [N], in sum_dtype() of the rows, or None.

    Host sync: none.   Deterministic: yes.
    """
    if weights is None or isinstance(members, MemberTable):
        # Kernels round the products.
        return reduce_rows(rows, members, weights)
    products = rows.to(sum_dtype(rows.dtype)) * weights.unsqueeze(1)
    return reduce_rows(products, members).to(rows.dtype)


def sum_entries(
    rows: Tensor, entries: Tensor, groups: Tensor, num_groups: int, weights: Tensor | None
) -> Tensor:
    """Sum one row per entry, first by group and then over the groups, to [T, H].

    Args:
        rows: [N, H].
        entries: [T, K], the row of each entry, -1 for none.
        groups: [T, K], the group of each entry; read where entries >= 0.
        num_groups: G.
        weights: [T, K], in sum_dtype() of the rows, or None.

    Host sync: none.   Deterministic: yes.
    """
    num_rows, (num_tokens, top_k) = rows.shape[0], entries.shape
    if num_rows == 0:
        return rows.new_zeros(num_tokens, rows.shape[1])
    columns = torch.where(entries < 0, -1, groups)
    numbers = number_pairs(mark_pairs(columns, num_groups))
    most = num_tokens * min(top_k, num_groups)
    pairs = Pairs.of(entries, columns, numbers, most)
    weight_of_row = None
    if weights is not None:
        # One more row takes the masked entries.
        weight_of_row = weights.new_zeros(num_rows + 1)
        weight_of_row[torch.where(entries < 0, num_rows, entries).long()] = weights
        weight_of_row = weight_of_row[:num_rows]
    members = pairs.members(num_tokens * top_k, is_exact=False)
    sums = sum_weighted(rows, members, weight_of_row)
    return reduce_rows(sums, as_members(numbers, most, is_exact=False))
