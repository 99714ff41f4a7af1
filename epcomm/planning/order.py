"""The order of preference of the backends of a phase, and the reason for it."""

from __future__ import annotations

from collections.abc import Collection

from epcomm.config import EPConfig, Mode
from epcomm.planning.measurements import Measurement, Measurements
from epcomm.registry import MEASURED_ORDER, backend_names

# 4 CPU ranks over gloo, H = 1024, top-8 of 32 experts, bfloat16: `epcomm bench --ranks 4`.
EXACT_DECODE = (
    "sizes are exact, because CPU ranks wait in every exchange: over gloo a pair of 1024 tokens "
    "took 56 ms, and 94 ms with static sizes (which EPConfig(mode='low_latency') takes)"
)


class PreferredOrder:
    """The backends of one phase in order of preference; a plan takes the first one that serves.

    Measured backends come first, the fastest first; the others follow in the order of the registry.
    A backend that the configuration names is the only one.
    """

    def __init__(
        self, config: EPConfig, measurements: Measurements | None, exact: Collection[str]
    ) -> None:
        """Order the backends that the configuration of the phase allows. Local.

        exact: those that serve decode with exact sizes, although others of the mode are static;
            their times are those of mode normal.
        """
        self._config, self._exact, mode = config, exact, Mode(config.mode)
        self._source = measurements if config.backend == "auto" else None
        self._measured: tuple[Measurement, ...] = ()
        names = backend_names(config.backend, mode)
        if self._source is not None:
            fastest = self._source.fastest(mode, config.max_tokens_per_rank, exact)
            self._measured = tuple(each for each in fastest if each.backend in names)
        measured = (each.backend for each in self._measured)
        self.backends: tuple[str, ...] = tuple(dict.fromkeys([*measured, *names]))

    def reason_for(self, chosen: str) -> str:
        """Return the reason for the backend `chosen`, and its exact sizes in decode, as text."""
        exact = f"; {EXACT_DECODE}" if chosen in self._exact else ""
        return self._reason_for(chosen) + exact

    def _reason_for(self, chosen: str) -> str:
        mode, source = Mode(self._config.mode), self._source
        if self._config.backend != "auto":
            return f"configuration: EPConfig.backend is {self._config.backend}"
        rules = f"the first of {', '.join(self.backends)} that serves"
        if source is None:
            why = f"; {MEASURED_ORDER}" if chosen == "nvlink" else ""
            return f"rules, without measurements: {rules}{why}"
        if not self._measured:
            return f"rules, because {source} has nothing of mode {mode.value}: {rules}"
        if chosen not in {each.backend for each in self._measured}:
            return f"rules, because no backend that {source} measured serves: {rules}"
        times = ", ".join(
            f"{each.backend} {each.pair_us:.0f} us"
            + ("" if each.mode is mode else f" in mode {each.mode.value}")
            for each in self._measured
        )
        return (
            f"measurements {source}: the fastest that serves of {times}, at T = "
            f"{self._measured[0].tokens} in mode {mode.value}"
        )
