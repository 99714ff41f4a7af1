"""Where signals and rows of normal mode over NVLink lie in the symmetric memory of a rank.

The memory of a rank is signals, then the sums that combine returned, then N receive buffers of
what comes to the experts, used in turn. In each of them the entry of source rank s is entry s,
and its rows are rows s * M to s * M + n of W * M.

    abort            int32 flag: some rank has timed out
    dispatch_begin, counts_ready, rows_ready, combine_begin [W]   int32 signals that only grow:
                     dispatches begun, headers sent, programs that have sent, combines begun
    combine_status [2, W]   int32: fault code of the combine call, alternating
    sums_ready [W, items]   int32: the number of the combine whose sums are there
    returned [W * M, H], returned_scalars [W * M, K]   sums and scalars, at the token's rank
    header [W]       int32: status, T, rows for each rank [W], pairs of each expert [E]
    metadata [W * M, 3, K]   expert of this rank or -1, position, weight
    data [W * M, H], scales [W * M, num_scales]    as they travel
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from epcomm.protocol import NORMAL_HEADER_WORDS
from epcomm.spec import BufferSpec
from epcomm.types import align_up

# Receive buffers: dispatches whose rows are kept.
NUM_BUFFERS = 2
# Regions begin at lines of the L2 cache.
_LINE_BYTES = 128
# Rows, and the parts of the metadata, begin at the widest vector.
_VECTOR_BYTES = 16
_WORD_BYTES = 4


@dataclass(frozen=True)
class NormalLayout:
    """Bytes of rows and places of regions; equal on all ranks.

    max_tokens: M.   item_rows: sums of one source that share a signal.
    """

    spec: BufferSpec
    world_size: int
    max_tokens: int
    item_rows: int
    num_buffers: int = NUM_BUFFERS

    @property
    def num_rows(self) -> int:
        """W * M."""
        return self.world_size * self.max_tokens

    @property
    def num_items(self) -> int:
        """Most items of sums that one rank sends to one rank."""
        return -(-self.max_tokens // self.item_rows)

    @property
    def metadata_words(self) -> int:
        """Words of 32 bits in each of the three parts of the metadata: a power of two, from 4."""
        return max(4, 1 << (self.spec.top_k - 1).bit_length())

    @property
    def metadata_bytes(self) -> int:
        """Bytes of the metadata of one row."""
        return 3 * _WORD_BYTES * self.metadata_words

    @property
    def header_bytes(self) -> int:
        """Stride in bytes from one header to the next."""
        num_experts = self.world_size * self.spec.num_local_experts
        words = NORMAL_HEADER_WORDS + self.world_size + num_experts
        return align_up(_WORD_BYTES * words, _VECTOR_BYTES)

    @property
    def data_bytes(self) -> int:
        """Stride in bytes from one row to the next; gradients use the same memory."""
        formats = (self.spec.dispatch_format, self.spec.backward_format)
        most = max(each.data_bytes(self.spec.hidden_size) for each in formats)
        return align_up(most, _VECTOR_BYTES)

    @property
    def scale_bytes(self) -> int:
        """Stride in bytes from the scales of one row to the scales of the next."""
        return align_up(self.spec.dispatch_format.scale_bytes(self.spec.hidden_size), _VECTOR_BYTES)

    @property
    def return_bytes(self) -> int:
        """Stride in bytes from one returned sum to the next."""
        formats = (self.spec.combine_format, self.spec.backward_format)
        most = max(each.data_bytes(self.spec.hidden_size) for each in formats)
        return align_up(most, _VECTOR_BYTES)

    @cached_property
    def shared_regions(self) -> Mapping[str, int]:
        """Bytes of the regions that all receive buffers share, in order."""
        words = _WORD_BYTES * self.world_size
        sizes = {
            "abort": _WORD_BYTES,
            "dispatch_begin": words,
            "counts_ready": words,
            "rows_ready": words,
            "combine_begin": words,
            "combine_status": 2 * words,
            "sums_ready": words * self.num_items,
            "returned": self.num_rows * self.return_bytes,
            "returned_scalars": self.num_rows * _WORD_BYTES * self.metadata_words,
        }
        return {name: align_up(size, _LINE_BYTES) for name, size in sizes.items()}

    @cached_property
    def buffer_regions(self) -> Mapping[str, int]:
        """Bytes of the regions of a receive buffer, in order."""
        sizes = {
            "header": self.world_size * self.header_bytes,
            "metadata": self.num_rows * self.metadata_bytes,
            "data": self.num_rows * self.data_bytes,
            "scales": self.num_rows * self.scale_bytes,
        }
        return {name: align_up(size, _LINE_BYTES) for name, size in sizes.items()}

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Offset in bytes of each region, in the block or in its receive buffer."""
        return {**_begins(self.shared_regions), **_begins(self.buffer_regions)}

    @property
    def buffers_at(self) -> int:
        """Offset in bytes of the first receive buffer."""
        return sum(self.shared_regions.values())

    @property
    def buffer_bytes(self) -> int:
        """Stride in bytes from one receive buffer to the next."""
        return sum(self.buffer_regions.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the symmetric memory of one rank."""
        return self.buffers_at + self.num_buffers * self.buffer_bytes


def _begins(sizes: Mapping[str, int]) -> dict[str, int]:
    begin, found = 0, {}
    for name, size in sizes.items():
        found[name] = begin
        begin += size
    return found
