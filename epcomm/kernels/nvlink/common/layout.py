"""The offsets of signals and rows of NVLink buffers in the symmetric memory of a rank, its block.

Layouts are equal on all ranks. A block is what all dispatches share, then N receive buffers of what
comes to the experts, used in turn. In each of them the entry of source rank s is entry s, and its
rows are rows s * M to s * M + n of W * M.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from epcomm.platforms.nvlink import is_triton_interpreted
from epcomm.protocol import HEADER_WORDS
from epcomm.types import SUM_DTYPES, WireFormat, align_up

# Regions begin at lines of the L2 cache.
_LINE_BYTES = 128
# Rows, and the parts of the metadata, begin at the widest vector.
VECTOR_BYTES = 16
_WORD_BYTES = 4
# The words of a line, beside its flag.
LINE_WORDS = 3
# Three words and their flag, one access of 128 bits. Triton's interpreter has none: there, each
# word has a flag of its own.
LINE_BYTES = 24 if is_triton_interpreted() else 16
# A word and its flag.
SHORT_LINE_BYTES = 8
# The most lines that hold a part of a row: one for each thread of a program that receives them.
PART_LINES = 128
# The formats of quantised sums.
SUM_FORMATS = tuple(WireFormat(dtype=dtype) for dtype in sorted(SUM_DTYPES))
# Most ranks of low latency: kernels keep sets of them as bits of an int32, and one bit of an abort.
MAX_LINE_RANKS = 30
# Most rows that return to the source of a token: kernels keep sets of them as bits of an int32.
MAX_RETURNED_ROWS = 32
# Chunks of the tokens of a rank, whose sums in bulk are signalled apart, and the fewest tokens of
# one.
MOST_CHUNKS, _LEAST_CHUNK_TOKENS = 4, 32
# Planes begin at the widest vector.
_PLANE_ALIGNMENT = VECTOR_BYTES // _WORD_BYTES


@dataclass(frozen=True, kw_only=True)
class MemoryLayout(ABC):
    """The regions of a block, and the byte at which each begins.

    Strides of rows are multiples of VECTOR_BYTES.

    world_size, max_tokens, top_k, num_local_experts: W, M, K and L.   num_buffers: N.
    data_bytes: from one row to the next, in the dispatch direction.
    scale_bytes: from the scales of one row to those of the next.
    return_bytes: from one sum to the next, in combine.
    groups: the experts of a rank are so many groups of consecutive experts. A row returns for each
        group in which a token has entries.
    """

    world_size: int
    max_tokens: int
    top_k: int
    num_local_experts: int
    num_buffers: int
    data_bytes: int
    scale_bytes: int
    return_bytes: int
    groups: int

    @abstractmethod
    def shared_sizes(self) -> dict[str, int]:
        """Return the bytes of regions that buffers share, in order, the abort flag first."""

    @abstractmethod
    def buffer_sizes(self) -> dict[str, int]:
        """Return the bytes of each region of a receive buffer, in order."""

    @property
    def num_rows(self) -> int:
        """The rows of a receive buffer, W * M."""
        return self.world_size * self.max_tokens

    @cached_property
    def metadata_words(self) -> int:
        """The words of 32 bits in each part of the metadata: a power of two, from 4."""
        return max(4, _lanes(self.top_k))

    @property
    def metadata_bytes(self) -> int:
        """The bytes of the metadata of a row: experts, positions and weights."""
        return 3 * _WORD_BYTES * self.metadata_words

    @cached_property
    def local_lanes(self) -> int:
        """The local experts L, rounded up to a power of two."""
        return _lanes(self.num_local_experts)

    @cached_property
    def regions(self) -> Mapping[str, int]:
        """The bytes of each region, those of a receive buffer last, in order."""
        sizes = self.shared_sizes() | self.buffer_sizes()
        return {name: align_up(size, _LINE_BYTES) for name, size in sizes.items()}

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """The offset in bytes of each region, in the block or in its receive buffer."""
        found: dict[str, int] = {}
        for names in (self.shared_sizes(), self.buffer_sizes()):
            begin = 0
            for name in names:
                found[name] = begin
                begin += self.regions[name]
        return found

    @cached_property
    def buffers_at(self) -> int:
        """The offset in bytes of the first receive buffer."""
        return sum(self.regions[name] for name in self.shared_sizes())

    @cached_property
    def buffer_bytes(self) -> int:
        """The bytes from one receive buffer to the next."""
        return sum(self.regions[name] for name in self.buffer_sizes())

    def buffer_offset(self, buffer_index: int) -> int:
        """Return the offset in bytes of a receive buffer."""
        return self.buffers_at + buffer_index * self.buffer_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of a block."""
        return self.buffer_offset(self.num_buffers)


