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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.ops import slots
from epcomm.records import SlotIndex
from epcomm.spec import BufferSpec
from epcomm.types import sum_dtype


@dataclass(frozen=True, kw_only=True)
class SumGroups:
    """The columns of entries in a buffer with BufferSpec.sum_groups.

    num_groups: G.
    num_columns: the columns of a rank: its G / W groups; K if each entry is a pair of its own,
        because the source rank sums (BufferSpec.sums_at_source).
    sums_at_source: see BufferSpec.   num_local: L.
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

    def source(
        self, entries: Tensor, topk_groups: Tensor | None, topk_weights: Tensor
    ) -> SourceSums | None:
        """Return the sums of this rank's tokens, None where the rank of the experts sums.

        entries: [T, K], the returned row of each entry, -1 for none.
        """
        if not self.sums_at_source:
            return None
        assert topk_groups is not None, "checked by the dispatcher"
        return SourceSums(
            num_groups=self.num_groups,
            entries=entries,
            # The caller may overwrite its tensors before combine reads them.
            groups=topk_groups.clone(),
            weights=topk_weights.detach().clone(),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceSums:
    """How a source rank sums one returned row per entry of its tokens.

    num_groups: G.   entries: [T, K], the row of each entry, -1 for none.
    groups, weights: [T, K], of each entry; not read for none.
    """

    num_groups: int
    entries: Tensor
    groups: Tensor
    weights: Tensor

    def total(self, rows: Tensor, *, has_weights: bool) -> Tensor:
        """Sum rows [N, H], first by group and then over the groups, to [T, H].

        Host sync: none.   Deterministic: yes.
        """
        entries, num_rows, (num_tokens, top_k) = self.entries, rows.shape[0], self.entries.shape
        if num_rows == 0:
            return rows.new_zeros(num_tokens, rows.shape[1])
        columns = torch.where(entries < 0, -1, self.groups)
        numbers = slots.number_pairs(slots.mark_pairs(columns, self.num_groups))
        most = num_tokens * min(top_k, self.num_groups)
        table = pair_table(entries, columns, numbers, most)
        weight_of_row = None
        if has_weights:
            # One more row takes the masked entries.
            weight_of_row = self.weights.new_zeros(num_rows + 1)
            weight_of_row[torch.where(entries < 0, num_rows, entries).long()] = self.weights
            weight_of_row = weight_of_row[:num_rows]
        members = slots.as_members(table, num_tokens * top_k, is_exact=False)
        sums = sum_weighted(rows, members, weight_of_row)
        return slots.reduce_rows(sums, slots.as_members(numbers, most, is_exact=False))


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupSums:
    """The rows of groups that a rank returns, and what it does with those that return to it.

    table: [P, K], int32, the slots of each returned row, -1 for none; None if another exchange
        sums them.
    source: see SumGroups.source().
    num_columns: the returned rows of a received row where their number does not depend on the
        routing; rows without a slot are zero.
    """

    table: Tensor | None
    source: SourceSums | None
    num_columns: int = 1

    def sums(
        self, rows: Tensor, index: SlotIndex, slot_weights: Tensor | None
    ) -> Callable[[slice], Tensor]:
        """Return a function that computes a range of the returned rows from results of slots."""
        assert self.table is not None, "this exchange sums"
        members, weights = slots.slots_by_row(index, self.table), slot_weights
        if self.source is not None:
            weights = None
        return lambda part: sum_weighted(rows, members.part(part), weights)

    def total(
        self, returned: Tensor, dtype: torch.dtype, bias: Tensor | None, *, has_weights: bool
    ) -> Tensor:
        """Return y [T, H], in `dtype`, of returned rows [W, T, num_columns * H], onto the bias."""
        columns = returned.unflatten(2, (self.num_columns, -1))
        if self.source is None:
            return slots.sum_parts(columns.transpose(1, 2).flatten(0, 1), dtype, bias)
        assert bias is None, "no client with a bias has experts of a group on several ranks"
        return self.source.total(columns.flatten(0, 2), has_weights=has_weights)


def pair_table(sources: Tensor, columns: Tensor, numbers: Tensor, num_pairs: int) -> Tensor:
    """Return the source of each entry of each pair of N rows, [P, K], int32, -1 for other entries.

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
    return table[:num_pairs]


def sum_weighted(rows: Tensor, members: slots.AnyMembers, weights: Tensor | None) -> Tensor:
    """Sum as slots.reduce_rows() does, but round each product with a weight before it is added.

    weights: [N], in sum_dtype() of the rows, or None.

    Host sync: none.   Deterministic: yes.
    """
    if weights is None or isinstance(members, slots.MemberTable):
        # Kernels round the products.
        return slots.reduce_rows(rows, members, weights)
    products = rows.to(sum_dtype(rows.dtype)) * weights.unsqueeze(1)
    return slots.reduce_rows(products, members).to(rows.dtype)
