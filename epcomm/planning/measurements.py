"""Measurements of `epcomm bench`, and the order of preference of backends, with its reason.

The choice depends on the file, the mode and max_tokens_per_rank alone, which ranks agree on.
"""

import hashlib
import json
import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epcomm.config import EPConfig, Mode
from epcomm.errors import ConfigError, shown
from epcomm.registry import MEASURED_ORDER, backend_names
from epcomm.types import MAX_SIZE, is_size

# The value of "benchmark" in the files that `epcomm bench` writes.
BENCHMARK = "epcomm bench"
_SHOWN_DIGITS = 12
# 4 CPU ranks over gloo, H = 1024, top-8 of 32 experts, bfloat16: `epcomm bench --ranks 4`.
EXACT_DECODE = (
    "sizes are exact, because CPU ranks wait in every exchange: over gloo a pair of 1024 tokens "
    "took 56 ms, and 94 ms with static sizes (which EPConfig(mode='low_latency') takes)"
)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The time of one dispatch and combine of one backend.

    tokens: T of each rank.   pair_us: median over iterations, each as long as its slowest rank.
    """

    mode: Mode
    backend: str
    tokens: int
    pair_us: float


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The contents of one file.

    source: the file's name.   digest: sha256 of its bytes.
    where: ranks, device and sizes that it was made with, for people.
    """

    source: str
    digest: str
    where: str
    values: tuple[Measurement, ...]

    def fastest(
        self, mode: Mode, max_tokens: int | None, exact: Collection[str] = ()
    ) -> tuple[Measurement, ...]:
        """Return the measurements of a mode at one T, the fastest first; none if it has none.

        T is the one measured nearest to max_tokens, by ratio and the larger of two; without a
        limit the largest.   exact: backends whose times are taken from mode normal.
        """
        modes = dict.fromkeys(exact, Mode.NORMAL)
        of_mode = [each for each in self.values if each.mode is modes.get(each.backend, mode)]
        if not of_mode:
            return ()
        measured = sorted({each.tokens for each in of_mode}, reverse=True)
        tokens = measured[0]
        if max_tokens is not None:
            tokens = min(measured, key=lambda each: abs(math.log(each / max_tokens)))
        at_tokens = [each for each in of_mode if each.tokens == tokens]
        return tuple(sorted(at_tokens, key=lambda each: (each.pair_us, each.backend)))

    def __str__(self) -> str:
        return f"{self.source} (sha256 {self.digest[:_SHOWN_DIGITS]}, {self.where})"


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


def read_measurements(path: str | Path) -> Measurements:
    """Read a file that `epcomm bench --output FILE` has written. Local."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        # A path with a null byte raises ValueError.
        raise _error(path, f"cannot be read ({getattr(error, 'strerror', error)})") from None
    try:
        report = json.loads(content)
        if report["benchmark"] != BENCHMARK:
            raise ValueError(f"it is of {shown(report['benchmark'])}")
        # Results of plain torch have no mode.
        values = tuple(_measurement(each) for each in report["results"] if each["mode"])
        sizes = report["configuration"]
        where = (
            f"{sizes['ranks']} ranks on {sizes['device']}, H = {sizes['hidden']}, "
            f"top-{sizes['top_k']} of {sizes['experts']}"
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _error(path, f"is no such report ({type(error).__name__}: {error})") from None
    digest = hashlib.sha256(content).hexdigest()
    return Measurements(source=path.name, digest=digest, where=where, values=values)


def _measurement(result: Mapping[str, Any]) -> Measurement:
    tokens, pair_us = result["tokens"], result["us"]["pair"]["p50"]
    if not is_size(tokens):
        raise ValueError(f"tokens {shown(tokens)}, expected 1 to {MAX_SIZE}")
    # An integer may have more digits than a float can.
    is_number = isinstance(pair_us, int | float) and not isinstance(pair_us, bool)
    if not (is_number and 0 < pair_us <= sys.float_info.max):
        raise ValueError(f"tokens {tokens} in {shown(pair_us)} us")
    mode, backend = Mode(result["mode"]), str(result["backend"])
    return Measurement(mode=mode, backend=backend, tokens=tokens, pair_us=float(pair_us))


def _error(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"EPConfig: measurements is {str(path)!r}, which {problem}, expected a file written by "
        "`epcomm bench --output FILE`; write one, or leave measurements None"
    )
