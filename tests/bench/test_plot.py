"""The picture of a report: a line for each contender, by tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from epcomm.bench.plot import check_plot, draw
from epcomm.bench.records import Report, Timing
from epcomm.bench.timing import Percentiles


def timing(mode: str, backend: str, tokens: int, us: float) -> Timing:
    pair = Percentiles(p50=us, p95=2 * us, p99=3 * us)
    return Timing(mode=mode, backend=backend, tokens=tokens, in_graph=False, us={"pair": pair})


def test_each_contender_is_a_line(tmp_path: Path) -> None:
    report = Report(
        configuration={"ranks": 2, "device": "cpu", "hidden": 32, "top_k": 2, "experts": 4},
        hardware={},
        versions={},
        command="epcomm bench",
        timings=[
            timing("normal", "collective", 8, 40.0),
            timing("normal", "collective", 1, 20.0),
            timing("", "expert_rows", 1, 10.0),
        ],
        layers=[],
        wrong=[],
        absent=[],
        advice="",
    )
    figure = draw(report)
    (axes,) = figure.axes
    lines = {
        str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in axes.get_lines()
    }
    assert lines == {
        "normal: collective": [[1, 20], [8, 40]],
        "torch: rows over all-to-all": [[1, 10]],
    }
    assert axes.get_title() == "2 ranks on cpu, H = 32, top-2 of 4"
    path = tmp_path / "bench.png"
    check_plot(path)
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")
