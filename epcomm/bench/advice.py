"""Recommend a mode and backend at each T in one sentence, by medians of whole calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from epcomm.bench.contenders.all_gather import AllGather
from epcomm.bench.contenders.expert_rows import ExpertRows
from epcomm.bench.records import Timing

# The names in tables of the contenders that are plain torch.
TITLES = {
    ExpertRows.name: "rows over all-to-all",
    AllGather.name: "all-gather and reduce-scatter",
}


def advise(timings: Sequence[Timing]) -> str:
    """Return the sentence, which also names each T at which plain torch is faster.

    Worked example, medians of 10 and 20 us at T = 1, of 90 and 40 us at T = 128:

        Take mode low_latency on backend nvlink at T = 1, and mode normal on backend nvlink at
        T = 128.
    """
    best = _best_by_tokens(each for each in timings if not each.is_of_torch)
    if not best:
        return "Nothing of epcomm was measured here, so there is nothing to take."
    parts = []
    for (mode, backend), group in groupby(
        best.values(), key=lambda each: (each.mode, each.backend)
    ):
        tokens = [each.tokens for each in group]
        span = f"from T = {tokens[0]} to {tokens[-1]}" if len(tokens) > 1 else f"at T = {tokens[0]}"
        parts.append(f"mode {mode} on backend {backend} {span}")
    sentence = f"Take {_listed(parts)}"
    of_torch = _best_by_tokens(each for each in timings if each.is_of_torch)
    faster = [
        f"{TITLES[other.backend]} at T = {tokens} ({_median(other):.0f} us, not "
        f"{_median(best[tokens]):.0f})"
        for tokens, other in of_torch.items()
        if tokens in best and _median(other) < _median(best[tokens])
    ]
    if faster:
        sentence += f"; torch alone is faster with {_listed(faster)}"
    return f"{sentence}."


def _best_by_tokens(timings: Iterable[Timing]) -> dict[int, Timing]:
    """Return the fastest at each T, in order of T."""
    best: dict[int, Timing] = {}
    for each in sorted(timings, key=lambda each: (each.tokens, _median(each))):
        best.setdefault(each.tokens, each)
    return best


def _median(timing: Timing) -> float:
    return timing.whole.p50


def _listed(parts: Sequence[str]) -> str:
    if len(parts) < 3:
        return ", and ".join(parts)
    return f"{', '.join(parts[:-1])}, and {parts[-1]}"
