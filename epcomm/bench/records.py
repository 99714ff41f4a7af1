"""The results of a run of `epcomm bench`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from epcomm.bench.bounds import Bound
from epcomm.bench.exposure import Event, Exposure
from epcomm.bench.timing import Percentiles
from epcomm.buffers.traffic import BufferTraffic
from epcomm.config import EPConfig, Mode


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times of one contender at one T.

    mode: of epcomm; empty for plain torch, whose contender is then named in `backend`.
    runner, weights: of a whole layer, and the format of its experts; else empty.
    overlap: how a whole layer divides its tokens; empty if it does not.
    in_graph: calls are replayed from a device graph, else launched from Python.
    us: percentiles over iterations in microseconds, each as long as its slowest rank, by span:
        dispatch, combine and pair, which is both; of a layer dispatch, products, combine and
        layer, which is one call; step is its call forward and backward.
    peak_bytes: the most memory that a layer or step allocates on a GPU, on the worst rank.
    sent_bytes: of one call on the rank that sends most; None of a whole layer.
    """

    mode: str
    backend: str
    tokens: int
    in_graph: bool = False
    us: Mapping[str, Percentiles] = field(default_factory=dict)
    runner: str = ""
    weights: str = ""
    overlap: str = ""
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    sent_bytes: BufferTraffic | None = None

    @property
    def is_of_torch(self) -> bool:
        """Whether the contender is plain torch."""
        return not self.mode

    @property
    def whole(self) -> Percentiles:
        return self.us["layer" if self.weights else "pair"]


@dataclass(frozen=True, kw_only=True)
class MissingContender:
    """A backend that does not serve a mode here, with the reasons."""

    backend: str
    mode: Mode
    reasons: tuple[str, ...]


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

    results: of dispatch and combine, or of whole layers.
    rates, bounds: of whole layers: see bounds.py.   wrong: what was not timed for that.
    absent: contenders that cannot run here, with reasons.   advice: the best choice at each T.
    exposures, events: of layers that were traced, in us since the epoch.
    """

    configuration: Mapping[str, str | int]
    hardware: Mapping[str, str | int]
    versions: Mapping[str, str]
    command: str
    rates: Mapping[str, float]
    results: list[Timing] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    absent: list[MissingContender] = field(default_factory=list)
    advice: str = ""
    exposures: list[Exposure] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def is_of_layers(self) -> bool:
        """Return whether whole layers were timed."""
        return bool(self.rates)

    def add_absent(self, config: EPConfig, reason: str) -> None:
        """Note why a configuration does not serve, once for each backend and mode."""
        if (config.backend, config.mode) not in {(each.backend, each.mode) for each in self.absent}:
            mode = Mode(config.mode)
            missing = MissingContender(backend=config.backend, mode=mode, reasons=(reason,))
            self.absent.append(missing)
