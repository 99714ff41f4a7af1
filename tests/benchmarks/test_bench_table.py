import json
from pathlib import Path
from typing import Any

from benchmarks.bench_table import render_bench
from benchmarks.readme_table import fill


def result(mode: str, backend: str, tokens: int, us: float) -> dict[str, Any]:
    times = {"pair": {"p50": us, "p95": 2 * us, "p99": 3 * us}}
    return {"mode": mode, "backend": backend, "tokens": tokens, "in_graph": False, "us": times}


REPORT = {
    "benchmark": "epcomm bench",
    "configuration": {
        **{"ranks": 4, "transport": "gloo", "hidden": 1024, "top_k": 8, "experts": 32},
        **{"dtype": "bf16", "iterations": 30},
    },
    "hardware": {"num_cores": 2, "processor": "A Processor"},
    "versions": {"torch": "2.13"},
    "command": "epcomm bench --ranks 4",
    "results": [
        result("low_latency", "nvlink", 1, 10.4),
        result("", "expert_rows", 1, 80.0),
        result("", "expert_rows", 4096, 4000.0),
    ],
}


def test_a_report_becomes_a_table(tmp_path: Path) -> None:
    table, caption = render_bench(REPORT).split("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0] == ["tokens a rank", "low latency, nvlink", "torch, rows over all-to-all"]
    assert rows[2:] == [["1", "10", "80"], ["4096", "", "4000"]]
    assert caption == (
        "4 ranks over gloo on 2 cores of A Processor, H = 1024, top-8 of 32, bf16, torch 2.13; "
        "medians in us of dispatch and combine on the slowest rank, 30 calls of each in turn: "
        "`epcomm bench --ranks 4`\n"
    )
    (tmp_path / "one.json").write_text(json.dumps(REPORT), encoding="utf-8")
    text = "<!-- benchmark:one -->\n<!-- /benchmark -->"
    assert render_bench(REPORT) in fill(text, tmp_path)
