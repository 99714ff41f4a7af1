"""What a product may lose beside dispatches, and the table of what it lost."""

from __future__ import annotations

import pytest

from benchmarks.bench_overlap import allowed_loss, told
from benchmarks.readme_table import OverlapResult, render_overlap


def result() -> OverlapResult:
    us = {
        name: {"p50": us, "p95": 2 * us, "p99": 3 * us}
        for name, us in {
            "product": 700.0,
            "narrow_product_beside": 840.0,
            "dispatch": 160.0,
            "dispatch_beside": 200.0,
        }.items()
    }
    return {
        "configuration": {
            **{"ranks": 2, "sms_tokens": 4, "hidden": 7168, "top_k": 8, "experts": 256},
            **{"m": 5, "n": 6, "k": 7},
        },
        "hardware": {"accelerator": "A GPU"},
        "versions": {"torch": "2.11"},
        "command": "torchrun",
        "findings": [
            {"wire": "fp8", "num_sms": 32, "us": us, "product_lost": 1.2, "allowed": 1.386}
        ],
    }


def test_a_product_may_lose_what_it_gave_and_five_percent() -> None:
    assert allowed_loss(132, 32) == pytest.approx(1.386)


def test_a_result_becomes_a_table() -> None:
    table, caption = render_overlap(result()).split("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert {len(row) for row in rows} == {7}
    assert rows[2] == ["32, FP8 rows", "700", "840", "1.20", "1.39", "160", "200"]
    assert "FP8 product of [5, 7] and [7, 6]" in caption


def test_a_finding_is_told() -> None:
    assert told({"product_lost": 1.2, "allowed": 1.386}) == "lost 1.200 of 1.386 allowed"
