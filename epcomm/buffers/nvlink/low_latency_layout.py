"""Where signals and rows of the low-latency NVLink buffer lie in the symmetric memory of a rank.

The memory of a rank is its abort flag, then N receive buffers, used in turn. In each of them the
entry of source rank s is entry s, and its rows are rows s * M to s * M + T of W * M.

    arrived_dispatch [W], arrived_combine [W]      int32 signals: programs that have sent
    header [W, 4]                                  int32: epoch, T, status, unused
    combine_status [W]                             int32: fault code of the combine call
    counts [W, L]                                  int32: (token, expert) pairs for each expert
    metadata [W * M, 3, K]                         expert of this rank or -1, position, weight
    data [W * M, H], scales [W * M, num_scales]    as they travel
    returned [W * M, H]                            sums of rank d for token t, at d * M + t
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from epcomm.spec import BufferSpec
from epcomm.types import align_up

# Receive buffers: batches that may be in flight.
NUM_BUFFERS = 2
# Bytes of a header: four words, one store.
HEADER_BYTES = 16
# Regions begin at lines of the L2 cache.
_LINE_BYTES = 128
# Rows, and the parts of the metadata, begin at the widest vector.
_VECTOR_BYTES = 16
_WORD_BYTES = 4


@dataclass(frozen=True)
class BlockLayout:
    """Offsets from the beginning of a slot, in bytes, and lengths of rows; equal on all ranks."""

    spec: BufferSpec
    world_size: int
    num_buffers: int = NUM_BUFFERS

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
    def metadata_words(self) -> int:
        """Words of 32 bits in each of the three parts of the metadata: a power of two, from 4."""
        return max(4, 1 << (self.spec.top_k - 1).bit_length())

    @property
    def data_bytes(self) -> int:
        """Stride in bytes from one row to the next, in the dispatch direction."""
        return align_up(self.spec.dispatch_format.data_bytes(self.spec.hidden_size), _VECTOR_BYTES)

    @property
    def scale_bytes(self) -> int:
        """Stride in bytes from the scales of one row to the scales of the next."""
        return align_up(self.spec.dispatch_format.scale_bytes(self.spec.hidden_size), _VECTOR_BYTES)

    @property
    def return_bytes(self) -> int:
        """Stride in bytes from one returned sum to the next."""
        return align_up(self.spec.combine_format.data_bytes(self.spec.hidden_size), _VECTOR_BYTES)

    @property
    def metadata_bytes(self) -> int:
        """Bytes of the metadata of one token."""
        return 3 * _WORD_BYTES * self.metadata_words

    @cached_property
    def regions(self) -> dict[str, int]:
        """Bytes of the regions of a receive buffer, in order."""
        words, num_local = _WORD_BYTES * self.world_size, self.spec.num_local_experts
        sizes = {
            "arrived_dispatch": words,
            "arrived_combine": words,
            "header": HEADER_BYTES * self.world_size,
            "combine_status": words,
            "counts": words * num_local,
            "metadata": self.num_rows * self.metadata_bytes,
            "data": self.num_rows * self.data_bytes,
            "scales": self.num_rows * self.scale_bytes,
            "returned": self.num_rows * self.return_bytes,
        }
        return {name: align_up(size, _LINE_BYTES) for name, size in sizes.items()}

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Offset in bytes of each region, from the beginning of a receive buffer."""
        begin, found = 0, {}
        for name, size in self.regions.items():
            found[name] = begin
            begin += size
        return found

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one receive buffer."""
        return sum(self.regions.values())

    def buffer_offset(self, buffer_index: int) -> int:
        """Offset in bytes of a receive buffer; the abort flag lies before the first."""
        return _LINE_BYTES + buffer_index * self.buffer_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the symmetric memory of one rank."""
        return self.buffer_offset(self.num_buffers)
