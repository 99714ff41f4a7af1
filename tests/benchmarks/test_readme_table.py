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


def test_a_table_of_layers_has_parts_and_bounds() -> None:
    """The test uses a made-up result: a layer of two parts of the time of its bound."""
    result = json.loads((RESULTS / "h200x2_bench.json").read_text("utf-8"))
    spans = {"dispatch": 10.0, "products": 50.0, "combine": 20.0, "layer": 78.0}
    layer = {
        "mode": "low_latency",
        "backend": "nvlink",
        "runner": "fp8_wgmma",
        "weights": "fp8",
        "tokens": 128,
        "in_graph": True,
        "us": {span: {"p50": us} for span, us in spans.items()},
    }
    bound = {"tokens": 128, "weights": "fp8", "us": {**spans, "layer": 40.0}}
    rates = {"copy_gb_per_s": 4237.2, "fp8_tflops": 1431.0}
    text = render({**result, "results": [layer], "bounds": [bound], "rates": rates})
    assert "| 128 | fp8 | bound | 10 | 50 | 20 | 40 |" in text
    assert "| 128 | fp8 | low latency, nvlink, fp8_wgmma, graph | 10 | 50 | 20 | 78 |" in text
    assert "the bound follows from copy 4237 GB/s, fp8 1431 TFLOP/s" in text
