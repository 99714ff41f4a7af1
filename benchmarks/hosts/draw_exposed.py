"""Draw when a rank sends and computes in a step of decoder layers, with and without overlap.

    python -m tests.hosts.launch --hosts 2 --ranks 1 --rate 50mbit benchmarks/hosts/draw_exposed.py
        --trace trace.json --picture docs/pictures/micro_batches.svg

in one line, runs the steps `one by one` and `micro_batches` of bench_exposed.py. The trace is for
ui.perfetto.dev, as that of `epcomm bench --trace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.hosts.bench_exposed import Bench, Sizes
from benchmarks.measuring import ranks_of_torchrun
from epcomm import EPGroup
from epcomm.bench.exposure import Event, as_json, trace

# Steps by title: whether they overlap.
STEPS = {"micro-batches one by one": False, "two micro-batches in turn": True}
# Ranges of calls that the caller makes itself, and in which it waits for others.
_SENT = frozenset({"dispatch", "combine", "dispatch_backward", "combine_backward"})
_WAITED = frozenset({*_SENT, "dispatch_wait", "combine_wait", "backward_wait"})


def draw(events: Sequence[Event]) -> Figure:
    """Return a figure of rank 0 with a panel for each step; white: the caller waits."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = figure.subplots(len(STEPS), sharex=True)
    mine = [event for event in events if event["pid"] == "rank 0"]
    for panel, step in zip(panels, STEPS, strict=True):
        (whole,) = (event for event in mine if event["name"] == step)
        length_us = whole["dur"]
        inside = [event for event in mine if 0 <= event["ts"] - whole["ts"] < length_us]
        sent = [each for each in inside if each["tid"] == "transfers" or each["name"] in _SENT]
        waited = [each for each in inside if each["name"] in _WAITED and each["tid"] == "caller"]
        for row, shown, color in (
            (0, sent, "tab:orange"),
            (1, [whole], "tab:blue"),
            (1, waited, "white"),
        ):
            bars = [((each["ts"] - whole["ts"]) / 1e3, each["dur"] / 1e3) for each in shown]
            panel.broken_barh(bars, (row, 0.8), color=color, linewidth=0)
        panel.set_yticks([0.4, 1.4], ["sends", "computes"])
        panel.set_title(f"{step}, {length_us / 1e3:.0f} ms", loc="left", fontsize="medium")
    panels[-1].set_xlabel("ms")
    return figure


def main(
    trace_file: Annotated[Path, typer.Option("--trace", help="Write the trace there.")],
    picture: Annotated[Path, typer.Option(help="Write the SVG file there.")],
) -> None:
    """Trace both steps on all ranks; rank 0 writes."""
    torch.set_num_threads(1)
    with ranks_of_torchrun(), EPGroup(dist.group.WORLD) as group:
        bench = Bench.of(group, Sizes())
        steps = {name: partial(bench.step_model, overlaps=each) for name, each in STEPS.items()}
        for step in steps.values():
            step()
        events = trace(steps, group)
        if group.rank == 0:
            trace_file.write_text(as_json(events), encoding="utf-8")
            # Text as text, and the same file from the same trace.
            with rc_context({"svg.fonttype": "none", "svg.hashsalt": "epcomm"}):
                draw(events).savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)
