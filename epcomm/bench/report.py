"""Write a report of `epcomm bench` as JSON, and as a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Column, Table

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


def times_table(timings: Sequence[Timing], *, of_layers: bool = False) -> Table:
    """Return the times of dispatch, combine and both, or of layers, by T, the fastest first.

    Numbers of seven digits fit into 80 columns; only the backend is folded, because rich would cut
    digits off.
    """
    span, halves = ("layer", ()) if of_layers else ("pair", ("dispatch", "combine"))
    headings = [f"{half}\np50" for half in halves]
    headings += [f"{span}\n{quantile}" for quantile in ("p50", "p95", "p99")]
    numbers = headings if of_layers else [*headings, "MB\nsent"]
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
    ordered = sorted(timings, key=lambda each: (each.tokens, each.us[span].p50))
    for number, timing in enumerate(ordered, 1):
        both, sent = timing.us[span], timing.sent_bytes
        times = [*(timing.us[half].p50 for half in halves), both.p50, both.p95, both.p99]
        cells = [f"{us:.0f}" for us in times]
        table.add_row(
            str(timing.tokens),
            timing.mode or "torch",
            _name(timing),
            *(cells if sent is None else (*cells, f"{sent.total / 1e6:.2f}")),
            end_section=number == len(ordered) or ordered[number].tokens != timing.tokens,
        )
    return table


def _name(timing: Timing) -> str:
    parts = [TITLES.get(timing.backend, timing.backend), timing.runner]
    return ", ".join(filter(None, [*parts, "graph" if timing.in_graph else ""]))
