"""Tables of what bench_deep_ep.py measured of the drop-in for DeepEP V1."""

from __future__ import annotations

from typing import TypedDict

from benchmarks.measuring.markdown import row


class HiddenTimes(TypedDict):
    """Communication and a product, as measuring/deep_ep_overlap.py writes them."""

    communication_us: float
    product_us: float
    together_us: float
    share: float


class DeepEPResult(TypedDict):
    """The parts of a result that a table shows."""

    configuration: dict[str, int]
    hardware: dict[str, str]
    versions: dict[str, str]
    command: str
    slowest_rank_us: dict[str, float]
    slowest_rank_units: dict[str, float]
    hidden: dict[str, HiddenTimes]


def render_deep_ep(result: DeepEPResult) -> str:
    """Return three tables: times of calls, what they cost the host, and what a product hides."""
    lines = [row("call", "us"), row("---", "---:")]
    lines += [row(name, f"{us:.1f}") for name, us in result["slowest_rank_us"].items()]
    lines += ["", row("one token, launched from Python", "add_ of torch"), row("---", "---:")]
    lines += [row(name, f"{units:.1f}") for name, units in result["slowest_rank_units"].items()]
    heads = ("communication, us", "product, us", "one after the other", "together", "hidden")
    lines += ["", row("beside a product", *heads), row("---", *["---:"] * len(heads))]
    for name, each in result["hidden"].items():
        times = (each["communication_us"], each["product_us"])
        cells = (*times, sum(times), each["together_us"])
        lines.append(row(name, *(f"{us:.0f}" for us in cells), f"{each['share']:.0%}"))
    sizes = result["configuration"]
    caption = (
        f"{sizes['ranks']} ranks on {result['hardware']['accelerator']}, H = {sizes['hidden']}, "
        f"top-{sizes['top_k']} of {sizes['experts']}, normal mode on {sizes['num_sms']} SMs, torch "
        f"{result['versions']['torch']}; medians on the slowest rank, low latency in a captured "
        "graph, normal mode launched from Python, dispatch with its layout; hidden: of the shorter "
        f"of both: `{result['command']}`"
    )
    return "\n".join([*lines, "", caption, ""])
