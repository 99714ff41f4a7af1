"""The constants of kernels of low latency, each group one argument of a kernel.

Triton treats an argument as a constant if its annotation contains the word "constexpr", which is in
the name of this module. The repr of these records is part of the key of a compiled kernel.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from functools import cache
from typing import TypeVar

import torch
import triton.language as tl

from epcomm.kernels.launch import IS_INTERPRETED, next_power_of_two
from epcomm.kernels.nvlink.common import exchange, layout
from epcomm.kernels.nvlink.common.layout import LowLatencyLayout
from epcomm.kernels.quantize.fp8 import has_e4m3

RecordT = TypeVar("RecordT")

# Numbers of layout.py and exchange.py.
LINE_BYTES = tl.constexpr(layout.LINE_BYTES)
LINE_WORDS = tl.constexpr(layout.LINE_WORDS)
PART_LINES = tl.constexpr(layout.PART_LINES)
EAGER_EPOCH = tl.constexpr(exchange.EAGER_EPOCH)
HELD_BATCH = tl.constexpr(exchange.HELD_BATCH)
COUNTED_EPOCH = tl.constexpr(exchange.COUNTED_EPOCH)
ROW_ARRIVALS = tl.constexpr(exchange.ROW_ARRIVALS)
SUM_ARRIVALS = tl.constexpr(exchange.SUM_ARRIVALS)
SOURCES_AT = tl.constexpr(exchange.SOURCES_AT)

# Attributes of a LowLatencyLayout whose constants have other names.
_NAMES = {
    **{"W": "world_size", "M": "max_tokens", "K": "top_k", "K_LANES": "metadata_words"},
    **{"L": "num_local_experts", "L_LANES": "local_lanes", "PARTS": "parts_of_token"},
    **{"SCALE_LINES": "scale_lines_at"},
}


def constants(record: type[RecordT], **values: Hashable) -> RecordT:
    """Return a record of this module with the values as constants of kernels.

    An interpreter computes with the values themselves.
    """
    wrap = (lambda value: value) if IS_INTERPRETED else tl.constexpr
    return record(**{name: wrap(value) for name, value in values.items()})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The numbers of a LowLatencyLayout, its offsets in bytes, and its lines counted in lines.

    LANES of something are its number rounded up to a power of two.   PARTS: parts_of_token.
    HAS_E4M3: the hardware converts codes of quantised sums.
    """

    W: tl.constexpr
    W_LANES: tl.constexpr
    M: tl.constexpr
    K: tl.constexpr
    K_LANES: tl.constexpr
    L: tl.constexpr
    L_LANES: tl.constexpr
    RETURNS_SLOTS: tl.constexpr
    GROUPS: tl.constexpr
    PARTS: tl.constexpr
    PART_LANES: tl.constexpr
    CHUNK_TOKENS: tl.constexpr
    NUM_CHUNKS: tl.constexpr
    LINE_TOKENS: tl.constexpr
    ROW_LINES: tl.constexpr
    SCALE_LINES: tl.constexpr
    ROW_PIECES: tl.constexpr
    SUM_LINES: tl.constexpr
    SUM_PARTS: tl.constexpr
    SUM_BLOCK: tl.constexpr
    SUM_EXPONENTS: tl.constexpr
    SUM_ROW_SCALE: tl.constexpr
    SUM_COLUMNS: tl.constexpr
    SCALED_WORDS: tl.constexpr
    SUM_SCALE_LINES: tl.constexpr
    RETURN_WORDS: tl.constexpr
    HAS_E4M3: tl.constexpr
    DATA_WORDS: tl.constexpr
    SCALE_WORDS: tl.constexpr
    DATA_PLANE: tl.constexpr
    SCALE_PLANE: tl.constexpr
    RETURN_PLANE: tl.constexpr
    DATA_BYTES: tl.constexpr
    SCALE_BYTES: tl.constexpr
    RETURN_BYTES: tl.constexpr
    ARRIVED_ROWS_AT: tl.constexpr
    ARRIVED_SUMS_AT: tl.constexpr
    HEADER_LINES_AT: tl.constexpr
    COUNT_LINES_AT: tl.constexpr
    COMBINED_LINES_AT: tl.constexpr
    METADATA_LINES_AT: tl.constexpr
    ROW_LINES_AT: tl.constexpr
    SUM_LINES_AT: tl.constexpr
    DATA_AT: tl.constexpr
    SCALES_AT: tl.constexpr
    RETURNED_AT: tl.constexpr

    @classmethod
    @cache
    def of(cls, layout: LowLatencyLayout, device: torch.device) -> Layout:
        """Return the constants of a layout."""
        found = {f"{name.upper()}_AT": layout.offsets[name] for name in layout.buffer_sizes()}
        found["W_LANES"] = next_power_of_two(layout.world_size)
        found["HAS_E4M3"] = layout.sum_block > 0 and has_e4m3(device)
        found["PART_LANES"] = next_power_of_two(layout.parts_of_token)
        names = [each.name for each in fields(cls) if each.name not in found]
        found |= {name: getattr(layout, _NAMES.get(name, name.lower())) for name in names}
        return constants(cls, **found)


