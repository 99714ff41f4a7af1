"""Write a report of `epcomm bench` as JSON, and as a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
        values["sent_bytes"]["total"] = timing.sent_bytes.total
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
                if each.sent_bytes is not None:
                    cells.append(f"{each.sent_bytes.total / 1e6:.2f}")
                table.add_row(str(each.tokens), each.mode or "torch", name_of(each), *cells)
        table.add_section()
    return table


def name_of(timing: Timing) -> str:
    """Return what was timed in one mode: the backend, the experts, and whether in a graph."""
    parts = [TITLES.get(timing.backend, timing.backend), timing.weights, timing.runner]
    return ", ".join(filter(None, [*parts, "graph" if timing.in_graph else ""]))
