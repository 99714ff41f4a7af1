"""Measurements of `epcomm bench`, and the order of backends that follows from them.

The choice depends on the file, the mode and max_tokens_per_rank alone, which ranks agree on.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epcomm.config import Mode
from epcomm.errors import ConfigError, shown
from epcomm.types import MAX_SIZE, is_size

# The value of "benchmark" in the files that `epcomm bench` writes.
BENCHMARK = "epcomm bench"
# Digits of a digest that people are shown.
_SHOWN_DIGITS = 12


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
        of_mode = [
            each
            for each in self.values
            if each.mode is (Mode.NORMAL if each.backend in exact else mode)
        ]
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


def read_measurements(path: str | Path) -> Measurements:
    """Read a file that `epcomm bench --output FILE` has written. Local.

    Raises:
        ConfigError: the file cannot be read, or is not a file of measurements.
    """
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
        where = _where(report["configuration"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _error(path, f"is no such report ({type(error).__name__}: {error})") from None
    digest = hashlib.sha256(content).hexdigest()
    return Measurements(source=path.name, digest=digest, where=where, values=values)


def _where(sizes: Mapping[str, Any]) -> str:
    return (
        f"{sizes['ranks']} ranks on {sizes['device']}, H = {sizes['hidden']}, "
        f"top-{sizes['top_k']} of {sizes['experts']}"
    )


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
