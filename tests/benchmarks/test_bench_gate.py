"""The benchmark of gates: its routers and their check, on kernels that are interpreted."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.bench_quantize import CheckError
from benchmarks.readme_table import RESULTS
from benchmarks.routing.bench_gate import (
    SHAPES,
    Finding,
    count_differing,
    measure,
    routers_of,
    table_of,
)
from benchmarks.routing.tables import render_gate
from epcomm.bench.timing import Percentiles
from epcomm.records import TopKOutput

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.slow
def test_every_router_passes_its_check() -> None:
    for shape in SHAPES:
        logits = torch.randn(8, shape.num_experts, generator=torch.Generator().manual_seed(0))
        calls = routers_of(shape, logits.to(DEVICE))
        assert list(calls)[:4] == ["reference", "gate", "gate, load", "gate, load, replicas"]
        for call in calls.values():
            assert count_differing(call, calls["reference"], shape.num_experts) == 0


def test_a_wrong_router_gets_no_number() -> None:
    ids, weights = torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5)

    def found(ids: torch.Tensor, weights: torch.Tensor) -> TopKOutput:
        return TopKOutput(topk_ids=ids, topk_weights=weights)

    with pytest.raises(CheckError, match="weights differ by 1"):
        count_differing(lambda: found(ids, weights * 1.1), lambda: found(ids, weights), 4)
    calls = {
        "reference": lambda: found(ids, weights),
        "gate": lambda: found(ids + 1, weights),
    }
    finding = measure("gate", SHAPES[0], calls, 3, 1)
    assert finding.fault == "3 of 3 tokens have other experts"
    times = Percentiles(p50=1.0, p95=1.0, p99=2.0)
    timed = Finding(router="gate", shape="qwen3", tokens=3, us=times, alone_us=times)
    assert table_of([finding, timed]).row_count == 2


def test_a_router_without_a_number_leaves_its_cell_empty() -> None:
    result = json.loads((RESULTS / "h200_gate.json").read_text("utf-8"))
    findings = [
        each | ({"us": None, "fault": "no"} if each["router"] == "sglang" else {})
        for each in result["findings"]
    ]
    lines = render_gate(result | {"findings": findings}).splitlines()
    assert lines[-1].count("SGLang's Triton gate, deepseek v3, 128 tokens: no;") == 1
    rows = lines[2:-2]
    assert len(rows) == 2 * len(SHAPES)
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert cells[0] == "deepseek v3, 128 tokens"
    assert [not cell for cell in cells] == [False] * 5 + [True, False]
