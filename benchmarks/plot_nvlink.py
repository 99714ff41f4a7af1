"""Draw what bench_nvlink.py has measured: latency by tokens, and rates by SMs.

    python -m benchmarks.plot_nvlink benchmarks/results/h200_dispatch_combine_x4.json --folder docs

writes docs/h200_dispatch_combine_x4.png; without a folder the picture is next to the report.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, ScalarFormatter

from benchmarks.tables import Result

# A dispatch and a combine: the spans that a line adds up.
_LINES = {
    "low latency, FP8": ("pair_in_chain_fp8",),
    "low latency, BF16": ("pair_in_chain_bf16",),
    "normal, FP8 dispatch": ("dispatch_fp8", "combine"),
    "normal, BF16": ("dispatch", "combine"),
    "NCCL all-to-all, BF16": ("all_to_all_dispatch", "all_to_all_combine"),
    "NCCL all-gather, reduce-scatter, BF16": ("all_gather", "reduce_scatter"),
}


def draw(result: Result) -> Figure:
    """Return both pictures, side by side."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    latency, rates = figure.subplots(1, 2)
    draw_latency(latency, result)
    draw_rates(rates, result)
    sizes = result["configuration"]
    figure.suptitle(
        f"{sizes['ranks']} x {result['hardware']['accelerator']}, H = {sizes['hidden']}, top-"
        f"{sizes['top_k']} of {sizes['experts']}, uniform routing"
    )
    return figure


def draw_latency(axes: Axes, result: Result) -> None:
    """Draw a line for each way that was measured."""
    for name, parts in _LINES.items():
        points = [
            (finding["tokens"], sum(finding["us"][part]["p50"] for part in parts))
            for finding in result["by_tokens"]
            if all(part in finding["us"] for part in parts)
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens a rank",
        ylabel="dispatch + combine, us (p50 of the slowest rank)",
    )
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()


def draw_rates(axes: Axes, result: Result) -> None:
    """Draw remote bytes over time."""
    rows = result["by_sms"]
    for name in rows[0]["remote_gb_per_s"] if rows else ():
        rates = [row["remote_gb_per_s"][name] for row in rows]
        axes.plot([row["num_sms"] for row in rows], rates, marker="o", label=name.replace("_", " "))
    axes.set(
        xlabel="SMs",
        ylabel="remote GB/s of a rank",
        ylim=(0, None),
        title=f"normal mode, {result['configuration']['sms_tokens']} tokens a rank",
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def main(
    path: Annotated[Path, typer.Argument(help="A report of bench_nvlink.py.")],
    folder: Annotated[Path | None, typer.Option(help="Of the picture; that of the report.")] = None,
) -> None:
    """Write a picture of the report."""
    result: Result = json.loads(path.read_text("utf-8"))
    draw(result).savefig((folder or path.parent) / f"{path.stem}.png", dpi=110)


if __name__ == "__main__":
    typer.run(main)
