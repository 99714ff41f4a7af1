"""Tables in pages are those of the results; the pages show every kind of table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.readme_table import RESULTS, fill, render, render_gemm

REPO = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "page", ["README.md", "docs/performance.md", "docs/migrating_from_deepep.md"]
)
def test_a_page_shows_the_results(page: str) -> None:
    text = (REPO / page).read_text("utf-8")
    assert "<!-- benchmark:" in text
    assert fill(text) == text, f"run: python -m benchmarks.readme_table {page}"


def test_only_the_text_between_markers_is_replaced() -> None:
    text = "before\n<!-- benchmark:gloo_normal -->\nold\n<!-- /benchmark -->\nafter\n"
    filled = fill(text)
    assert filled.startswith("before\n<!-- benchmark:gloo_normal -->\n")
    assert filled.endswith("<!-- /benchmark -->\nafter\n")
    assert "old" not in filled
    assert "times as fast" in filled


def test_a_marker_without_a_result_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        fill("<!-- benchmark:missing -->\n<!-- /benchmark -->")


def test_results_that_no_page_shows_can_be_shown_too() -> None:
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text("utf-8"))
        if found["benchmark"] == "dispatch_combine":
            assert "times as fast" in render(found), path
        elif found["benchmark"].startswith("gemm"):
            assert "times as fast" in render_gemm(found), path
