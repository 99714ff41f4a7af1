"""Bytes that a rank sends to other ranks, by kind, and what of them goes to other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from epcomm.spec import HostLayout


@dataclass(frozen=True, kw_only=True)
class BufferTraffic:
    """The bytes sent to other ranks since the buffer was prepared; local copies do not count.

    dispatch_bytes: towards the experts, forward or backward.
    combine_bytes: of combine, forward or backward.
    control_bytes: counts, faults and flags.
    dispatch_bytes_between, combine_bytes_between, control_bytes_between: what of these goes to
        ranks of other hosts; 0 where BufferSpec.hosts is None, and in buffers over a package that
        finds its own ways between hosts.
    """

    dispatch_bytes: int = 0
    combine_bytes: int = 0
    control_bytes: int = 0
    dispatch_bytes_between: int = 0
    combine_bytes_between: int = 0
    control_bytes_between: int = 0

    @property
    def bytes_between(self) -> int:
        """Return the bytes of all kinds that go to ranks of other hosts."""
        return self.dispatch_bytes_between + self.combine_bytes_between + self.control_bytes_between

    @property
    def bytes_inside(self) -> int:
        """Return the bytes of all kinds that go to other ranks of this host."""
        return self.dispatch_bytes + self.combine_bytes + self.control_bytes - self.bytes_between

    def all_between(self) -> BufferTraffic:
        """Return the same bytes, all of them to ranks of other hosts."""
        return BufferTraffic(
            dispatch_bytes=self.dispatch_bytes,
            combine_bytes=self.combine_bytes,
            control_bytes=self.control_bytes,
            dispatch_bytes_between=self.dispatch_bytes,
            combine_bytes_between=self.combine_bytes,
            control_bytes_between=self.control_bytes,
        )

    def __add__(self, other: BufferTraffic) -> BufferTraffic:
        """Return the sums by kind."""
        names = [field.name for field in fields(self)]
        return BufferTraffic(**{name: getattr(self, name) + getattr(other, name) for name in names})


class TrafficMeter:
    """Adds up BufferTraffic for one rank."""

    def __init__(self, rank: int, hosts: HostLayout | None = None) -> None:
        """Count for `rank`, and by `hosts`, where they are known, what goes to other hosts."""
        self._rank = rank
        self._bytes = {field.name: 0 for field in fields(BufferTraffic)}
        self._ranks_elsewhere = () if hosts is None else hosts.ranks_elsewhere(rank)

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
        if self._ranks_elsewhere:
            num_between = sum(rows_to_rank[rank] for rank in self._ranks_elsewhere)
            self._bytes[f"{kind}_between"] += num_between * row_bytes
