"""Write the results of benchmarks into a Markdown file, between markers; nobody types a number.

    python -m benchmarks.readme_table README.md docs/performance.md

replaces what stands between `<!-- benchmark:NAME -->` and `<!-- /benchmark -->` by a table made
from benchmarks/results/NAME.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import wrap
from typing import Annotated, NotRequired, TypedDict

import typer

from benchmarks.bench_table import render_bench
from benchmarks.hosts.table import render_hosts
from benchmarks.measuring.deep_ep_table import render_deep_ep
from benchmarks.measuring.markdown import row, where_measured
from benchmarks.routing.tables import render_gate, render_placement
from epcomm.planning.measurements import BENCHMARK

RESULTS = Path(__file__).parent / "results"

# What has replaced the kernels that a result measured, by its commit.
_REPLACED = {
    "46fea7d": (
        "dispatch of normal mode was Triton there, and is one launch in CUDA C++ since d8178bd, on "
        "Hopper and later; the rows of T = 4096 measure kernels that an H200 no longer runs"
    )
}
# Characters of a line of a caption.
_WIDTH = 120
_MARKED = re.compile(
    r"(?P<start><!-- benchmark:(?P<name>[\w-]+) -->\n).*?"
    r"(?P<end><!-- /benchmark -->)",
    re.DOTALL,
)
_QUANTILES = ("p50", "p95", "p99")
# Columns of a result of NVLink buffers: the spans that a way takes, which are added up.
_WAYS = {
    "low latency FP8 pair": ("pair_in_chain_fp8",),
    "low latency BF16 pair": ("pair_in_chain_bf16",),
    "normal FP8 dispatch": ("dispatch_fp8",),
    "normal BF16 dispatch": ("dispatch",),
    "normal combine": ("combine",),
    "NCCL all-to-all, both ways": ("all_to_all_dispatch", "all_to_all_combine"),
    "NCCL all-gather and reduce-scatter": ("all_gather", "reduce_scatter"),
}


class ContenderResult(TypedDict):
    """The result of one contender, as report.py writes it."""

    ms: dict[str, dict[str, float]]
    sent_bytes: dict[str, int]


class GemmFinding(TypedDict):
    """One distribution of rows, as bench_gemm.py writes it."""

    rows: int
    skew: int
    ms: dict[str, dict[str, float]]
    weights_over_copy_rate: float


class GemmResult(TypedDict):
    """The parts of a result of experts that a table shows."""

    configuration: dict[str, int]
    hardware: dict[str, str | int]
    versions: dict[str, str]
    command: str
    findings: list[GemmFinding]


class CopiesResult(TypedDict):
    """epcomm beside copies, as measuring/copy_rate.py writes it."""

    copied_bytes: int
    touched_bytes: int
    copy_gb_per_s: float
    copied_over_copy_rate: float
    touched_over_copy_rate: float


class NVLinkTimes(TypedDict):
    """All ways at one number of tokens, as bench_nvlink.py writes it; us: by what is timed."""

    tokens: int
    us: dict[str, dict[str, float]]


class NVLinkRates(TypedDict):
    """Normal mode on some SMs."""

    num_sms: int
    remote_gb_per_s: dict[str, float]


class NVLinkResult(TypedDict):
    """The parts of a result of NVLink buffers that a table shows."""

    configuration: dict[str, int]
    hardware: dict[str, str | int]
    versions: dict[str, str]
    command: str
    by_tokens: list[NVLinkTimes]
    by_sms: list[NVLinkRates]


class EagerTimes(TypedDict):
    """Hold what a call costs the slowest host; unit_us: of torch's add_ to one element."""

    us: float
    unit_us: float
    units: float
    python_calls: float
    torch_operators: int


class EagerResult(TypedDict):
    """The parts of a result of eager calls that a table shows."""

    configuration: dict[str, int]
    hardware: dict[str, str]
    versions: dict[str, str]
    command: str
    slowest_rank: dict[str, EagerTimes]


class OverlapFinding(TypedDict):
    """A product beside dispatches, as bench_overlap.py writes it."""

    wire: str
    num_sms: int
    us: dict[str, dict[str, float]]
    product_lost: float
    allowed: float


class OverlapResult(TypedDict):
    """The parts of a result of overlap that a table shows."""

    configuration: dict[str, int]
    hardware: dict[str, str]
    versions: dict[str, str]
    command: str
    findings: list[OverlapFinding]


class BesideTimes(TypedDict):
    """One piece of work; us: medians by contender."""

    work: str
    us: dict[str, float]


class BesideResult(TypedDict):
    """Contenders beside one another; boundaries: what the work of one holds and of another not."""

    configuration: dict[str, int]
    hardware: dict[str, str]
    versions: dict[str, str]
    boundaries: list[str]
    rows: list[BesideTimes]


class Result(TypedDict):
    """The parts of a result that a table shows."""

    configuration: dict[str, str | int | bool]
    hardware: dict[str, str | int]
    versions: dict[str, str]
    command: str
    contenders: dict[str, ContenderResult]
    ratio_of_medians: dict[str, float]
    copies: NotRequired[CopiesResult]


