"""Measure routing on one GPU: the gate kernel, its additional work, and equivalent routers.

    python -m benchmarks.routing.bench_gate --output gate.json

Every router is compared with the reference first, and one that differs is not measured. A time is
that of one call in a device graph of many. SGLang's gate is included if its package can be
imported.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.measuring import Output, gpu_of, report_of, write_report
from epcomm.bench.check import CheckError
from epcomm.bench.timing import Clock, Percentiles, captured
from epcomm.cli.records import takes_records
from epcomm.records import ReplicaTable, TopKOutput
from epcomm.routing import RoutingSpec, presets, route
from epcomm.routing.triton_gating import TritonGate

# Calls in a graph: enough that its start and end do not affect the time.
CALLS_OF_GRAPH = 50
# Tokens whose experts may differ from the reference's, because rounding decides between close
# scores.
MOST_DIFFERING = 1e-4
# Tolerance of weights: 8 units in the last place, and more for another library, whose accuracy is
# not documented.
RTOL = 8 * 2**-23
RTOL_OF_OTHERS = 1e-4

Call = Callable[[], TopKOutput]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A routing with its experts; sglang: its arguments of SGLang's gate."""

    name: str
    spec: RoutingSpec
    num_experts: int
    sglang: Mapping[str, object]


SHAPES = (
    Shape(
        name="deepseek v3",
        spec=presets.deepseek_v3(top_k=8, num_groups=8, topk_groups=4, routed_scaling_factor=2.5),
        num_experts=256,
        sglang={
            "scoring_func": "sigmoid",
            "num_expert_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "apply_routed_scaling_factor_on_output": True,
        },
    ),
    Shape(
        name="qwen3",
        spec=presets.qwen3_moe(top_k=8, renormalize=True),
        num_experts=128,
        sglang={"scoring_func": "softmax"},
    ),
    Shape(
        name="kimi k2",
        spec=presets.afmoe(top_k=8, routed_scaling_factor=2.8),
        num_experts=384,
        sglang={
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.8,
            "apply_routed_scaling_factor_on_output": True,
        },
    ),
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The time of one router at one number of tokens in us, or the reason why it has none."""

    router: str
    shape: str
    tokens: int
    us: Percentiles | None = None
    fault: str = ""


def routers_of(shape: Shape, logits: Tensor) -> dict[str, Call]:
    """Return the routers of these logits, by name; the reference is called `reference`."""
    spec, num_experts, device = shape.spec, shape.num_experts, logits.device
    bias = torch.randn(num_experts, device=device) / 8 if spec.correction_bias != "none" else None
    gate = TritonGate(spec, num_experts)
    load = torch.zeros(16, num_experts, dtype=torch.int64, device=device)
    # Every expert is in its original position.
    replicas = torch.full((num_experts, 2), -1, dtype=torch.int32, device=device)
    replicas[:, 0] = torch.arange(num_experts)
    table = ReplicaTable(
        replicas=replicas,
        num_replicas=torch.ones(num_experts, dtype=torch.int32, device=device),
        calls=torch.zeros((), dtype=torch.int64, device=device),
    )

    def gate_then_choose() -> TopKOutput:
        topk = gate(logits, correction_bias=bias, load=load)
        return replace(topk, topk_ids=table.choose(topk.topk_ids))

    routers: dict[str, Call] = {
        "reference": lambda: route(logits, spec, correction_bias=bias),
        "gate": lambda: gate(logits, correction_bias=bias),
        "gate, load": lambda: gate(logits, correction_bias=bias, load=load),
        "gate, load, replicas": lambda: gate(
            logits, correction_bias=bias, load=load, replicas=table
        ),
        "gate, load, then replicas": gate_then_choose,
    }
    fused_gate = _sglang_gate()
    if fused_gate is not None:

        def sglang() -> TopKOutput:
            weights, ids = fused_gate(logits, bias, spec.top_k, **shape.sglang)
            return TopKOutput(topk_ids=ids, topk_weights=weights)

        routers["sglang"] = sglang
    return routers


def check(call: Call, reference: Call, num_experts: int, *, rtol: float = RTOL) -> None:
    """Compare experts and weights with the reference's.

    rtol: the largest relative error of weights.

    Raises:
        CheckError: too many tokens have different experts, or wrong weights.
    """
    first, second = (_spread(each(), num_experts) for each in (call, reference))
    differs = ((first > 0) != (second > 0)).any(1)
    num_differing = int(differs.sum())
    if num_differing > MOST_DIFFERING * len(differs) + 1:
        raise CheckError(f"{num_differing} of {len(differs)} tokens have different experts")
    worst = ((first - second).abs() / second.clamp(min=1e-30))[~differs].max()
    if not worst <= rtol:
        raise CheckError(f"weights have a relative error of {float(worst):.1e}")


def measure(name: str, shape: Shape, calls: Mapping[str, Call], tokens: int, laps: int) -> Finding:
    """Check one router, then time it; a fault becomes part of the finding."""
    finding = Finding(router=name, shape=shape.name, tokens=tokens)
    rtol = RTOL_OF_OTHERS if name == "sglang" else RTOL
    try:
        check(calls[name], calls["reference"], shape.num_experts, rtol=rtol)
        return replace(finding, us=_time_in_graph(calls[name], laps))
    except (CheckError, RuntimeError, AssertionError) as error:
        return replace(finding, fault=str(error).partition("\n")[0])


def run(device: torch.device, *, tokens: Sequence[int], laps: int) -> list[Finding]:
    """Check and measure every router at every size."""
    generator = torch.Generator(device).manual_seed(0)
    findings = []
    for shape in SHAPES:
        for num_tokens in tokens:
            logits = torch.randn(num_tokens, shape.num_experts, generator=generator, device=device)
            calls = routers_of(shape, logits)
            findings += [measure(name, shape, calls, num_tokens, laps) for name in calls]
    return findings


def line_of(finding: Finding) -> str:
    """Return a finding as a line for the terminal."""
    start = f"{finding.router}, {finding.shape}, {finding.tokens} tokens: "
    if finding.us is None:
        return start + finding.fault
    return f"{start}{finding.us.p50:.2f} us, p99 {finding.us.p99:.2f}"


def _time_in_graph(call: Call, laps: int) -> Percentiles:
    """Return microseconds of one call of a graph of many."""

    def many() -> None:
        for _ in range(CALLS_OF_GRAPH):
            call()

    graph = captured(many)
    clock = Clock(torch.device("cuda"))
    graph.replay()
    for _ in range(laps + 1):
        clock.mark()
        graph.replay()
    return Percentiles.of(1e3 * lap / CALLS_OF_GRAPH for lap in clock.take())


def _spread(topk: TopKOutput, num_experts: int) -> Tensor:
    """Return the weight of each expert, [T, E], 0 where it was not chosen."""
    weights = torch.zeros(len(topk.topk_ids), num_experts, device=topk.topk_ids.device)
    return weights.scatter(1, topk.topk_ids.long(), topk.topk_weights)


def _sglang_gate() -> Callable[..., tuple[Tensor, Tensor]] | None:
    try:
        # sglang is not a dependency of this repository.
        from sglang.kernels.ops.moe.moe_fused_gate import (  # pyright: ignore[reportMissingImports]
            moe_fused_gate,
        )
    except ImportError as error:
        print(f"without SGLang's gate: {error}", file=sys.stderr)
        return None
    return moe_fused_gate


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run."""

    tokens: Annotated[str, typer.Option(help="T, with commas.")] = "128,4096"
    laps: Annotated[int, typer.Option(min=1, help="Measured graphs of each.")] = 30


@takes_records
def main(options: Options, output: Output) -> None:
    """Check all routers, measure them, and print the results."""
    device = gpu_of("bench_gate")
    tokens = [int(each) for each in options.tokens.split(",")]
    findings = run(device, tokens=tokens, laps=options.laps)
    sys.stdout.writelines(f"{line_of(each)}\n" for each in findings)
    configuration = {**asdict(options), "calls_of_graph": CALLS_OF_GRAPH}
    report = report_of("gate", configuration, device, "benchmarks.routing.bench_gate")
    write_report({**report, "findings": [asdict(each) for each in findings]}, output)


if __name__ == "__main__":
    typer.run(main)
