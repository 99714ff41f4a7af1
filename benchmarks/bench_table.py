"""Render what `epcomm bench --output FILE` wrote as Markdown; readme_table.py asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measuring.markdown import row, where_measured
from epcomm.bench.advice import TITLES


def render_bench(report: Mapping[str, Any]) -> str:
    """Return a table with a row for each T and a column for each contender, in us.

    Cells are medians of a dispatch and its combine, as long as the slowest rank.
    """
    results: Sequence[Mapping[str, Any]] = report["results"]
    names = list(dict.fromkeys(map(_name, results)))
    times = {(each["tokens"], _name(each)): each["us"]["pair"]["p50"] for each in results}
    lines = [row("tokens a rank", *names), row(*["---:"] * (1 + len(names)))]
    for tokens in dict.fromkeys(each["tokens"] for each in results):
        cells = [times.get((tokens, name)) for name in names]
        lines.append(row(str(tokens), *("" if us is None else f"{us:.0f}" for us in cells)))
    sizes, hardware = report["configuration"], report["hardware"]
    where = where_measured(hardware)
    caption = (
        f"{sizes['ranks']} ranks over {sizes['transport']} on {where}, H = {sizes['hidden']}, top-"
        f"{sizes['top_k']} of {sizes['experts']}, {sizes['dtype']}, torch "
        f"{report['versions']['torch']}; medians in us of dispatch and combine on the slowest "
        f"rank, {sizes['iterations']} calls of each in turn: `{report['command']}`"
    )
    return "\n".join([*lines, "", caption, ""])


def _name(result: Mapping[str, Any]) -> str:
    backend = TITLES.get(result["backend"], result["backend"])
    mode = (result["mode"] or "torch").replace("_", " ")
    return f"{mode}, {backend}" + (", graph" if result["in_graph"] else "")
