"""Bytes that a rank sends to other ranks, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BufferTraffic:
    """The bytes sent to other ranks since the buffer was prepared; local copies do not count.

    dispatch_bytes: towards the experts, forward or backward.
    combine_bytes: of combine, forward or backward.
    control_bytes: counts, faults and flags.
    """

    dispatch_bytes: int = 0
    combine_bytes: int = 0
    control_bytes: int = 0

    def __add__(self, other: BufferTraffic) -> BufferTraffic:
        """Return the sums by kind."""
        return BufferTraffic(
            dispatch_bytes=self.dispatch_bytes + other.dispatch_bytes,
            combine_bytes=self.combine_bytes + other.combine_bytes,
            control_bytes=self.control_bytes + other.control_bytes,
        )


class TrafficMeter:
    """Adds up BufferTraffic for one rank."""

    def __init__(self, rank: int) -> None:
        """Count for `rank`."""
        self._rank = rank
        self._bytes = {"dispatch_bytes": 0, "combine_bytes": 0, "control_bytes": 0}

    def dispatch(self, rows_to_rank: Sequence[int], row_bytes: int) -> None:
        """Count rows on their way to the experts."""
        self._add("dispatch_bytes", rows_to_rank, row_bytes)

    def combine(self, rows_to_rank: Sequence[int], row_bytes: int) -> None:
        """Count the rows of a combine."""
        self._add("combine_bytes", rows_to_rank, row_bytes)

    def control(self, rows_to_rank: Sequence[int], row_bytes: int) -> None:
        """Count headers."""
        self._add("control_bytes", rows_to_rank, row_bytes)

    def snapshot(self) -> BufferTraffic:
        """Return the sums so far."""
        return BufferTraffic(**self._bytes)

    def _add(self, kind: str, rows_to_rank: Sequence[int], row_bytes: int) -> None:
        self._bytes[kind] += (sum(rows_to_rank) - rows_to_rank[self._rank]) * row_bytes
