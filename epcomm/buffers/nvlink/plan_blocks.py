"""A plan and its index in one block, which a kernel writes before the host has read sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from epcomm.buffers.nvlink.normal_counts import IndexSizes
from epcomm.kernels.nvlink.common.plan_parts import Arrivals, Received, Sends
from epcomm.records import SlotIndex
from epcomm.spec import BufferSpec
from epcomm.types import align_up

# Kernels are compiled for parts that begin at multiples of 16 bytes.
WORDS_OF_16_BYTES = 4
_WORD_BYTES = 4
# The parts of an index among PLAN_PARTS of plan_parts.py, between those of Sends and of Arrivals.
_INDEX = slice(2, 7)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanBlockLayout:
    """The offsets of PLAN_PARTS in a block, all of which begin at multiples of 16 bytes.

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
    @lru_cache(maxsize=256)
    def of(
        cls, top_k: int, num_local: int, world_size: int, num_tokens: int, most: IndexSizes
    ) -> PlanBlockLayout:
        """Return the layout for T tokens, and for as many rows and slots as may come."""
        sends = (num_tokens * world_size, num_tokens * top_k)
        index = _index_words(most.num_rows, most.num_slots, top_k, num_local)
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
        return cls(
            offsets=offsets,
            num_words=sum(padded),
            index_words=tuple(padded[_INDEX]),
            pieces=pieces,
            places=tuple(places),
        )


def _index_words(num_rows: int, num_slots: int, top_k: int, num_local: int) -> tuple[int, ...]:
    """Return the words of each part of an index: slots, rows, weights, counts and first slots."""
    return (num_slots, num_rows * top_k, num_slots, num_local, num_local + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanBlockParts:
    """The parts of a block; slot_weights: [C], float32."""

    sends: Sends
    arrivals: Arrivals
    index: SlotIndex
    slot_weights: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanBlock:
    """The memory of one call, int32, and the arguments of a kernel for it.

    Unused memory stays allocated: at most 24 * K bytes for each of W * M rows.
    """

    spec: BufferSpec
    memory: Tensor
    layout: PlanBlockLayout
    received: Received

    def parts(self, sizes: IndexSizes) -> PlanBlockParts:
        """Return the parts, once the host knows the sizes, or if there is a budget."""
        pieces = self.memory.split_with_sizes(self.layout.pieces)
        places, positions, index, rows_from, row_base, has_failed = [
            pieces[place] for place in self.layout.places
        ]
        used = _index_words(
            sizes.num_rows, sizes.num_slots, self.spec.top_k, self.spec.num_local_experts
        )
        # Each part of the index, then the words of it that are not used.
        words = [
            each
            for length, most in zip(used, self.layout.index_words, strict=True)
            for each in (length, most - length)
        ]
        row_of_slot, slots_of_row, slot_weights, num_tokens, first_slot = index.split(words)[::2]
        return PlanBlockParts(
            sends=Sends(places=places, positions=positions),
            arrivals=Arrivals(rows_from=rows_from, row_base=row_base, has_failed=has_failed),
            index=SlotIndex(
                row_of_slot=row_of_slot,
                slots_of_row=slots_of_row.view(sizes.num_rows, self.spec.top_k),
                num_tokens_per_expert=num_tokens,
                first_slot=first_slot,
                host_num_tokens_per_expert=sizes.per_expert,
                expert_alignment=self.spec.expert_alignment,
                is_dense=sizes.is_dense,
            ),
            slot_weights=slot_weights.view(torch.float32),
        )

    def row_topk(self, sizes: IndexSizes) -> tuple[Tensor, Tensor] | None:
        """Return the experts and the weights of the rows, if the kernel was asked to write them."""
        topk = self.received.row_topk
        return None if topk is None else (topk[0][: sizes.num_rows], topk[1][: sizes.num_rows])
