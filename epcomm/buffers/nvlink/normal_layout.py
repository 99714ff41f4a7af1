"""Where the words and rows of normal mode over NVLink lie in each rank's block.

A block is words, then what came home, then N slots of what comes to the experts, used in turns. Of
a slot, what comes from source rank s lies at place s, or in rows s * M to s * M + n of W * M.

    give up          a word by which a rank is told to, as in every block
    noted, headed, got, ready [W]   int32: dispatches begun, headers sent, programs that have
                                    pushed, combines begun; ever growing
    called [2, W]    int32: fault of the combine call, by turns
    done [W, items]  int32: the combine whose sums lie there
    back [W * M, H], back_scalars [W * M, K]   sums and scalars, at the source
    header [W]       int32: fault and flags, T, rows for each rank [W], slots of each expert [E]
    record [W * M, 3, K]   expert of this rank or -1, position, weight
    data [W * M, H], scales [W * M, num_scales]    as they travel
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from epcomm.protocol import NORMAL_HEADER_WORDS
from epcomm.spec import BufferSpec
from epcomm.types import align_up

# Dispatches whose rows are kept.
NUM_SLOTS = 2
# Regions begin at lines of the L2 cache.
_LINE_BYTES = 128
# Rows, and the parts of a record, begin at the widest vector.
_VECTOR_BYTES = 16
_WORD_BYTES = 4


@dataclass(frozen=True)
class NormalLayout:
    """Bytes of rows and places of regions; equal on all ranks.

    max_tokens: M.   item_rows: sums of one source that are announced together.
    """

    spec: BufferSpec
    world_size: int
    max_tokens: int
    item_rows: int
    num_slots: int = NUM_SLOTS

    @property
    def num_rows(self) -> int:
        """W * M."""
        return self.world_size * self.max_tokens

    @property
    def num_items(self) -> int:
        """Of sums from one rank."""
        return -(-self.max_tokens // self.item_rows)

    @property
    def record_words(self) -> int:
        """Words of each of the three parts of a record: a power of two, at least one vector."""
        return max(4, 1 << (self.spec.top_k - 1).bit_length())

    @property
    def record_bytes(self) -> int:
        """Of a row."""
        return 3 * _WORD_BYTES * self.record_words

    @property
    def header_bytes(self) -> int:
        """From one header to the next."""
        num_experts = self.world_size * self.spec.num_local_experts
        words = NORMAL_HEADER_WORDS + self.world_size + num_experts
        return align_up(_WORD_BYTES * words, _VECTOR_BYTES)

    @property
    def data_bytes(self) -> int:
        """From one row to the next: gradients take the same way."""
        formats = (self.spec.dispatch_format, self.spec.backward_format)
        most = max(each.data_bytes(self.spec.hidden_size) for each in formats)
        return align_up(most, _VECTOR_BYTES)

    @property
    def scale_bytes(self) -> int:
        """From the scales of one row to those of the next."""
        return align_up(self.spec.dispatch_format.scale_bytes(self.spec.hidden_size), _VECTOR_BYTES)

    @property
    def back_bytes(self) -> int:
        """From one sum to the next."""
        formats = (self.spec.combine_format, self.spec.backward_format)
        most = max(each.data_bytes(self.spec.hidden_size) for each in formats)
        return align_up(most, _VECTOR_BYTES)

    @cached_property
    def shared_regions(self) -> Mapping[str, int]:
        """Bytes of what all slots share, in order."""
        words = _WORD_BYTES * self.world_size
        sizes = {
            "give_up": _WORD_BYTES,
            "noted": words,
            "headed": words,
            "got": words,
            "ready": words,
            "called": 2 * words,
            "done": words * self.num_items,
            "back": self.num_rows * self.back_bytes,
            "back_scalars": self.num_rows * _WORD_BYTES * self.record_words,
        }
        return {name: align_up(size, _LINE_BYTES) for name, size in sizes.items()}

    @cached_property
    def slot_regions(self) -> Mapping[str, int]:
        """Bytes of the regions of a slot, in order."""
        sizes = {
            "header": self.world_size * self.header_bytes,
            "record": self.num_rows * self.record_bytes,
            "data": self.num_rows * self.data_bytes,
            "scales": self.num_rows * self.scale_bytes,
        }
        return {name: align_up(size, _LINE_BYTES) for name, size in sizes.items()}

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Where each region begins, in the block or in its slot."""
        return {**_begins(self.shared_regions), **_begins(self.slot_regions)}

    @property
    def slots_at(self) -> int:
        """Where the first slot begins."""
        return sum(self.shared_regions.values())

    @property
    def slot_bytes(self) -> int:
        """From one slot to the next."""
        return sum(self.slot_regions.values())

    @property
    def num_bytes(self) -> int:
        """Of a block."""
        return self.slots_at + self.num_slots * self.slot_bytes


def _begins(sizes: Mapping[str, int]) -> dict[str, int]:
    begin, found = 0, {}
    for name, size in sizes.items():
        found[name] = begin
        begin += size
    return found
