"""The results of a run of `epcomm bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epcomm.bench.contenders.backends import MissingContender
from epcomm.bench.contenders.base import SentBytes
from epcomm.bench.timing import Percentiles


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times of one contender at one T.

    mode: of epcomm; empty for plain torch, whose contender is then named in `backend`.
    runner: the runner of a whole layer, else empty.
    in_graph: calls are replayed from a device graph, else launched from Python.
    us: percentiles over iterations in microseconds, each as long as its slowest rank, by span:
        dispatch, combine and pair, which is both; or layer. Where calls are launched from Python,
        also grouped_dispatch and grouped_pair, which put the rows of an expert next to one another.
    sent_bytes: of one call on the rank that sends most; None of a whole layer.
    """

    mode: str
    backend: str
    tokens: int
    in_graph: bool
    us: Mapping[str, Percentiles]
    runner: str = ""
    sent_bytes: SentBytes | None = None

    @property
    def is_of_torch(self) -> bool:
        """Whether the contender is plain torch."""
        return not self.mode


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A contender that moved or summed rows incorrectly, and was not timed.

    fault: what differs from the formula, on which rank.
    """

    name: str
    tokens: int
    fault: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of one run, and all facts that they depend on.

    absent: contenders that cannot run here, with reasons.   advice: the best choice at each T.
    layers: times of whole layers; empty unless they were asked for.
    """

    configuration: Mapping[str, str | int]
    hardware: Mapping[str, str | int]
    versions: Mapping[str, str]
    command: str
    results: Sequence[Timing]
    layers: Sequence[Timing]
    wrong: Sequence[Wrong]
    absent: Sequence[MissingContender]
    advice: str
