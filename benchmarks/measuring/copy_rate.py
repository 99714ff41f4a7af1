"""Compare dispatch and combine with copying: the bytes they move, and the rate of copies.

Two ways to count, each used for both sides. Copied: every row that leaves for an expert's rank and
every sum that comes back counts once, those of a rank to itself too, and the rate is bytes copied a
second. Touched: a copy reads and writes, so twice the rate; dispatch reads each token once and
writes each row, combine reads the result of each (token, expert) pair, writes and reads each sum,
and writes y. Reading a token again for its next row is free, and so are counts, indices and flags.

Worked example, 1 token of 4096 B with K = 8 whose experts are on 3 ranks; a row takes ids and
weights along, 8 B a pair:

    copied     3 * (4096 + 64) rows + 3 * 4096 sums
    touched    4096 token, 3 * 4160 rows; 8 * 4096 results, 2 * 3 * 4096 sums, 4096 y
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.bench.timing import clock_for
from epcomm.bench.turns import wait_for_all
from epcomm.testing.data import RankBatch

# 128 MiB to read and as much to write on each rank: four times a last-level cache of 32 MiB each.
BUFFER_BYTES = 2**27
# An id and a weight of each (token, expert) pair, as they travel.
_PAIR_BYTES = 8
# Each copied byte is read from memory and written to memory.
_TOUCHED_OF_COPIED = 2


@dataclass(frozen=True, kw_only=True)
class MovedBytes:
    """The bytes that all ranks move in one dispatch and combine; see the module."""

    copied: int
    touched: int


def moved_bytes(batches: Sequence[RankBatch], num_local: int) -> MovedBytes:
    """Count what the batches of all ranks need, from their routing alone.

    Args:
        batches: of all ranks; every entry of topk_ids is an expert.
        num_local: L.
    """
    tokens = pairs = rows = 0
    for batch in batches:
        ranks = (batch.topk_ids // num_local).tolist()
        tokens += len(ranks)
        pairs += batch.topk_ids.numel()
        rows += sum(len(set(of_token)) for of_token in ranks)
    hidden_bytes = batches[0].x.shape[1] * batches[0].x.element_size()
    row_bytes = hidden_bytes + _PAIR_BYTES * batches[0].topk_ids.shape[1]
    return MovedBytes(
        copied=rows * (row_bytes + hidden_bytes),
        touched=rows * row_bytes + (2 * tokens + pairs + 2 * rows) * hidden_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class CopyFinding:
    """Dispatch without grouping and combine beside copies, in gigabytes (1e9) a second.

    moved: of all ranks, in one call.
    ms: of that call, by median; dispatch without grouping and combine of the slowest rank.
    copy_gb_per_s: copied by all ranks at once, by median of rounds as long as their slowest rank.
    """

    moved: MovedBytes
    ms: float
    copy_gb_per_s: float

    @property
    def copied_over_copy_rate(self) -> float:
        """Rows and sums counted once, as of a copy what is copied."""
        return self._gb_per_s(self.moved.copied) / self.copy_gb_per_s

    @property
    def touched_over_copy_rate(self) -> float:
        """Bytes read and written, as of a copy."""
        return self._gb_per_s(self.moved.touched) / (_TOUCHED_OF_COPIED * self.copy_gb_per_s)

    def as_record(self) -> dict[str, int | float]:
        """Return a flat record, for JSON."""
        return {
            "copied_bytes": self.moved.copied,
            "touched_bytes": self.moved.touched,
            "ms": round(self.ms, 3),
            "copy_gb_per_s": round(self.copy_gb_per_s, 3),
            "copied_over_copy_rate": round(self.copied_over_copy_rate, 3),
            "touched_over_copy_rate": round(self.touched_over_copy_rate, 3),
        }

    def _gb_per_s(self, num_bytes: int) -> float:
        return num_bytes / self.ms / 1e6


class Copies:
    """Rows that every rank copies at the same time, once a round."""

    def __init__(self, rows: Tensor) -> None:
        """Allocate and touch both buffers, of rows like `rows` [T, H]."""
        num_rows = -(-BUFFER_BYTES // (rows.shape[1] * rows.element_size()))
        self._source = rows.new_ones(num_rows, rows.shape[1])
        self._target = torch.empty_like(self._source)
        self._clock = clock_for(rows.device)
        self._copy()
        self.ms: list[float] = []

    @property
    def num_bytes(self) -> int:
        """Return the bytes that a rank copies in a round."""
        return self._source.nbytes

    def run(self) -> None:
        """Run one round. Collective: yes."""
        wait_for_all(self._source.device)
        self.ms.append(self._copy())

    def gb_per_s(self, ms_by_rank: Sequence[Sequence[float]]) -> float:
        """Return the rate of all ranks together; ms_by_rank is [W][N], the `ms` of each."""
        slowest = [max(ranks) for ranks in zip(*ms_by_rank, strict=True)]
        median = torch.tensor(slowest, dtype=torch.float64).quantile(0.5)
        return len(ms_by_rank) * self.num_bytes / float(median) / 1e6

    def _copy(self) -> float:
        self._clock.mark()
        self._target.copy_(self._source)
        self._clock.mark()
        return self._clock.take()[0]
