"""Write a report of `epcomm bench` as JSON, and as a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from epcomm.bench.advice import TITLES
from epcomm.bench.records import Report, Timing
from epcomm.planning.measurements import BENCHMARK


def as_json(report: Report) -> str:
    """Return the report as one JSON object, indented; EPConfig.measurements reads it."""
    values = {"benchmark": BENCHMARK, **asdict(report)}
    values["results"] = [_as_record(each) for each in report.results]
    values["layers"] = [_as_record(each) for each in report.layers]
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
        values["sent_bytes"]["total"] = timing.sent_bytes.total
    return values


def timings_table(timings: Sequence[Timing]) -> Table:
    """Return the times of dispatch, combine and both, by T, the fastest pair first."""
    table = _table(
        "dispatch\np50", "combine\np50", "pair\np50", "pair\np95", "pair\np99", "MB\nsent"
    )
    ordered = sorted(timings, key=lambda each: (each.tokens, each.us["pair"].p50))
    for place, timing in enumerate(ordered):
        is_last = place + 1 == len(ordered) or ordered[place + 1].tokens != timing.tokens
        us, sent = timing.us, timing.sent_bytes
        cells = [us["dispatch"].p50, us["combine"].p50]
        cells += [us["pair"].p50, us["pair"].p95, us["pair"].p99]
        table.add_row(
            str(timing.tokens),
            timing.mode or "torch",
            _name(timing),
            *(f"{cell:.0f}" for cell in cells),
            "" if sent is None else f"{sent.total / 1e6:.2f}",
            end_section=is_last,
        )
    return table


def layers_table(timings: Sequence[Timing]) -> Table:
    """Return the times of whole layers, by T."""
    table = _table("layer\np50", "layer\np95", "layer\np99")
    for timing in sorted(timings, key=lambda each: (each.tokens, each.us["layer"].p50)):
        times = timing.us["layer"]
        cells = [f"{us:.0f}" for us in (times.p50, times.p95, times.p99)]
        table.add_row(str(timing.tokens), timing.mode, _name(timing), *cells)
    return table


def _table(*numbers: str) -> Table:
    """Return an empty table whose rows begin with T, mode and backend.

    Numbers of seven digits fit into 80 columns; only the backend is folded, because rich would cut
    digits off.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
        title="us on the slowest rank",
        title_justify="left",
    )
    table.add_column("T", justify="right")
    table.add_column("mode", no_wrap=True)
    table.add_column("backend", overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _name(timing: Timing) -> str:
    parts = [TITLES.get(timing.backend, timing.backend), timing.runner]
    return ", ".join(filter(None, [*parts, "graph" if timing.in_graph else ""]))
