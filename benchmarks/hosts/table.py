"""Render what bench_hosts.py wrote as Markdown; readme_table.py asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from benchmarks.measuring.markdown import row

_QUANTILES = ("p50", "p95", "p99")
_SPANS = ("dispatch_without_grouping", "combine", "total", "total_without_grouping")


class HostsContender(TypedDict):
    """One contender; ms: percentiles by span.   host_bytes: of the host that sends most."""

    ms: dict[str, dict[str, float]]
    sent_bytes: dict[str, int]
    host_bytes: dict[str, float]


class HostsResult(TypedDict):
    """A result of bench_hosts.py; the first contender is compared with the others."""

    benchmark: str
    configuration: Mapping[str, str | int | float]
    hardware: Mapping[str, str | int]
    versions: Mapping[str, str]
    command: str
    load_average: Sequence[float]
    contenders: dict[str, HostsContender]


def wire_ms(num_bytes: float, gbit_per_s: float) -> float:
    """Return the milliseconds in which a host sends `num_bytes`."""
    return num_bytes * 8 / (gbit_per_s * 1e9) * 1e3


def render_hosts(result: HostsResult) -> str:
    """Return the table: a row for each contender, and how near it is to its wire time."""
    sizes, found = result["configuration"], result["contenders"]
    rate = float(sizes["gbit_per_s"])
    heads = [f"{_title(span)}, ms" for span in _SPANS]
    heads += [f"total {quantile}" for quantile in _QUANTILES[1:]]
    heads += ["MB from a host", "wire alone, ms", "times as fast"]
    lines = [row("backend", *heads), row("---", *["---:"] * len(heads))]
    first = next(iter(found.values()))["ms"]["total"]["p50"]
    for name, each in found.items():
        ms, sent = each["ms"], each["host_bytes"]["total"]
        cells = [f"{ms[span]['p50']:.0f}" for span in _SPANS]
        cells += [f"{ms['total'][quantile]:.0f}" for quantile in _QUANTILES[1:]]
        cells += [f"{sent / 1e6:.1f}", f"{wire_ms(sent, rate):.0f}"]
        lines.append(row(name, *cells, f"{ms['total']['p50'] / first:.2f}"))
    hardware = result["hardware"]
    caption = (
        f"{sizes['hosts']} hosts (namespaces) of {int(sizes['ranks']) // int(sizes['hosts'])} ranks"
        f" on {hardware['num_cores']} cores of {hardware['processor']}, {rate:g} Gbit/s from each "
        f"host, {sizes['tokens']} tokens a rank, H = {sizes['hidden']}, top-{sizes['top_k']} of "
        f"{sizes['experts']}, {sizes['dtype']}, over {sizes['transport']}, torch "
        f"{result['versions']['torch']}; medians over {sizes['iterations']} calls in turn, each as "
        "long as its slowest rank; MB as the kernel counts them, dispatch and combine together; "
        f"the last column: how many times as fast the first is: `{result['command']}`"
    )
    return "\n".join([*lines, "", caption, ""])


def _title(span: str) -> str:
    return span.replace("_", " ")
