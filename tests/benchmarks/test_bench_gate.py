import pytest
import torch

pytest.importorskip("triton")


from benchmarks.routing.bench_gate import SHAPES, Finding, check, line_of, measure, routers_of
from epcomm.bench.check import CheckError
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
            check(call, calls["reference"], shape.num_experts)


def test_a_wrong_router_gets_no_number() -> None:
    ids, weights = torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5)

    def found(ids: torch.Tensor, weights: torch.Tensor) -> TopKOutput:
        return TopKOutput(topk_ids=ids, topk_weights=weights)

    with pytest.raises(CheckError, match="weights have a relative error of 1"):
        check(lambda: found(ids, weights * 1.1), lambda: found(ids, weights), 4)
    calls = {"reference": lambda: found(ids, weights), "gate": lambda: found(ids + 1, weights)}
    finding = measure("gate", SHAPES[0], calls, 3, 1)
    assert finding.fault == "3 of 3 tokens have different experts"
    times = Percentiles(p50=1.0, p95=1.0, p99=2.0)
    timed = Finding(router="gate", shape="qwen3", tokens=3, us=times)
    assert line_of(finding).endswith(finding.fault)
    assert line_of(timed) == "gate, qwen3, 3 tokens: 1.00 us, p99 2.00"
