"""Rows and slots on one rank: build the expert-major index, gather rows, reduce slots.

Worked example, two experts, K = 2, received ids (local, -1 for none):

    row 0: [1, -1]      slots of expert 0: rows 1, 2        row_of_slot  = [1, 2, 0, 2]
    row 1: [-1, 0]      slots of expert 1: rows 0, 2        slots_of_row = [[2, -1], [-1, 0],
                                                                            [1, 3]]
    row 2: [0, 1]                                           first_slot   = [0, 2, 4]

Rows arrive by source rank, then token, and the sort is stable, so slots are in
(expert, source rank, token) order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from epcomm.platforms.cuda import importing_triton
from epcomm.records import SlotIndex
from epcomm.types import align_up, sum_dtype

if TYPE_CHECKING:
    from epcomm.ops.with_triton import TritonRowOps

# Number of bfloat16 numbers whose sum is one float32.
NUM_PARTS = 3
# Dimensions of parts that are matrices of rows: [W, T, H].
_ROWS_OF_PARTS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Members:
    """The sources of each target as one list, as torch's embedding_bag reads them.

    flat: [N], int64, sources of target 0, then of target 1, ...
    offsets: [targets + 1], int64; target i owns flat[offsets[i]:offsets[i + 1]].
    has_tail: flat is longer than its members, and one more offset, N, closes it.
    """

    flat: Tensor
    offsets: Tensor
    has_tail: bool = False

    @property
    def num_targets(self) -> int:
        """Return the number of targets, without the tail."""
        return self.offsets.shape[0] - (2 if self.has_tail else 1)

    def part(self, targets: slice) -> Members:
        """Return the members of a range of neighbouring targets; `targets` has start and stop.

        Host sync: none for all targets, else two reads.
        """
        if (targets.start, targets.stop) == (0, self.num_targets):
            return self
        offsets = self.offsets[targets.start : targets.stop + 1]
        first, end = int(offsets[0]), int(offsets[-1])
        return Members(flat=self.flat[first:end], offsets=offsets - first)

    def led(self) -> Members:
        """Put source t in front of those of target t, whose numbers all grow by the targets.

        The sources [5, 7] and [] become [0, 7, 9] and [1].   Host sync: none.
        """
        assert not self.has_tail, "a tail has no target"
        targets = torch.arange(self.num_targets, device=self.flat.device)
        target_of_member = torch.repeat_interleave(
            targets, self.offsets.diff(), output_size=self.flat.shape[0]
        )
        order = torch.cat([targets, target_of_member]).argsort(stable=True)
        flat = torch.cat([targets, self.flat + self.num_targets])[order]
        return Members(flat=flat, offsets=self.offsets + F.pad(targets + 1, (1, 0)))


@dataclass(frozen=True, kw_only=True, eq=False)
class MemberTable:
    """The sources of each target as a line of a table, as kernels read them.

    table: [targets, K], int32, contiguous, -1 for none.
    """

    table: Tensor

    def part(self, targets: slice) -> MemberTable:
        """Return the members of a range of neighbouring targets. Host sync: none."""
        return MemberTable(table=self.table[targets])

    def led(self) -> MemberTable:
        """Put source t in front, as Members.led() does. Host sync: none."""
        num_targets = self.table.shape[0]
        first = torch.arange(num_targets, dtype=self.table.dtype, device=self.table.device)
        moved = torch.where(self.table < 0, -1, self.table + num_targets)
        return MemberTable(table=torch.cat([first.unsqueeze(1), moved], dim=1))


AnyMembers = Members | MemberTable


def members_of(table: Tensor, num_members: int, *, is_exact: bool = True) -> Members:
    """Collect the non-negative entries of each row of `table` [N, K], in k order. Host sync: none.

    num_members: the number of non-negative entries, which the host knows; if not is_exact, the most
        that there can be, and the members have a tail.
    """
    valid = table >= 0
    where = torch.nonzero_static(valid.flatten(), size=num_members, fill_value=0).flatten()
    flat = table.flatten()[where].long()
    offsets = F.pad(valid.sum(dim=1).cumsum(0), (1, 0))
    if not is_exact:
        # The tail repeats some entry, which may be -1; the sum of the tail is cut off.
        flat, offsets = flat.clamp(min=0), F.pad(offsets, (0, 1), value=num_members)
    return Members(flat=flat, offsets=offsets, has_tail=not is_exact)


def as_members(table: Tensor, num_members: int, *, is_exact: bool = True) -> AnyMembers:
    """Return the members of a table [N, K] in the form that reduce_rows() takes on its device."""
    if row_ops_for(table) is not None:
        return MemberTable(table=table.to(torch.int32).contiguous())
    return members_of(table, num_members, is_exact=is_exact)


def mark_pairs(columns: Tensor, num_columns: int) -> Tensor:
    """Return which (row, column) pairs have an entry, [N, num_columns], bool.

    columns: [N, K], the column of each entry, such as the rank of its expert; -1 for none.
    """
    shape = (columns.shape[0], num_columns + 1)
    found = torch.zeros(shape, dtype=torch.bool, device=columns.device)
    # One more column takes the entries without a column.
    found.scatter_(1, torch.where(columns < 0, num_columns, columns).long(), True)
    return found[:, :num_columns]


def number_pairs(has_entry: Tensor) -> Tensor:
    """Return the number of each pair by row, then column, [N, C], int64, -1 without an entry."""
    numbers = has_entry.flatten().cumsum(0).view(has_entry.shape) - 1
    return torch.where(has_entry, numbers, -1)


def slots_by_row(index: SlotIndex, table: Tensor | None = None) -> AnyMembers:
    """Return the slots of each received row, in k order, or those of each line of a table.

    table: [N, K], int32, contiguous, each slot once, -1 for none.
    """
    assert index.slots_of_row is not None, "an index over rows has its inverse"
    table = index.slots_of_row if table is None else table
    if row_ops_for(table) is not None:
        return MemberTable(table=table)
    if index.host_num_tokens_per_expert is not None:
        return members_of(table, sum(index.host_num_tokens_per_expert))
    assert index.row_of_slot is not None, "an index over rows has slots"
    max_members = min(index.slots_of_row.numel(), index.row_of_slot.shape[0])
    return members_of(table, max_members, is_exact=False)


def aligned_counts(counts: Tensor, expert_alignment: int) -> Tensor:
    """Return the slots that each expert occupies: its count, rounded up to the alignment."""
    if expert_alignment == 1:
        return counts
    return (counts + expert_alignment - 1) // expert_alignment * expert_alignment


def build_slot_index(
    local_ids: Tensor, counts: Tensor, size: Sequence[int] | int, *, expert_alignment: int = 1
) -> SlotIndex:
    """Sort (row, k) pairs by expert.

    Args:
        local_ids: [R, K], expert of this rank, or -1.
        counts: [L], int64, number of slots of each expert, without padding, on the device.
        size: [L], the values of counts, on the host. Or C, the number of slots whatever the
            routing, if the host may not read the counts: the caller has checked that the slots
            fit, and the unused slots at the end are padding.
        expert_alignment: each expert's slots start at a multiple of this.

    Host sync: none.   Graph capture: yes.   Deterministic: yes.
    """
    ops = row_ops_for(local_ids)
    if ops is not None:
        return ops.index_slots(
            local_ids, None, counts, size, first_expert=0, expert_alignment=expert_alignment
        )[0]
    (num_rows, top_k), num_experts = local_ids.shape, counts.shape[0]
    flat_ids = local_ids.flatten()
    is_static = isinstance(size, int)
    if is_static:
        num_slots, is_dense = size, False
        # Entries without an expert sort last, as expert L.
        keys = torch.where(flat_ids < 0, num_experts, flat_ids)
        expert_of_pair, pairs = torch.sort(keys, stable=True)
    else:
        num_slots = num_used = sum(size)
        if expert_alignment > 1:
            num_slots = sum(align_up(count, expert_alignment) for count in size)
        is_dense = num_slots == num_used
        pairs = torch.nonzero_static(flat_ids >= 0, size=num_used).flatten()
        expert_of_pair, order = torch.sort(flat_ids[pairs], stable=True)
        pairs = pairs[order]

    starts = F.pad(aligned_counts(counts, expert_alignment).cumsum(0), (1, 0))
    slots = torch.arange(pairs.shape[0], dtype=torch.int32, device=pairs.device)
    row_of_slot = (pairs // top_k).to(torch.int32)
    if not is_dense:
        shift = starts - F.pad(counts.cumsum(0), (1, 0))
        slots = slots + shift[expert_of_pair.long()]
        if is_static:
            # One more slot takes the entries without an expert and is cut off.
            slots = torch.where(expert_of_pair < num_experts, slots, num_slots)
        padded = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=pairs.device)
        padded[slots] = row_of_slot
        row_of_slot = padded[:num_slots]
    slots_of_row = torch.full_like(flat_ids, -1, dtype=torch.int32)
    slots_of_row[pairs] = slots.to(torch.int32)
    if is_static:
        slots_of_row.masked_fill_(flat_ids < 0, -1)
    return SlotIndex(
        row_of_slot=row_of_slot,
        slots_of_row=slots_of_row.view(num_rows, top_k),
        num_tokens_per_expert=counts.to(torch.int32),
        first_slot=starts.to(torch.int32),
        host_num_tokens_per_expert=None if is_static else tuple(size),
        expert_alignment=expert_alignment,
        is_dense=is_dense,
    )


def packed_index(
    counts: Tensor, host_counts: Sequence[int] | None = None, *, is_dense: bool = False
) -> SlotIndex:
    """Return the index over rows that are slots, packed by expert; counts: [L], on the device."""
    return SlotIndex(
        row_of_slot=None,
        slots_of_row=None,
        num_tokens_per_expert=counts.to(torch.int32),
        first_slot=F.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
        host_num_tokens_per_expert=None if host_counts is None else tuple(host_counts),
        is_dense=is_dense,
    )


def row_topk(index: SlotIndex, slot_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each received row has: local experts [R, K], int64, -1 for none, and weights.

    slot_weights: [C]; weights are [R, K], 0 for none.

    Host sync: none.   Deterministic: yes.
    """
    slots = index.slots_of_row
    assert slots is not None, "an index over rows has its inverse"
    if slots.shape[0] == 0:
        return slots.long(), slot_weights.new_empty(slots.shape)
    experts = torch.searchsorted(index.first_slot[1:].contiguous(), slots, right=True)
    return experts.masked_fill(slots < 0, -1), gather_scalars(slot_weights, slots)


