"""Render results of bench_gate.py and bench_placement.py as Markdown, for readme_table.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from benchmarks.measuring.markdown import row, where_measured

# Routers by the name of their column; `reference` is plain torch.
_ROUTERS = {
    "gate": "gate",
    "gate, load": "and counts the load",
    "gate, load, replicas": "and chooses replicas",
    "gate, load, then replicas": "replicas chosen by torch",
    "sglang": "SGLang's Triton gate",
    "reference": "plain torch",
}


class GateFinding(TypedDict):
    """One router at one number of tokens; us: percentiles, None where it got no number."""

    router: str
    shape: str
    tokens: int
    us: Mapping[str, float] | None
    fault: str


class GateResult(TypedDict):
    """The parts of a result of bench_gate.py that a table shows."""

    benchmark: str
    configuration: Mapping[str, object]
    hardware: Mapping[str, str | int]
    versions: Mapping[str, str]
    command: str
    findings: Sequence[GateFinding]


class PlacedWay(TypedDict):
    """One of the two layers; us: percentiles.   slots_ratio: most slots of a rank over the mean."""

    name: str
    us: Mapping[str, float]
    slots_ratio: float


class PlacementResult(TypedDict):
    """The parts of a result of bench_placement.py that a table shows."""

    benchmark: str
    configuration: Mapping[str, str | int | float | bool]
    hardware: Mapping[str, str | int]
    versions: Mapping[str, str]
    command: str
    ways: Sequence[PlacedWay]


def render_gate(result: GateResult) -> str:
    """Return the table: a row for each routing and number of tokens, a column for each router."""
    findings = result["findings"]
    us = {
        (each["shape"], each["tokens"], each["router"]): each["us"]["p50"]
        for each in findings
        if each["us"] is not None
    }
    lines = [row("us", *_ROUTERS.values()), row("---", *["---:"] * len(_ROUTERS))]
    for shape, tokens in dict.fromkeys((each["shape"], each["tokens"]) for each in findings):
        found = [us.get((shape, tokens, router)) for router in _ROUTERS]
        cells = ["" if each is None else f"{each:.2f}" for each in found]
        lines.append(row(f"{shape}, {tokens} tokens", *cells))
    versions = result["versions"]
    sglang = f", sglang {versions['sglang']}" if "sglang" in versions else ""
    caption = (
        f"One call of {result['configuration']['calls_of_graph']} in a graph, medians, on "
        f"{result['hardware']['accelerator']}, torch {versions['torch']}{sglang}: "
        f"`{result['command']}`"
    )
    faults = [
        f"{_ROUTERS[each['router']]}, {each['shape']}, {each['tokens']} tokens: {each['fault']}"
        for each in findings
        if each["fault"]
    ]
    return "\n".join([*lines, "", "; ".join([caption, *faults]), ""])


def render_placement(result: PlacementResult) -> str:
    """Return the table: the layer with experts in order and placed, and how even their load is."""
    lines = [
        row("experts", "p50 ms", "p95 ms", "p99 ms", "most slots of a rank over the mean"),
        row("---", *["---:"] * 4),
    ]
    for way in result["ways"]:
        times = [_in_ms(way["us"][quantile]) for quantile in ("p50", "p95", "p99")]
        lines.append(row(way["name"], *times, f"{way['slots_ratio']:.3f}"))
    sizes, hardware = result["configuration"], result["hardware"]
    where = where_measured(hardware)
    caption = (
        f"{sizes['ranks']} ranks on {where}, {sizes['tokens']} tokens a rank, H = "
        f"{sizes['hidden']}, I = {sizes['intermediate']}, top-{sizes['top_k']} of "
        f"{sizes['experts']} by a Zipf law of exponent {sizes['exponent']}, one redundant expert a "
        f"rank, torch {result['versions']['torch']}; the slowest rank of {sizes['iterations']} "
        f"batches that were not counted; slots are those of equal shares of copies: "
        f"`{result['command']}`"
    )
    return "\n".join([*lines, "", caption, ""])


def _in_ms(us: float) -> str:
    """Return milliseconds with three digits, or all that are before the point."""
    return f"{us / 1e3:.0f}" if us >= 1e5 else f"{us / 1e3:.3g}"
