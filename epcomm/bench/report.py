"""Write a report of `epcomm bench` as JSON, as a table for the terminal, and as advice."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Column, Table

from epcomm.bench.contenders.all_gather import AllGather
from epcomm.bench.contenders.expert_rows import ExpertRows
from epcomm.bench.records import Report, Timing
from epcomm.planning.measurements import BENCHMARK

# The names in tables of the contenders that are plain torch.
TITLES = {ExpertRows.name: "rows over all-to-all", AllGather.name: "all-gather and reduce-scatter"}


def as_json(report: Report) -> str:
    """Return the report as one JSON object, indented; EPConfig.measurements reads it."""
    values = {"benchmark": BENCHMARK, **asdict(report)}
    # They are written to the trace.
    del values["events"]
    values["results"] = [_as_record(each) for each in report.results]
    return json.dumps(values, indent=2) + "\n"


def _as_record(timing: Timing) -> Mapping[str, Any]:
    values = asdict(timing)
    # A hundredth of a microsecond is below the resolution of every clock here.
    values["us"] = {
        span: {name: round(us, 2) for name, us in times.items()}
        for span, times in values["us"].items()
    }
    if timing.sent_bytes is None:
        del values["sent_bytes"]
    else:
        values["sent_bytes"]["total"] = timing.sent_bytes.total_bytes
    return values


def times_table(report: Report) -> Table:
    """Return the times of calls and of their parts by T, the fastest first, with their bounds.

    Numbers of seven digits fit into 80 columns; only the backend is folded, because rich would cut
    digits off.
    """
    parts, whole = ("dispatch", "combine"), "pair"
    if report.is_of_layers:
        parts, whole = ("dispatch", "products", "combine"), "layer"
    headings = [f"{part}\np50" for part in parts]
    headings += [f"{whole}\n{quantile}" for quantile in ("p50", "p95", "p99")]
    has_steps = any("step" in each.us for each in report.results)
    has_peaks = any(each.peak_bytes for each in report.results)
    headings += ["step\np50"] if has_steps else []
    headings += ["peak\nMB"] if has_peaks else []
    numbers = headings if report.is_of_layers else [*headings, "MB\nsent"]
    table = Table(
        Column("T", justify="right"),
        Column("mode", no_wrap=True),
        Column("backend", overflow="fold"),
        *(Column(heading, justify="right", no_wrap=True) for heading in numbers),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
        title="us on the slowest rank",
        title_justify="left",
    )
    timings = sorted(report.results, key=lambda each: each.whole.p50)
    for section in sorted({(each.tokens, each.weights) for each in timings}):
        for bound in report.bounds:
            if (bound.tokens, bound.weights) == section:
                cells = [f"{bound.us[span]:.0f}" for span in (*parts, whole)]
                table.add_row(str(bound.tokens), "bound", bound.weights, *cells)
        for each in timings:
            if (each.tokens, each.weights) == section:
                times = [each.us[part].p50 for part in parts]
                times += [each.whole.p50, each.whole.p95, each.whole.p99]
                cells = [f"{us:.0f}" for us in times]
                if has_steps:
                    cells.append(f"{each.us['step'].p50:.0f}" if "step" in each.us else "")
                if has_peaks:
                    peak = max(each.peak_bytes.values(), default=None)
                    cells.append("" if peak is None else f"{peak / 1e6:.0f}")
                if each.sent_bytes is not None:
                    cells.append(f"{each.sent_bytes.total_bytes / 1e6:.2f}")
                table.add_row(str(each.tokens), each.mode or "torch", name_of(each), *cells)
        table.add_section()
    return table


def name_of(timing: Timing) -> str:
    """Return what was timed in one mode: the backend, the experts, and whether in a graph."""
    backend = TITLES.get(timing.backend, timing.backend)
    parts = [backend, timing.weights, timing.runner, timing.overlap]
    return ", ".join(filter(None, [*parts, "graph" if timing.in_graph else ""]))


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
    for (mode, backend, overlap), group in groupby(
        best.values(), key=lambda each: (each.mode, each.backend, each.overlap)
    ):
        tokens = [each.tokens for each in group]
        span = f"from T = {tokens[0]} to {tokens[-1]}" if len(tokens) > 1 else f"at T = {tokens[0]}"
        parts.append(f"mode {mode} on backend {backend}{overlap and f' with {overlap}'} {span}")
    sentence = f"Take {_listed(parts)}"
    of_torch = _best_by_tokens(each for each in timings if each.is_of_torch)
    faster = [
        f"{TITLES[other.backend]} at T = {tokens} ({other.whole.p50:.0f} us, not "
        f"{best[tokens].whole.p50:.0f})"
        for tokens, other in of_torch.items()
        if tokens in best and other.whole.p50 < best[tokens].whole.p50
    ]
    if faster:
        sentence += f"; torch alone is faster with {_listed(faster)}"
    return f"{sentence}."


def _best_by_tokens(timings: Iterable[Timing]) -> dict[int, Timing]:
    """Return the fastest at each T, in order of T."""
    best: dict[int, Timing] = {}
    for each in sorted(timings, key=lambda each: (each.tokens, each.whole.p50)):
        best.setdefault(each.tokens, each)
    return best


def _listed(parts: Sequence[str]) -> str:
    if len(parts) < 3:
        return ", and ".join(parts)
    return f"{', '.join(parts[:-1])}, and {parts[-1]}"
