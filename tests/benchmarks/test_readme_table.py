"""Tables in pages are those of the results; the pages show every kind of table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.readme_table import RESULTS, fill
from benchmarks.tables import render

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


def test_results_beside_copies_say_how_near_they_are() -> None:
    """The test uses a made-up result, because no page has one of this program."""
    result = json.loads((RESULTS / "h200x2_bench.json").read_text("utf-8"))
    older = json.loads((RESULTS / "cpu_shared_memory.json").read_text("utf-8"))
    text = render({**result, "benchmark": "memory", "copies": older["copies"]})
    assert text.startswith("| tokens a rank | normal, nvlink |")
    assert "all ranks at once copy 14.8 GB/s. Of that rate a pair reaches 21%" in text