def index_slots(
    ids: Tensor,
    weights: Tensor,
    counts: Tensor,
    size: Sequence[int] | int,
    *,
    first_expert: int,
    expert_alignment: int = 1,
) -> tuple[SlotIndex, Tensor]:
    """Build the index over rows that have arrived, and bring their router weights into its order.

    Args:
        ids: [R, K], int32, physical experts, -1 for none, of any row stride.
        weights: [R, K], of any row stride.
        counts, size, expert_alignment: see build_slot_index().
        first_expert: the first of the L experts of this rank.

    Returns: the index, and the weight of each slot, [C], 0 for padding.

    Host sync: none.   Graph capture: yes.   Deterministic: yes.
    """
    ops = row_ops_for(ids)
    if ops is not None:
        return ops.index_slots(
            ids, weights, counts, size, first_expert=first_expert, expert_alignment=expert_alignment
        )
    local_ids = localize(ids, first_expert, counts.shape[0])
    index = build_slot_index(local_ids, counts, size, expert_alignment=expert_alignment)
    return index, spread_to_slots(weights, index)


def localize(expert_ids: Tensor, first_expert: int, num_local_experts: int) -> Tensor:
    """Convert physical ids to ids of this rank's experts, -1 for those of other ranks."""
    # Ids are strided, each after its row; make them contiguous once.
    local_ids = expert_ids.contiguous() - first_expert
    return torch.where((local_ids >= 0) & (local_ids < num_local_experts), local_ids, -1)