def fill(text: str, results: Path = RESULTS) -> str:
    """`text` with a fresh table between each pair of markers.

    Raises:
        FileNotFoundError: a marker names a result that is not there.
    """

    def table(match: re.Match[str]) -> str:
        text = (results / f"{match['name']}.json").read_text("utf-8")
        rendered = _render_kind(text)
        return f"{match['start']}{rendered}{match['end']}"

    return _MARKED.sub(table, text)


def _render_kind(text: str) -> str:
    """Render a result by the name of its benchmark; each kind has another record."""
    result = json.loads(text)
    kind = result["benchmark"]
    if kind == "nvlink":
        return render_nvlink(result)
    if kind == "beside":
        return render_beside(result)
    if kind == "deep_ep":
        return render_deep_ep(result)
    if kind == "eager":
        return render_eager(result)
    if kind == "overlap":
        return render_overlap(result)
    if kind == "gate":
        return render_gate(result)
    if kind == "placement":
        return render_placement(result)
    if kind == "hosts":
        return render_hosts(result)
    if kind == BENCHMARK:
        return render_bench(result)
    return render_gemm(result) if kind.startswith("gemm") else render(result)


def render(result: Result) -> str:
    """Return the table of one result, and under it what was measured where."""
    contenders = result["contenders"]
    heads = [f"{name} {quantile}" for name in contenders for quantile in _QUANTILES]
    lines = [
        row("ms on the slowest rank", *heads, "times as fast"),
        row("---", *["---:"] * (len(heads) + 1)),
    ]
    for span, ratio in result["ratio_of_medians"].items():
        cells = [
            f"{contender['ms'][span][quantile]:.1f}"
            for contender in contenders.values()
            for quantile in _QUANTILES
        ]
        lines.append(row(span.replace("_", " "), *cells, f"{ratio:.2f}"))
    sent = [f"{one['sent_bytes']['total'] / 1e6:.2f} MB" for one in contenders.values()]
    blanks = [""] * (len(_QUANTILES) - 1)
    lines.append(row("sent by a rank", *[cell for one in sent for cell in (one, *blanks)], ""))
    captions = [_caption(result)]
    if "copies" in result:
        captions += ["", _copies_caption(result["copies"])]
    return "\n".join([*lines, "", *captions, ""])


def render_gemm(result: GemmResult) -> str:
    """Return the table of experts: BF16 comes last among the ways timed in all findings."""
    findings = result["findings"]
    names = [name for name in findings[0]["ms"] if name != "bf16"]
    lines = [
        row("rows", *(f"{name} p50 ms" for name in (*names, "bf16")), "times as fast"),
        row(*["---:"] * (len(names) + 3)),
    ]
    for finding in findings:
        skew = f", skewed {finding['skew']}:1" if finding["skew"] > 1 else ""
        ms = {name: finding["ms"][name]["p50"] for name in (*names, "bf16")}
        ratio = ms["bf16"] / ms[names[0]]
        cells = [f"{value:.2f}" for value in ms.values()]
        lines.append(row(f"{finding['rows']}{skew}", *cells, f"{ratio:.2f}"))
    sizes, share = result["configuration"], findings[-1]["weights_over_copy_rate"]
    caption = (
        f"{sizes['experts']} experts, H = {sizes['hidden']}, I = {sizes['inner']}, on "
        f"{result['hardware']['accelerator']}, torch {result['versions']['torch']}; "
        f"{findings[-1]['rows']} rows read the matrices at {share:.0%} of the rate of a copy: "
        f"`{result['command']}`"
    )
    return "\n".join([*lines, "", caption, ""])


def render_nvlink(result: NVLinkResult) -> str:
    """Two tables: by tokens, a column for each way; by SMs, what crosses NVLink."""
    lines = [
        row("tokens a rank", *_WAYS),
        row(*["---:"] * (1 + len(_WAYS))),
    ]
    for finding in result["by_tokens"]:
        us = {name: span["p50"] for name, span in finding["us"].items()}
        sums = [[us[part] for part in parts if part in us] for parts in _WAYS.values()]
        cells = [f"{sum(found):.0f}" if found else "" for found in sums]
        lines.append(row(str(finding["tokens"]), *cells))
    lines += ["", *_by_sms(result["by_sms"])]
    sizes, hardware = result["configuration"], result["hardware"]
    caption = (
        f"{sizes['ranks']} ranks on {hardware['accelerator']}, H = {sizes['hidden']}, top-"
        f"{sizes['top_k']} of {sizes['experts']}, torch {result['versions']['torch']}, "
        f"{_commit(result['versions'])}; medians in us of captured graphs on the slowest "
        f"rank; remote bytes alone, at {sizes['sms_tokens']} tokens: `{result['command']}`"
    )
    return "\n".join([*lines, "", caption, ""])


