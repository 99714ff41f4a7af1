import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.readme_table import RESULTS, fill
from benchmarks.tables import render

REPO = Path(__file__).parents[2]
PAGES = ("README.md", "docs/performance.md", "docs/migrating_from_deepep.md")


def test_pages_show_the_results_and_every_result_has_a_page() -> None:
    texts = {page: (REPO / page).read_text("utf-8") for page in PAGES}
    for page, text in texts.items():
        assert fill(text) == text, f"run: python -m benchmarks.readme_table {page}"
    unseen = {path.stem for path in RESULTS.iterdir() if path.stem not in "".join(texts.values())}
    assert not unseen


def test_only_the_text_between_markers_is_replaced() -> None:
    text = "before\n<!-- benchmark:h100_gate -->\nold\n<!-- /benchmark -->\nafter\n"
    filled = fill(text)
    assert filled.startswith("before\n<!-- benchmark:h100_gate -->\n| us | gate |")
    assert filled.endswith("<!-- /benchmark -->\nafter\n")
    assert "old" not in filled


def test_a_marker_without_a_result_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        fill("<!-- benchmark:missing -->\n<!-- /benchmark -->")


def layer(backend: str, us: float, *, mode: str = "", in_graph: bool = True) -> dict[str, Any]:
    times = {"dispatch": 10.0, "products": 50.0, "combine": 20.0, "layer": us}
    who = {"mode": mode, "backend": backend, "runner": "fp8_wgmma", "in_graph": in_graph}
    spans = {span: {"p50": each} for span, each in times.items()}
    return {**who, "weights": "fp8", "tokens": 128, "us": spans}


def test_tables_of_layers_have_bounds_and_the_distance_to_them() -> None:
    """The result is made up, apart from its conditions."""
    result = json.loads((RESULTS / "h200x4_layer_v3_prefill.json").read_text("utf-8"))
    least = {"dispatch": 5.0, "products": 30.0, "combine": 5.0, "layer": 40.0}
    layers = [
        layer("all_gather", 90.0),
        layer("nvlink", 50.0, mode="low_latency"),
        layer("nvlink", 70.0, mode="low_latency", in_graph=False),
        {**layer("nvlink", 45.0, mode="low_latency"), "overlap": "2 chunks"},
    ]
    bound = {"tokens": 128, "weights": "fp8", "us": least}
    rates = {"copy_gb_per_s": 4237.2, "fp8_tflops": 1431.0}
    given = {**result, "results": layers, "bounds": [bound], "rates": rates}
    text = render(given)
    rows = [
        "bound | 5 | 30 | 5 | 40 | 1.00 |  |",
        "low latency, nvlink, fp8_wgmma, 2 chunks | 10 | 50 | 20 | 45 | 1.12 |  |",
        "low latency, nvlink, fp8_wgmma | 10 | 50 | 20 | 50 | 1.25 | 70 |",
        "torch, all-gather and reduce-scatter, fp8_wgmma | 10 | 50 | 20 | 90 | 2.25 |  |",
    ]
    assert "\n".join(f"| 128 | fp8 | {row}" for row in rows) in text
    assert "the bound follows from copy 4237 GB/s, fp8 1431 TFLOP/s" in text
    row = "| deepseek_v3 on 4 GPUs | fp8 | 128 | 40 | 50 | 1.25 |  | 90 |\n"
    assert f"{row}{row}\n" in render(given, given)
    layers[2] |= {"peak_bytes": {"layer": 3.4e8, "step": 9e8}, "overlap": "chunks=2"}
    layers[2]["us"]["step"] = {"p50": 200.0}
    row = "| fp8 | low latency, nvlink, fp8_wgmma, chunks=2 | 70 | 200 | 0.34 | 0.90 |\n\n"
    assert row in render({**given, "configuration": {**result["configuration"], "backward": True}})
