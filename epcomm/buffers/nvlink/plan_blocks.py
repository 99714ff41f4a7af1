"""A plan and its index in one block, which a kernel writes before the host has read sizes.

Making a tensor takes the host half a microsecond, and not every caller reads the index: its tensors
are made when one of them is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from epcomm.buffers.base import Dispatched
from epcomm.buffers.nvlink.normal_counts import IndexSizes
from epcomm.kernels.nvlink.common.plan_parts import Arrivals, Received, Sends
from epcomm.protocol import BatchFlags
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.spec import BufferSpec
from epcomm.types import WireTensor, align_up

# Kernels are compiled for parts that begin at multiples of 16 bytes.
WORDS_OF_16_BYTES = 4
_WORD_BYTES = 4
# The parts of an index among PLAN_PARTS of plan_parts.py, between two of Sends and three of
# Arrivals.
_INDEX_PARTS = (
    *("row_of_slot", "slots_of_row", "slot_weights", "num_tokens_per_expert", "first_slot"),
)
_INDEX = slice(2, 7)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanBlockLayout:
    """The places of PLAN_PARTS in a block, all of which begin at multiples of 16 bytes.

    offsets: bytes before each.   num_words: of all.   index_words: from part to part of the index.
    pieces: the words by which a block is cut into the parts of Sends, the index, the parts of
        Arrivals, and gaps between them.   places: of those among the pieces, gaps left out.
    """

    offsets: tuple[int, ...]
    num_words: int
    index_words: tuple[int, ...]
    pieces: list[int]
    places: tuple[int, ...]

    @classmethod
    def of(
        cls, spec: BufferSpec, world_size: int, num_tokens: int, most: IndexSizes
    ) -> PlanBlockLayout:
        """Return the layout for T tokens, and for as many rows and slots as may come."""
        return _layout_of(
            spec.top_k,
            spec.num_local_experts,
            world_size,
            num_tokens,
            most.num_rows,
            most.num_slots,
        )


@lru_cache(maxsize=256)
def _layout_of(
    top_k: int, num_local: int, world_size: int, num_tokens: int, num_rows: int, num_slots: int
) -> PlanBlockLayout:
    sends = (num_tokens * world_size, num_tokens * top_k)
    index = _index_words(num_rows, num_slots, top_k, num_local)
    lengths = (*sends, *index, world_size, world_size, 2)
    padded = [align_up(each, WORDS_OF_16_BYTES) for each in lengths]
    offsets = tuple(_WORD_BYTES * sum(padded[:place]) for place in range(len(padded)))
    pieces: list[int] = []
    places: list[int] = []
    whole = sum(padded[_INDEX])
    for words, length in (
        *zip(padded[: _INDEX.start], sends, strict=True),
        (whole, whole),
        *zip(padded[_INDEX.stop :], lengths[_INDEX.stop :], strict=True),
    ):
        places.append(len(pieces))
        pieces += [length, words - length] if words > length else [length]
    return PlanBlockLayout(
        offsets=offsets,
        num_words=sum(padded),
        index_words=tuple(padded[_INDEX]),
        pieces=pieces,
        places=tuple(places),
    )


def _index_words(num_rows: int, num_slots: int, top_k: int, num_local: int) -> tuple[int, ...]:
    """Return the words of each of _INDEX_PARTS."""
    return (num_slots, num_rows * top_k, num_slots, num_local, num_local + 1)


class LateIndex(SlotIndex):
    """An index whose tensors are made when one is read.

    slot_weights: the weight of each slot, [C], float32.
    """

    slot_weights: Tensor
    _memory: Tensor
    _layout: PlanBlockLayout
    _sizes: IndexSizes
    _spec: BufferSpec

    @classmethod
    def of(
        cls, memory: Tensor, layout: PlanBlockLayout, sizes: IndexSizes, spec: BufferSpec
    ) -> Self:
        """Keep the memory of the index in a block, and the sizes that the host has read."""
        index = object.__new__(cls)
        # It is frozen; __getattr__() is not asked for what is there.
        index.__dict__.update(
            host_num_tokens_per_expert=sizes.per_expert,
            expert_alignment=spec.expert_alignment,
            is_dense=sizes.is_dense,
            _memory=memory,
            _layout=layout,
            _sizes=sizes,
            _spec=spec,
        )
        return index

    def __getattr__(self, name: str) -> Tensor:
        """Make all tensors, as far as they are in use, for the first of them that is read."""
        if name not in _INDEX_PARTS:
            raise AttributeError(name)
        (num_rows, num_slots), spec = (self._sizes.num_rows, self._sizes.num_slots), self._spec
        used = _index_words(num_rows, num_slots, spec.top_k, spec.num_local_experts)
        cut = [
            words
            for length, most in zip(used, self._layout.index_words, strict=True)
            for words in (length, most - length)
        ]
        made = dict(zip(_INDEX_PARTS, self._memory.split_with_sizes(cut)[::2], strict=True))
        made["slots_of_row"] = made["slots_of_row"].view(num_rows, spec.top_k)
        made["slot_weights"] = made["slot_weights"].view(torch.float32)
        self.__dict__.update(made)
        return made[name]


class LateDispatched(Dispatched):
    """A result whose slot_weights are those of its index, which makes them when they are read."""

    index: LateIndex

    @classmethod
    def of(
        cls,
        *,
        rows: WireTensor,
        exchange_plan: ExchangePlan,
        index: LateIndex,
        any_flags: BatchFlags,
        row_topk: tuple[Tensor, Tensor] | None,
    ) -> Self:
        """Keep all but slot_weights."""
        out = object.__new__(cls)
        out.__dict__.update(
            rows=rows,
            exchange_plan=exchange_plan,
            index=index,
            any_flags=any_flags,
            row_topk=row_topk,
        )
        return out

    def __getattr__(self, name: str) -> Tensor:
        """Return slot_weights."""
        if name != "slot_weights":
            raise AttributeError(name)
        return self.index.slot_weights


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanBlock:
    """The memory of one call, int32, and what a kernel is told of it.

    What is not used stays allocated: 24 * K bytes at most for each of W * M rows.
    """

    spec: BufferSpec
    memory: Tensor
    layout: PlanBlockLayout
    received: Received

    def parts(self, sizes: IndexSizes) -> tuple[Sends, Arrivals, LateIndex]:
        """Return the parts, once the host knows sizes, or where there is a budget."""
        pieces = self.memory.split_with_sizes(self.layout.pieces)
        places, positions, index, rows_from, row_base, has_failed = [
            pieces[place] for place in self.layout.places
        ]
        return (
            Sends(places=places, positions=positions),
            Arrivals(rows_from=rows_from, row_base=row_base, has_failed=has_failed),
            LateIndex.of(index, self.layout, sizes, self.spec),
        )

    def row_topk(self, sizes: IndexSizes) -> tuple[Tensor, Tensor] | None:
        """Return the experts and the weights of the rows, if the kernel was told to write them."""
        topk = self.received.row_topk
        return None if topk is None else (topk[0][: sizes.num_rows], topk[1][: sizes.num_rows])