def expert_of_slot(index: SlotIndex, num_slots: int) -> Tensor:
    """Return the local expert that computes each slot, [C], int64; L after the last expert.

    Padding between two experts belongs to the first of them.

    Host sync: none.
    """
    slots = torch.arange(num_slots, dtype=torch.int32, device=index.first_slot.device)
    return torch.searchsorted(index.first_slot[1:], slots, right=True)


def expert_of_used_slot(index: SlotIndex, num_slots: int) -> Tensor:
    """Return the local expert that computes each slot, [C], int32; -1 for padding.

    Counts 2 1 with starts 0 4 8 and 10 slots give 0 0 -1 -1 1 -1 -1 -1 -1 -1.   Host sync: none.
    """
    num_experts = index.num_tokens_per_expert.shape[0]
    experts = expert_of_slot(index, num_slots)
    ends = index.first_slot[:-1] + index.num_tokens_per_expert
    slots = torch.arange(num_slots, device=experts.device)
    is_used = (experts < num_experts) & (slots < ends[experts.clamp(max=num_experts - 1)])
    return torch.where(is_used, experts, -1).to(torch.int32)


def gather_rows(rows: Tensor, index: SlotIndex) -> Tensor:
    """Copy the received row of each slot, [C, H]; padding slots are zero.

    rows: [R, H]. Their row stride may exceed H, and then, in plain torch, the row stride of the
    result does too: copying the gaps keeps torch on its path for contiguous rows, many times faster
    on a CPU.

    Host sync: none.   Lifetime: the caller owns the result, which is `rows` without an index.
    """
    row_of_slot = index.row_of_slot
    if row_of_slot is None:
        return rows
    ops = row_ops_for(rows)
    if ops is not None:
        return ops.gather_rows(rows, row_of_slot)
    hidden_size = rows.shape[1]
    if rows.shape[0] == 0:
        return rows.new_zeros(row_of_slot.shape[0], hidden_size)
    safe = row_of_slot if index.is_dense else row_of_slot.clamp(min=0)
    slots = torch.index_select(_whole_rows(rows), 0, safe)[:, :hidden_size]
    if not index.is_dense:
        # Runners compute padding with its expert, so it must not add to a weight's gradient.
        slots = slots.masked_fill((row_of_slot < 0).unsqueeze(1), 0)
    return slots