@dataclass(frozen=True, kw_only=True)
class SentRows:
    """The rows that a sender of dispatch reads, and their form on the wire.

    X_STRIDE: elements from one row to the next.   HIDDEN: elements of a row, of COLUMNS lanes.
    KIND: PLAIN, FP8, FP8_POWER_OF_TWO or INT8.   PROFILE: of INT8 rows, a value of Int8Profile.
    BLOCK: elements that share a scale, in BLOCK_LANES lanes.   BLOCKS: those of a row, or of a
        plane of a part of a row that is sent in lines.
    SCALES: of a row that is quantised already, of SCALE_LANES lanes.
    NEEDS_DISTINCT: a token that names an expert twice is a fault.
    """

    X_STRIDE: tl.constexpr
    HIDDEN: tl.constexpr
    COLUMNS: tl.constexpr
    KIND: tl.constexpr
    PROFILE: tl.constexpr
    HAS_E4M3: tl.constexpr
    BLOCK: tl.constexpr
    BLOCK_LANES: tl.constexpr
    BLOCKS: tl.constexpr
    SCALES: tl.constexpr
    SCALE_LANES: tl.constexpr
    NEEDS_DISTINCT: tl.constexpr


@dataclass(frozen=True, kw_only=True)
class Index:
    """The index that the receiver of dispatch writes, and the slabs to which it copies rows.

    C: slots of the index.   ALIGNMENT: of the first slot of each expert.   ROWS: that a program
        indexes.   INDEXERS: programs that do.   TOKENS: that another one unpacks at once.
    CAPACITY: slots of each expert in slabs, 0 without slabs; their rows have WORD_LANES lanes, and
        their scales SCALE_LANES.   *_STRIDE: of the scales in words, see scales_at().
    """

    C: tl.constexpr
    ALIGNMENT: tl.constexpr
    ROWS: tl.constexpr
    INDEXERS: tl.constexpr
    TOKENS: tl.constexpr
    CAPACITY: tl.constexpr
    WORD_LANES: tl.constexpr
    SCALE_LANES: tl.constexpr
    EXPERT_STRIDE: tl.constexpr
    SLOT_STRIDE: tl.constexpr
    WORD_STRIDE: tl.constexpr


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results that a sender of combine reads: those of slots, or sums of rows with PER_ROW.

    ROWS_STRIDE: elements from one result to the next.   HIDDEN: elements of a result.
    COLUMNS: elements that a program sends at once in bulk, one of PIECES pieces of a row.
    SLOTS: that it adds at once.   WORKERS: programs that send a chunk.
    LINE_PARTS: parts of a row that it sends at once in lines, one of LINE_PIECES pieces.
    """

    ROWS_STRIDE: tl.constexpr
    HIDDEN: tl.constexpr
    COLUMNS: tl.constexpr
    PIECES: tl.constexpr
    SLOTS: tl.constexpr
    WORKERS: tl.constexpr
    LINE_PARTS: tl.constexpr
    LINE_PIECES: tl.constexpr
    PER_ROW: tl.constexpr
