"""Where the words and rows of the NVLink buffer lie in each rank's block.

A block is a word by which a rank is told to give up, then N slots, used in turns. Of a slot, what
comes from source rank s lies at place s, or in rows s * M to s * M + T of W * M.

    words  arrived_dispatch [W], arrived_combine [W]   int32, programs that have sent, ever growing
    header [W, 4]                                      int32: epoch, T, fault and flags, unused
    called [W]                                         int32: fault of the combine call
    counts [W, L]                                      int32: slots for each expert
    record [W * M, 3, K]                               expert of this rank or -1, position, weight
    data   [W * M, H], scales [W * M, num_scales]      as they travel
    back   [W * M, H]                                  sums, at the source: from rank d at d * M + t
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from epcomm.spec import BufferSpec
from epcomm.types import align_up

# Batches that may be in flight.
NUM_SLOTS = 2
# Bytes of a header: four words, one store.
HEADER_BYTES = 16
# Regions begin at lines of the L2 cache.
_LINE_BYTES = 128
# Rows, and the parts of a record, begin at the widest vector.
_VECTOR_BYTES = 16
_WORD_BYTES = 4


@dataclass(frozen=True)
class BlockLayout:
    """Offsets from the beginning of a slot, in bytes, and lengths of rows; equal on all ranks."""

    spec: BufferSpec
    world_size: int
    num_slots: int = NUM_SLOTS

    @property
    def max_tokens(self) -> int:
        """M."""
        assert self.spec.max_tokens_per_rank is not None, "plan() has checked the limit"
        return self.spec.max_tokens_per_rank

    @property
    def num_rows(self) -> int:
        """W * M."""
        return self.world_size * self.max_tokens

    @property
    def record_words(self) -> int:
        """Words of each of the three parts of a record: a power of two, at least one vector."""
        return max(4, 1 << (self.spec.top_k - 1).bit_length())

    @property
    def data_bytes(self) -> int:
        """From one row to the next, on the way to the experts."""
        return align_up(self.spec.dispatch_format.data_bytes(self.spec.hidden_size), _VECTOR_BYTES)

    @property
    def scale_bytes(self) -> int:
        """From the scales of one row to those of the next."""
        return align_up(self.spec.dispatch_format.scale_bytes(self.spec.hidden_size), _VECTOR_BYTES)

    @property
    def back_bytes(self) -> int:
        """From one sum to the next."""
        return align_up(self.spec.combine_format.data_bytes(self.spec.hidden_size), _VECTOR_BYTES)

    @property
    def record_bytes(self) -> int:
        """Of a token."""
        return 3 * _WORD_BYTES * self.record_words

    @cached_property
    def regions(self) -> dict[str, int]:
        """Bytes of the regions of a slot, in order."""
        words, num_local = _WORD_BYTES * self.world_size, self.spec.num_local_experts
        sizes = {
            "arrived_dispatch": words,
            "arrived_combine": words,
            "header": HEADER_BYTES * self.world_size,
            "called": words,
            "counts": words * num_local,
            "record": self.num_rows * self.record_bytes,
            "data": self.num_rows * self.data_bytes,
            "scales": self.num_rows * self.scale_bytes,
            "back": self.num_rows * self.back_bytes,
        }
        return {name: align_up(size, _LINE_BYTES) for name, size in sizes.items()}

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each region of a slot begins."""
        begin, found = 0, {}
        for name, size in self.regions.items():
            found[name] = begin
            begin += size
        return found

    @property
    def slot_bytes(self) -> int:
        """Of a slot."""
        return sum(self.regions.values())

    def slot_offset(self, slot: int) -> int:
        """Where a slot begins; the word to give up by lies before the first."""
        return _LINE_BYTES + slot * self.slot_bytes

    @property
    def num_bytes(self) -> int:
        """Of a block."""
        return self.slot_offset(self.num_slots)