@dataclass(frozen=True, kw_only=True)
class LowLatencyLayout(MemoryLayout):
    """The layout of a block of low latency; a region of lines holds only lines, see lines.py.

    Group q of rank d is number d * groups + q. Or each slot returns.

    sum_block: the columns of a quantised sum that share a scale, 0 without combine_format.
    sum_exponents: these scales are powers of two.   sum_row_scale: the row has one too.
    line_tokens: the most tokens that a rank sends in lines; it receives their sums in lines too. 0:
        no rank sends lines.   data_words, scale_words, return_words: the words of a row, of its
        scales and of a sum.   data_plane, scale_plane: the words of their planes, see lines.py.
    returns_slots: each slot returns to its source, so that weights are not sent, and K rows take
        the memory of the sums of W * groups groups.

    abort              int32 flag: some rank has timed out
    arrived_rows [W]   int32 signals: the last epoch in which a rank has sent its rows in bulk
    arrived_sums [W, chunks]    likewise, of each chunk of chunk_tokens tokens
    header_lines [W, 2]                         2 * T + 1 for rows in lines, 2 * T else; status
    count_lines [W, L]                          (token, expert) pairs for each expert
    combined_lines [W]                          fault code of the combine call
    metadata_lines [W, M, K]                    expert of this rank or -1, position, weight
    row_lines [W, line_tokens, row_lines]       row and scales of a token
    sum_lines [W * groups, line_tokens, sum_lines]    sums of group g for token t; of slots, [t, k]
    data [W * M, H], scales [W * M, num_scales] as they are sent in bulk, or unpacked
    returned [W * groups * M, H]                sums of group g for token t, at g * M + t; of slots,
                                                [M * K, H], at t * K + k
    """

    line_tokens: int
    data_words: int
    scale_words: int
    return_words: int
    data_plane: int
    scale_plane: int
    returns_slots: bool = False
    sum_block: int = 0
    sum_exponents: bool = False
    sum_row_scale: bool = False

    @property
    def metadata_bytes(self) -> int:
        """The bytes of the metadata of a row: a line for each of its experts."""
        return LINE_BYTES * self.metadata_words

    @property
    def parts_of_token(self) -> int:
        """The most rows that return to the source of a token: one for each group, or K slots."""
        return self.top_k if self.returns_slots else self.world_size * self.groups

    @cached_property
    def chunk_tokens(self) -> int:
        """The tokens of each chunk, of which the last one may have fewer."""
        return max(_LEAST_CHUNK_TOKENS, -(-self.max_tokens // MOST_CHUNKS))

    @property
    def num_chunks(self) -> int:
        """The chunks of M tokens."""
        return -(-self.max_tokens // self.chunk_tokens)

    @property
    def return_plane(self) -> int:
        """The words of a plane of a sum; of a quantised one, whole blocks with words of scales."""
        return PART_LINES if self.sum_block else plane_words(self.return_words)

    @cached_property
    def sum_scale_lines(self) -> int:
        """The lines of a sum before those of its scales."""
        return _num_lines(self.return_words, self.return_plane)

    @cached_property
    def scale_lines_at(self) -> int:
        """The lines of a row before those of its scales."""
        return _num_lines(self.data_words, self.data_plane)

    @cached_property
    def row_lines(self) -> int:
        """The lines from one token to the next."""
        return self.scale_lines_at + _num_lines(self.scale_words, self.scale_plane)

    @property
    def row_pieces(self) -> int:
        """The programs that share the lines of a row and of its scales, a line each thread."""
        return -(-self.row_lines // PART_LINES)

    @property
    def sum_columns(self) -> int:
        """The columns of a word of codes of a quantised sum."""
        return 8 if self.sum_row_scale else 4

    @property
    def scaled_words(self) -> int:
        """The words of codes that have one word of scales, in each of SUM_FORMATS."""
        return 8 if self.sum_row_scale else 32

    @cached_property
    def sum_lines(self) -> int:
        """The lines from one sum to the next, the last one with the scale of the row."""
        scale_words = -(-self.return_words // self.scaled_words) if self.sum_block else 0
        scale_lines = _num_lines(scale_words, PART_LINES // self.scaled_words)
        return self.sum_scale_lines + scale_lines + self.sum_row_scale

    @property
    def sum_parts(self) -> int:
        """The parts of a sum in lines."""
        return -(-self.sum_scale_lines // self.return_plane)

    @property
    def control_bytes(self) -> int:
        """The bytes that a dispatch sends to each rank besides tokens: two words, and counts."""
        return _WORD_BYTES * (2 + self.num_local_experts)

    def shared_sizes(self) -> dict[str, int]:
        return {"abort": _WORD_BYTES}

    def buffer_sizes(self) -> dict[str, int]:
        words = _WORD_BYTES * self.world_size
        line_rows = self.world_size * self.line_tokens
        return {
            "arrived_rows": words,
            "arrived_sums": words * self.num_chunks,
            "header_lines": self.world_size * 2 * SHORT_LINE_BYTES,
            "count_lines": self.world_size * self.num_local_experts * SHORT_LINE_BYTES,
            "combined_lines": self.world_size * SHORT_LINE_BYTES,
            "metadata_lines": self.num_rows * self.metadata_bytes,
            "row_lines": line_rows * self.row_lines * LINE_BYTES,
            "sum_lines": self.line_tokens * self.parts_of_token * self.sum_lines * LINE_BYTES,
            "data": self.num_rows * self.data_bytes,
            "scales": self.num_rows * self.scale_bytes,
            "returned": self.max_tokens * self.parts_of_token * self.return_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class NormalLayout(MemoryLayout):
    """The block of normal mode.

    item_rows: rows of one source whose sums share a signal.

    abort            int32 flag: some rank has timed out
    dispatch_begin, counts_ready, rows_ready, combine_begin [W]   int32 signals that only grow:
                     dispatches begun, blocks that have sent metadata and headers, blocks that have
                     sent rows, combines begun
    combine_status [2, W]   int32: fault code of the combine call, alternating
    sums_ready [W, items]   int32: the number of the combine whose sums are there
    returned [W * M * groups, H]   sums, at the token's rank; of group q of row r, at r * groups + q
    returned_scalars [W * M, K]    likewise
    header [W]       int32: status, T, rows for each rank [W], pairs of each expert [E]
    metadata [W * M, 3, K]   expert of this rank or -1, position, weight
    data [W * M, H], scales [W * M, num_scales]    as they are sent
    """

    item_rows: int = 16

    @property
    def num_items(self) -> int:
        """The most items of sums that one rank sends to one rank."""
        return -(-self.max_tokens // self.item_rows)

    @property
    def header_bytes(self) -> int:
        """The bytes from one header to the next."""
        words = HEADER_WORDS + self.world_size * (1 + self.num_local_experts)
        return align_up(_WORD_BYTES * words, VECTOR_BYTES)

    def shared_sizes(self) -> dict[str, int]:
        words = _WORD_BYTES * self.world_size
        return {
            "abort": _WORD_BYTES,
            "dispatch_begin": words,
            "counts_ready": words,
            "rows_ready": words,
            "combine_begin": words,
            "combine_status": 2 * words,
            "sums_ready": words * self.num_items,
            "returned": self.num_rows * self.groups * self.return_bytes,
            "returned_scalars": self.num_rows * _WORD_BYTES * self.metadata_words,
        }

    def buffer_sizes(self) -> dict[str, int]:
        return {
            "header": self.world_size * self.header_bytes,
            "metadata": self.num_rows * self.metadata_bytes,
            "data": self.num_rows * self.data_bytes,
            "scales": self.num_rows * self.scale_bytes,
        }


def plane_words(num_words: int) -> int:
    """Return the words of a plane of a row, so that its parts have about as many lines each.

    3,584 words fill ten parts of three planes of 120 words; with planes of 128 words, the last part
    would be a third full and have as many lines as the others.
    """
    num_parts = -(-num_words // (LINE_WORDS * PART_LINES))
    return align_up(-(-num_words // (LINE_WORDS * num_parts)), _PLANE_ALIGNMENT)


def _num_lines(num_words: int, plane: int) -> int:
    """Return the lines of words in parts of three planes; a line has a word of each plane."""
    num_parts, rest = divmod(num_words, LINE_WORDS * plane)
    return num_parts * plane + min(plane, rest)


def _lanes(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