def render_eager(result: EagerResult) -> str:
    """Return the table of what calls cost the host that launches them."""
    lines = [
        row("one token a rank", "add_ of torch", "us", "functions of Python", "operators of torch"),
        row("---", *["---:"] * 4),
    ]
    for name, each in result["slowest_rank"].items():
        cells = (each["units"], each["us"], each["python_calls"], each["torch_operators"])
        lines.append(row(name, f"{cells[0]:.1f}", *(f"{cell:.0f}" for cell in cells[1:])))
    sizes = result["configuration"]
    caption = (
        f"{sizes['ranks']} ranks on {result['hardware']['accelerator']}, H = {sizes['hidden']}, I ="
        f" {sizes['inner']}, top-{sizes['top_k']} of {sizes['experts']}, FP8 experts, torch "
        f"{result['versions']['torch']}; medians on the slowest rank: `{result['command']}`"
    )
    return "\n".join([*lines, "", caption, ""])


def render_overlap(result: OverlapResult) -> str:
    """Return the table of what a product and dispatches cost each other."""
    names = ("product", "narrow_product_beside", "dispatch", "dispatch_beside")
    heads = (
        "product",
        "beside dispatches",
        "times as long",
        "allowed",
        "dispatch",
        "beside the product",
    )
    lines = [row("SMs of dispatch", *heads), row("---", *["---:"] * len(heads))]
    for each in result["findings"]:
        cells = [f"{each['us'][name]['p50']:.0f}" for name in names]
        cells[2:2] = [f"{each['product_lost']:.2f}", f"{each['allowed']:.2f}"]
        lines.append(row(f"{each['num_sms']}, {each['wire'].upper()} rows", *cells))
    sizes = result["configuration"]
    caption = (
        f"{sizes['ranks']} ranks on {result['hardware']['accelerator']}, {sizes['sms_tokens']} "
        f"tokens a rank, H = {sizes['hidden']}, top-{sizes['top_k']} of {sizes['experts']}, FP8 "
        f"product of [{sizes['m']}, {sizes['k']}] and [{sizes['k']}, {sizes['n']}], torch "
        f"{result['versions']['torch']}; medians in us on the slowest rank: `{result['command']}`"
    )
    return "\n".join([*lines, "", caption, ""])


def render_beside(result: BesideResult) -> str:
    """Return the table of contenders beside one another, and what each includes."""
    names = list(result["rows"][0]["us"])
    lines = [row("us", *names), row("---", *["---:"] * len(names))]
    for each in result["rows"]:
        lines.append(row(each["work"], *(f"{each['us'][name]:g}" for name in names)))
    sizes, versions = result["configuration"], result["versions"]
    which = ", ".join(f"{name} {versions[name]}" for name in names)
    caption = (
        f"{sizes['ranks']} ranks on {result['hardware']['accelerator']}, H = {sizes['hidden']}, "
        f"top-{sizes['top_k']} of {sizes['experts']}, torch {versions['torch']}, {which}; medians "
        f"of captured graphs on the slowest rank. {'; '.join(result['boundaries'])}."
    )
    if versions["epcomm"] in _REPLACED:
        caption += f" Kernels of epcomm {versions['epcomm']}: {_REPLACED[versions['epcomm']]}."
    return "\n".join([*lines, "", *wrap(caption, _WIDTH, break_on_hyphens=False), ""])


def _by_sms(by_sms: list[NVLinkRates]) -> list[str]:
    names = list(by_sms[0]["remote_gb_per_s"])
    lines = [row("SMs", *(f"{name.replace('_', ' ')}, GB/s" for name in names))]
    lines.append(row(*["---:"] * (1 + len(names))))
    for rates in by_sms:
        cells = [f"{rates['remote_gb_per_s'][name]:.0f}" for name in names]
        lines.append(row(str(rates["num_sms"]), *cells))
    return lines


def _commit(versions: dict[str, str]) -> str:
    """Name the commit that was measured, of which a + says that files differed from it."""
    commit = versions["commit"]
    return f"epcomm {commit.removesuffix('+')}{' with changes' if commit.endswith('+') else ''}"


def _caption(result: Result) -> str:
    configuration, hardware = result["configuration"], result["hardware"]
    where = where_measured(hardware)
    # Results from before it was recorded are of `collective`.
    buffer = f", epcomm in {configuration['backend']}" if "backend" in configuration else ""
    return (
        f"{configuration['ranks']} ranks over {configuration['transport']}{buffer} on {where}, "
        f"torch {result['versions']['torch']}, {configuration['pairs']} calls of each in turn: "
        f"`{result['command']}`"
    )


def _copies_caption(copies: CopiesResult) -> str:
    return (
        f"In the same run all ranks at once copy {copies['copy_gb_per_s']:.1f} GB/s. Of that rate "
        f"`total without grouping` reaches {copies['copied_over_copy_rate']:.0%} if rows out and "
        f"sums back are counted once ({copies['copied_bytes'] / 1e6:.1f} MB of all ranks), and "
        f"{copies['touched_over_copy_rate']:.0%} if what must be read and what must be written are "
        f"both counted, there and of the copies ({copies['touched_bytes'] / 1e6:.1f} MB)."
    )


def main(
    paths: Annotated[list[Path], typer.Argument(help="Markdown files with markers.")],
) -> None:
    """Bring the tables of files up to date."""
    for path in paths:
        path.write_text(fill(path.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
