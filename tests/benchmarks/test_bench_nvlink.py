"""What the NVLink sweep reports, and what is made of it; ranks run it in tests of the kernels."""

from __future__ import annotations

import numpy as np
from matplotlib.lines import Line2D

from benchmarks.bench_nvlink import rounded, summary
from benchmarks.plot_nvlink import draw
from benchmarks.readme_table import NVLinkResult, render_nvlink


def span(us: float) -> dict[str, float]:
    return {"p50": us, "p95": 2 * us, "p99": 3 * us}


def result() -> NVLinkResult:
    normal = {"dispatch": span(10), "dispatch_fp8": span(6.4), "combine": span(12)}
    nccl = {"all_to_all_dispatch": span(20), "all_to_all_combine": span(30.2)}
    return {
        "configuration": {"ranks": 8, "hidden": 7168, "top_k": 8, "experts": 256, "sms_tokens": 4},
        "hardware": {"accelerator": "A GPU"},
        "versions": {"torch": "2.11", "commit": "0123"},
        "command": "torchrun",
        "by_tokens": [
            {"tokens": 1, "us": {**normal, **nccl, "pair_in_chain_fp8": span(3)}},
            {"tokens": 4096, "us": {**normal, **nccl}},
        ],
        "by_sms": [{"num_sms": 8, "remote_gb_per_s": {"dispatch": 301.4, "combine": 250.6}}],
    }


def points_of(line: Line2D) -> list[list[float]]:
    return np.column_stack(line.get_data()).tolist()


def test_a_result_becomes_two_tables() -> None:
    by_tokens, by_sms, caption = render_nvlink(result()).split("\n\n")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in by_tokens.splitlines()
    ]
    assert rows[0][:2] == ["tokens a rank", "low latency FP8 pair"]
    assert rows[2] == ["1", "3", "", "6", "10", "12", "50", ""]
    assert rows[3] == ["4096", "", "", "6", "10", "12", "50", ""]
    assert by_sms.splitlines()[2] == "| 8 | 301 | 251 |"
    assert caption.startswith("8 ranks on A GPU, H = 7168, top-8 of 256, torch 2.11")


def test_lines_are_drawn_where_there_are_numbers() -> None:
    latency, rates = draw(result()).axes
    lines = {str(line.get_label()): points_of(line) for line in latency.get_lines()}
    assert lines["normal, BF16"] == [[1, 22], [4096, 22]]
    assert lines["low latency, FP8"] == [[1, 3]]
    assert "low latency, BF16" not in lines
    assert {str(line.get_label()) for line in rates.get_lines()} == {"dispatch", "combine"}


def test_a_finding_is_told_on_one_line() -> None:
    found = {"num_sms": 8, "us": {"dispatch": span(1.25), "combine": span(2)}}
    assert summary(found) == "num_sms 8: dispatch 1.2, combine 2.0"


def test_numbers_are_rounded_wherever_they_are() -> None:
    assert rounded({"us": [1.234567, {"p50": 2.0}], "ranks": 4}) == {
        "us": [1.23, {"p50": 2.0}],
        "ranks": 4,
    }