def reduce_rows(rows: Tensor, members: AnyMembers, weights: Tensor | None = None) -> Tensor:
    """Sum member rows into each target, in sum_dtype() and member order, cast once to rows.dtype.

    The cast rounds half to even. Kernels round a product with a weight before they add it; plain
    torch adds the exact product, for bfloat16 rows that with each part of the weight.

    Args:
        rows: [N, H]; rows that are not members are never read.
        members: sources of each target.
        weights: [N], float32 (float64 for float64 rows), multiplied into the rows, or None.

    Returns: [targets, H], contiguous; a target without members is zero.

    Host sync: none.   Deterministic: yes.
    """
    if isinstance(members, MemberTable):
        ops = row_ops_for(rows)
        assert ops is not None, "tables are made where there are kernels"
        return ops.sum_members(rows, members.table, weights)
    num_targets, hidden_size = members.num_targets, rows.shape[1]
    if members.flat.shape[0] == 0:
        return rows.new_zeros(num_targets, hidden_size)
    flat, offsets, whole, dtype = members.flat, members.offsets, _whole_rows(rows), rows.dtype
    if weights is not None:
        weights = weights[flat]
        # Both methods of summing need the weights in the dtype of the rows.
        if dtype is torch.bfloat16:
            # Each weight becomes a sum of three bfloat16 numbers: a float32 copy of the rows would
            # cost many times as much as reading the rows three times, from the cache.
            weights = _split_weights(weights).flatten()
            flat, offsets = flat.repeat_interleave(NUM_PARTS), offsets * NUM_PARTS
        else:
            whole = whole.to(sum_dtype(dtype))
    if dtype is torch.bfloat16 and rows.device.type == "cpu" and type(rows) in WITH_DATA:
        sums = _sum_bfloat16(whole, flat, offsets, weights)
    else:
        sums = F.embedding_bag(
            flat, whole, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
    return sums[:num_targets, :hidden_size].to(dtype).contiguous()


def reduce_rows_onto(bias: Tensor, rows: Tensor, members: AnyMembers) -> Tensor:
    """Sum as reduce_rows() does, onto bias [targets, H], of which each sum begins with a row.

    bias: in sum_dtype() of the rows. For the sum there is a copy of the rows in this dtype.

    Host sync: none.   Deterministic: yes.
    """
    return reduce_rows(torch.cat([bias, rows.to(bias.dtype)]), members.led()).to(rows.dtype)


def sum_parts(parts: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Add [W, T, ...] over W, in ascending order and in sum_dtype(), and cast [T, ...] once.

    bias: [T, ...], in sum_dtype(), with which the sums begin, or None.
    """
    ops = row_ops_for(parts) if bias is None and parts.dim() == _ROWS_OF_PARTS else None
    if ops is not None:
        return ops.sum_parts(parts, dtype)
    total = parts[0].to(sum_dtype(parts.dtype))
    if bias is not None:
        total = bias + total
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


def dot_rows(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum over the columns of the products of two [N, H] of one dtype: [N].

    Sums are in sum_dtype(). The order of the additions depends on H alone; in plain torch a single
    row of more than 32,768 columns has another order than several.

    Host sync: none.   Deterministic: yes.
    """
    ops = row_ops_for(left)
    if ops is not None:
        return ops.dot_rows(left, right)
    dtype = sum_dtype(left.dtype)
    return (left.to(dtype) * right.to(dtype)).sum(dim=1)


def count_experts(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Count the entries of topk_ids [T, K] that name each expert, [E], int64; -1 counts nowhere."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=topk_ids.device)
    flat = torch.where(topk_ids < 0, num_experts, topk_ids).flatten().long()
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]


def spread_to_slots(row_values: Tensor, index: SlotIndex) -> Tensor:
    """Return the value of each slot's (row, k), [C], 0 for padding; row_values are [R, K]."""
    assert index.slots_of_row is not None, "an index over rows"
    num_slots = 0 if index.row_of_slot is None else index.row_of_slot.shape[0]
    # One more element takes the entries without a slot and is cut off.
    values = row_values.new_zeros(num_slots + 1)
    slots = torch.where(index.slots_of_row < 0, num_slots, index.slots_of_row)
    values[slots.flatten().long()] = row_values.flatten()
    return values[:num_slots]


def gather_scalars(values: Tensor, table: Tensor) -> Tensor:
    """Return values[table], with 0 where the table is negative; values [N], table [R, K]."""
    if values.shape[0] == 0:
        return values.new_zeros(table.shape)
    picked = values[table.clamp(min=0).long()]
    return torch.where(table >= 0, picked, torch.zeros_like(picked))


def _split_weights(weights: Tensor) -> Tensor:
    """Split weights [N], float32, into [N, NUM_PARTS], bfloat16, whose rows add up to the weights.

    Three times 8 fraction bits hold the 24 of a float32, and the exponents are the same. Where a
    row of the sum holds an infinity, the sum of products may be NaN, and one product infinite.
    """
    parts, rest = [], weights
    for _ in range(NUM_PARTS):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.stack(parts, dim=1)


def _sum_bfloat16(rows: Tensor, flat: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """Sum rows [N, H] on a CPU, where embedding_bag rounds bfloat16 half away from zero.

    Each line of a CSR matrix is multiplied in the order of its entries, in float32, and cast once.
    torch compares the order of the columns, which is that of the members, only on request.
    """
    _silence_beta_warning()
    matrix = torch.sparse_csr_tensor(
        offsets,
        flat,
        rows.new_ones(flat.shape[0]) if weights is None else weights,
        size=(offsets.shape[0] - 1, rows.shape[0]),
        device=rows.device,
        check_invariants=False,
    )
    return torch.sparse.mm(matrix, rows, reduce="sum")


@cache
def _silence_beta_warning() -> None:
    """Make a first CSR matrix, at which torch warns once in a process that they are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.zeros(1, 1, dtype=torch.float32, device="cpu").to_sparse_csr()


def _whole_rows(rows: Tensor) -> Tensor:
    """View strided rows together with the gaps between them as one contiguous matrix."""
    stride = rows.stride(0)
    # Expanded and overlapping rows have no gap between them.
    if rows.shape[0] <= 1 or stride <= rows.shape[1]:
        return rows
    end = rows.storage_offset() + rows.shape[0] * stride
    has_last_gap = end * rows.element_size() <= rows.untyped_storage().nbytes()
    if rows.stride(1) != 1 or not has_last_gap:
        return rows
    return rows.as_strided((rows.shape[0], stride), (stride, 1))


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, index: SlotIndex) -> Tensor:
        ctx.index = index  # type: ignore[attr-defined]
        return gather_rows(rows, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_slots: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        index: SlotIndex = ctx.index  # type: ignore[attr-defined]
        return reduce_rows(grad_slots, slots_by_row(index)), None


def pack(rows: Tensor, index: SlotIndex) -> Tensor:
    """Copy the received row of each slot, [R, H] to [C, H], in expert-major order.

    Differentiable in rows: the gradient of a row is the sum over its slots, in k order.
    Padding slots are zero, and their gradient is ignored.
    Host sync: none.
    """
    return rows if index.row_of_slot is None else _Pack.apply(rows, index)


@cache
def _load_triton() -> TritonRowOps:
    with importing_triton("row_ops_of"):
        from epcomm.ops.with_triton import TritonRowOps
    return TritonRowOps()


# Device types without an entry have no kernels here and use plain torch.
_LOADERS: dict[str, Callable[[], TritonRowOps]] = {"cuda": _load_triton}


def row_ops_of(device: torch.device) -> TritonRowOps | None:
    """Return the kernels for tensors on `device`, or None where plain torch serves."""
    loader = _LOADERS.get(device.type)
    return None if loader is None else loader()


def row_ops_for(tensor: Tensor) -> TritonRowOps | None:
    """Return the kernels for one tensor.

    Plain torch serves a tensor without data (FakeTensor), and one whose history autograd keeps.
    """
    if tensor.device.type not in _LOADERS or type(tensor) not in WITH_DATA:
        return None
    return None if tensor.requires_grad and torch.is_grad_enabled() else row_ops_of(tensor.device)


# Not FakeTensor, nor what a transformation wraps: a kernel reads memory.
WITH_DATA = (Tensor, torch.nn.Parameter)
