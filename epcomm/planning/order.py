"""The order of preference of the backends of a phase, and the reason for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from epcomm.config import EPConfig, Mode
from epcomm.planning.measurements import Measurement, Measurements
from epcomm.registry import MEASURED_ORDER, backend_names

# 4 CPU ranks over gloo, H = 1024, top-8 of 32 experts, bfloat16: `epcomm bench --ranks 4`.
EXACT_DECODE = (
    "sizes are exact, because CPU ranks wait in every exchange: over gloo a pair of 1024 tokens "
    "took 56 ms, and 94 ms with static sizes (which EPConfig(mode='low_latency') takes)"
)


@dataclass(frozen=True, kw_only=True)
class PreferredOrder:
    """Backends in order of preference; a plan takes the first one that serves the phase.

    measured: those that were measured, the fastest first, which come before the others.
    source: the measurements, where they may decide.
    exact: backends that serve decode with exact sizes, although others of the mode are static.
    """

    config: EPConfig
    backends: tuple[str, ...]
    measured: tuple[Measurement, ...]
    source: Measurements | None
    exact: Collection[str]

    def reason_for(self, chosen: str) -> str:
        """Return the reason for the backend `chosen`, and its exact sizes in decode, as text."""
        exact = f"; {EXACT_DECODE}" if chosen in self.exact else ""
        return self._reason_for(chosen) + exact

    def _reason_for(self, chosen: str) -> str:
        mode = Mode(self.config.mode).value
        if self.config.backend != "auto":
            return f"configuration: EPConfig.backend is {self.config.backend}"
        rules = f"the first of {', '.join(self.backends)} that serves"
        if self.source is None:
            why = f"; {MEASURED_ORDER}" if chosen == "nvlink" else ""
            return f"rules, without measurements: {rules}{why}"
        if not self.measured:
            return f"rules, because {self.source} has nothing of mode {mode}: {rules}"
        if chosen not in {each.backend for each in self.measured}:
            return f"rules, because no backend that {self.source} measured serves: {rules}"
        times = ", ".join(
            f"{each.backend} {each.pair_us:.0f} us"
            + ("" if each.mode is self.config.mode else f" in mode {each.mode.value}")
            for each in self.measured
        )
        return (
            f"measurements {self.source}: the fastest that serves of {times}, at T = "
            f"{self.measured[0].tokens} in mode {mode}"
        )


def preferred_order(
    config: EPConfig, measurements: Measurements | None, exact: Collection[str] = ()
) -> PreferredOrder:
    """Return the order for the configuration of one phase. Local.

    Measured backends come first, the fastest first; the others follow in the order of the registry.
    A backend that the configuration names is the only one.

    exact: backends that serve the phase with exact sizes: their times are those of mode normal.

    Raises:
        ConfigError: the configuration names no backend that exists.
    """
    names = backend_names(config.backend, Mode(config.mode))
    source = measurements if config.backend == "auto" else None
    measured: tuple[Measurement, ...] = ()
    if source is not None:
        fastest = source.fastest(Mode(config.mode), config.max_tokens_per_rank, exact)
        measured = tuple(each for each in fastest if each.backend in names)
    return PreferredOrder(
        config=config,
        backends=tuple(dict.fromkeys([*(each.backend for each in measured), *names])),
        measured=measured,
        source=source,
        exact=exact,
    )
