import json
from pathlib import Path

import pytest

from benchmarks.readme_table import (
    RESULTS,
    CopiesResult,
    GemmResult,
    Result,
    fill,
    render,
    render_gemm,
    render_nvlink,
)

REPO = Path(__file__).parents[2]


def result() -> Result:
    ms = {span: {"p50": 10.0, "p95": 12.34, "p99": 20.0} for span in ("combine", "total")}
    twice = {span: {name: 2 * value for name, value in one.items()} for span, one in ms.items()}
    return {
        "configuration": {"ranks": 4, "transport": "gloo", "pairs": 30},
        "hardware": {"num_cores": 2, "processor": "A Processor"},
        "versions": {"torch": "2.13"},
        "command": "scripts/launch_multi_rank.sh 4 benchmarks/bench.py",
        "contenders": {
            "epcomm": {"ms": ms, "sent_bytes": {"total": 23_180_000}},
            "expert_rows": {"ms": twice, "sent_bytes": {"total": 50_390_000}},
        },
        "ratio_of_medians": {"combine": 2.0, "total": 2.004},
    }


def test_a_result_becomes_a_table() -> None:
    table, caption = render(result()).split("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0][:2] == ["ms on the slowest rank", "epcomm p50"]
    assert rows[0][-1] == "times as fast"
    assert rows[2] == ["combine", "10.0", "12.3", "20.0", "20.0", "24.7", "40.0", "2.00"]
    assert rows[4] == ["sent by a rank", "23.18 MB", "", "", "50.39 MB", "", "", ""]
    assert {len(row) for row in rows} == {8}
    assert caption == (
        "4 ranks over gloo on 2 cores of A Processor, torch 2.13, 30 calls of each in turn: "
        "`scripts/launch_multi_rank.sh 4 benchmarks/bench.py`\n"
    )


def test_copies_of_the_same_run_are_told_below_the_table() -> None:
    copies = CopiesResult(
        copied_bytes=123_400_000,
        touched_bytes=352_000_000,
        copy_gb_per_s=12.34,
        copied_over_copy_rate=0.163,
        touched_over_copy_rate=0.238,
    )
    configuration = {**result()["configuration"], "backend": "shared_memory"}
    found: Result = {**result(), "configuration": configuration, "copies": copies}
    table, caption, told = render(found).split("\n\n")
    assert table == render(result()).split("\n\n")[0]
    assert caption.startswith("4 ranks over gloo, epcomm in shared_memory on 2 cores of A Process")
    assert "copy 12.3 GB/s" in told
    assert "reaches 16% if rows out and sums back are counted once (123.4 MB" in told
    assert "and 24% if" in told
    assert "(352.0 MB)" in told


def test_only_what_stands_between_markers_is_replaced(tmp_path: Path) -> None:
    found = result() | {"benchmark": "dispatch_combine"}
    (tmp_path / "one.json").write_text(json.dumps(found), encoding="utf-8")
    text = "before\n<!-- benchmark:one -->\nold\n<!-- /benchmark -->\nafter\n"
    filled = fill(text, tmp_path)
    expected = render(result())
    assert filled == f"before\n<!-- benchmark:one -->\n{expected}<!-- /benchmark -->\nafter\n"
    assert fill(filled, tmp_path) == filled


def test_a_marker_without_a_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fill("<!-- benchmark:missing -->\n<!-- /benchmark -->", tmp_path)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/performance.md", "docs/migrating_from_deepep.md"]
)
def test_a_page_shows_the_results_that_lie_here(page: str) -> None:
    text = (REPO / page).read_text("utf-8")
    assert "<!-- benchmark:" in text
    assert fill(text) == text, f"run: python -m benchmarks.readme_table {page}"


def gemm_result() -> GemmResult:
    ms = {"fp8": 2.0, "bf16": 3.0, "fp8 in triton": 2.5}
    later = ms | {"fp8 masked": 2.0}
    return {
        "configuration": {"experts": 32, "hidden": 7168, "inner": 2048, "calls": 30},
        "hardware": {"accelerator": "A GPU"},
        "versions": {"torch": "2.13"},
        "command": "python -m benchmarks.bench_gemm",
        "findings": [
            {
                "rows": rows,
                "skew": skew,
                "ms": {name: {"p50": value, "p95": 9.0} for name, value in found.items()},
                "weights_over_copy_rate": 0.876,
            }
            for rows, skew, found in ((32768, 8, ms), (1024, 1, later))
        ],
    }


def test_experts_become_a_table() -> None:
    table, caption = render_gemm(gemm_result()).split("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0] == ["rows", "fp8 p50 ms", "fp8 in triton p50 ms", "bf16 p50 ms", "times as fast"]
    assert rows[2] == ["32768, skewed 8:1", "2.00", "2.50", "3.00", "1.50"]
    assert rows[3] == ["1024", "2.00", "2.50", "3.00", "1.50"]
    assert "on A GPU, torch 2.13; 1024 rows read the matrices at 88%" in caption


def test_nvlink_becomes_two_tables() -> None:
    result = json.loads((RESULTS / "h200_dispatch_combine_x4.json").read_text("utf-8"))
    by_tokens, by_sms, caption = render_nvlink(result).split("\n\n")
    assert by_tokens.startswith("| tokens a rank |")
    assert by_sms.startswith("| SMs |")
    assert "on the slowest rank; remote bytes alone, at 4096 tokens: `" in caption
    assert ", epcomm 12f0152fb78c with changes; medians" in caption


def test_every_result_can_be_shown() -> None:
    results = {path: json.loads(path.read_text("utf-8")) for path in RESULTS.glob("*.json")}
    compared = {p: r for p, r in results.items() if r["benchmark"] == "dispatch_combine"}
    assert compared
    for path, found in compared.items():
        assert "times as fast" in render(found), path
    gemms = {p: r for p, r in results.items() if r["benchmark"].startswith("gemm")}
    assert gemms
    for path, found in gemms.items():
        assert "times as fast" in render_gemm(found), path
