"""Bytes that a rank sends to other ranks, by kind, and in total to ranks of other hosts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from epcomm.spec import HostLayout


@dataclass(frozen=True, kw_only=True)
class BufferTraffic:
    """The bytes sent to other ranks since the buffer was prepared; local copies do not count.

    dispatch_bytes: towards the experts, forward or backward.
    combine_bytes: of combine, forward or backward.   control_bytes: counts, faults and flags.
    bytes_between: bytes of dispatch and combine to ranks of other hosts; 0 if BufferSpec.hosts is
        None, and for vendor packages that cross hosts themselves.
    """

    dispatch_bytes: int = 0
    combine_bytes: int = 0
    control_bytes: int = 0
    bytes_between: int = 0

    def __add__(self, other: Self) -> Self:
        return replace(self, **{name: n + getattr(other, name) for name, n in vars(self).items()})

    def __sub__(self, other: Self) -> Self:
        return replace(self, **{name: n - getattr(other, name) for name, n in vars(self).items()})

    @property
    def total_bytes(self) -> int:
        return self.dispatch_bytes + self.combine_bytes + self.control_bytes


class TrafficMeter:
    """Adds up BufferTraffic for one rank."""

    def __init__(self, rank: int, hosts: HostLayout | None = None) -> None:
        """Count for `rank`; with `hosts`, also count its bytes to ranks of other hosts."""
        self._rank = rank
        self._bytes = {field.name: 0 for field in fields(BufferTraffic)}
        self._ranks_elsewhere = () if hosts is None else hosts.ranks_elsewhere(rank)

    def dispatch(self, rows_to_rank: Sequence[int], row_bytes: int) -> None:
        self._add_rows("dispatch_bytes", rows_to_rank, row_bytes)

    def combine(self, rows_to_rank: Sequence[int], row_bytes: int) -> None:
        self._add_rows("combine_bytes", rows_to_rank, row_bytes)

    def control(self, rows_to_rank: Sequence[int], row_bytes: int) -> None:
        """Count headers."""
        self._add("control_bytes", rows_to_rank, row_bytes)

    def snapshot(self) -> BufferTraffic:
        """Return the sums so far."""
        return BufferTraffic(**self._bytes)

    def _add(self, kind: str, rows_to_rank: Sequence[int], row_bytes: int) -> None:
        self._bytes[kind] += (sum(rows_to_rank) - rows_to_rank[self._rank]) * row_bytes

    def _add_rows(self, kind: str, rows_to_rank: Sequence[int], row_bytes: int) -> None:
        self._add(kind, rows_to_rank, row_bytes)
        if self._ranks_elsewhere:
            num_between = sum(rows_to_rank[rank] for rank in self._ranks_elsewhere)
            self._bytes["bytes_between"] += num_between * row_bytes
