"""Render the results of all programs as Markdown, for readme_table.py."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from epcomm.bench.contenders.all_gather import AllGather
from epcomm.bench.report import TITLES
from epcomm.planning.measurements import BENCHMARK

# A result as its program wrote it. The keys depend on the kind of result.
Result = Mapping[str, Any]

_QUANTILES = ("p50", "p95", "p99")
# Columns of a result of NVLink buffers, and the spans that each adds up.
_WAYS = {
    "low latency FP8 pair": ("pair_in_chain_fp8",),
    "low latency BF16 pair": ("pair_in_chain_bf16",),
    "normal FP8 dispatch": ("dispatch_fp8",),
    "normal BF16 dispatch": ("dispatch",),
    "normal combine": ("combine",),
    "NCCL all-to-all, both ways": ("all_to_all_dispatch", "all_to_all_combine"),
    "NCCL all-gather and reduce-scatter": ("all_gather", "reduce_scatter"),
}
# Backends of a table of the layers of several results.
_LAYER_COLUMNS = ("nvlink", "collective", AllGather.name)
# Columns of a result of overlap.
_OVERLAP = {
    "product": "product",
    "beside dispatches": "narrow_product_beside",
    "dispatch": "dispatch",
    "beside the product": "dispatch_beside",
}
# Columns of a result of experts in eight bits, beside bf16.
_RUNNERS = (
    *("fp8", "fp8 in triton", "deep_gemm", "int8", "mxfp8"),
    *("restored", "restored in the call", "reference"),
)
# Columns of a result between hosts, in ms.
_HOST_SPANS = ("dispatch_without_grouping", "combine", "total_without_grouping")
# Steps of a result of exposed exchanges: their titles, and the step that has their exchange.
_STEPS = {
    "none": ("a layer, every call waits", "none"),
    "chunks": ("a layer in {chunks} chunks", "none"),
    "one by one": ("{layers} decoder layers, micro-batches one by one", "one by one"),
    "micro_batches": ("{layers} decoder layers, two micro-batches in turn", "one by one"),
}
# Routers by the name of their column; `reference` is plain torch.
_ROUTERS = {
    "gate": "gate",
    "gate, load": "and counts the load",
    "gate, load, replicas": "and chooses replicas",
    "gate, load, then replicas": "replicas chosen by torch",
    "sglang": "SGLang's Triton gate",
    "reference": "plain torch",
}


def render(result: Result, *others: Result) -> str:
    """Return the tables of one result, or one table of the layers of several, and a caption."""
    if others:
        return _render_layers([result, *others])
    return _RENDERERS[result["benchmark"]](result)


def _render_layers(results: Sequence[Result]) -> str:
    """Return a row for each bound: what a layer of each backend takes from a graph."""
    rows = []
    for result in results:
        sizes = result["configuration"]
        for bound in _bounds_of(result):
            us = {
                each["backend"]: each["us"]["layer"]["p50"]
                for each in _layers_of(result, bound)
                if each["in_graph"] and not each.get("overlap")
            }
            least = bound["us"]["layer"]
            cells = [_number(us.get(name), 0) for name in _LAYER_COLUMNS]
            ratio = us["nvlink"] / least if "nvlink" in us else None
            cells.insert(1, _number(ratio, 2))
            layer = f"{sizes['shape']} on {sizes['ranks']} GPUs"
            rows.append([layer, bound["weights"], str(bound["tokens"]), f"{least:.0f}", *cells])
    columns = [TITLES.get(name, name) for name in _LAYER_COLUMNS]
    columns.insert(1, "over the bound")
    heads = ["us of a layer", "experts", "tokens a GPU", "bound", *columns]
    caption = (
        f"{_where(results[0])}, {_torch(results[0])}, {_commits(results)}; medians of calls in "
        "graphs on the slowest rank"
    )
    return _page(_table(heads, rows), caption)


def _bounds_of(result: Result) -> list[Result]:
    return sorted(result["bounds"], key=lambda each: (each["tokens"], each["weights"]))


def _layers_of(result: Result, bound: Result) -> list[Result]:
    """Return the layers at the T, and with the format of experts, of a bound."""
    case = bound["tokens"], bound["weights"]
    return [each for each in result["results"] if (each["tokens"], each["weights"]) == case]


def _render_bench(result: Result) -> str:
    """Return medians in us: of pairs, or of layers with their parts."""
    sizes, rates = result["configuration"], result.get("rates")
    table = _table_of_layers(result) if rates else _table_of_pairs(result["results"])
    what = "whole layers and their parts" if rates else "dispatch and combine"
    if sizes.get("backward"):
        table, rates = _table_of_steps(result), None
        what = "whole layers launched from Python, and the most memory that a call allocates,"
    caption = (
        f"{sizes['ranks']} ranks over {sizes['transport']} on {_where(result)}, {_layer(sizes)}, "
        f"{sizes['dtype']}, {_torch(result)}, {_commits([result])}; medians in us of {what} on "
        f"the slowest rank, {sizes['iterations']} calls of each in turn: `{result['command']}`"
    )
    if rates:
        units = {"_gb_per_s": " {:.0f} GB/s", "_tflops": " {:.0f} TFLOP/s"}
        found = [
            name.removesuffix(suffix) + text.format(rate)
            for name, rate in rates.items()
            for suffix, text in units.items()
            if name.endswith(suffix)
        ]
        caption += f"; I = {sizes['intermediate']}; the bound follows from {', '.join(found)}"
    return _page(table, caption)


def _table_of_pairs(timings: Sequence[Result]) -> list[str]:
    """Return a row for each T and a column for each contender."""
    cells = {
        (str(each["tokens"]), _contender(each, in_graph=each["in_graph"])): (
            f"{each['us']['pair']['p50']:.0f}"
        )
        for each in timings
    }
    rows, names = (list(dict.fromkeys(found)) for found in zip(*cells, strict=True))
    table = [[row, *(cells.get((row, name), "") for name in names)] for row in rows]
    return _table(["tokens a rank", *names], table, is_first_text=False)


def _table_of_layers(result: Result) -> list[str]:
    """Return a row for each bound and layer, by T and format of the experts, the fastest first.

    Times are those of graphs where the layer is replayed from one; the last column has the others.
    """
    spans = ("dispatch", "products", "combine", "layer")
    rows = []
    for bound in _bounds_of(result):
        graphs: dict[str, dict[str, float]] = {}
        eager: dict[str, dict[str, float]] = {}
        for each in _layers_of(result, bound):
            us = {span: each["us"][span]["p50"] for span in spans}
            (graphs if each["in_graph"] else eager)[_contender(each)] = us
        found = sorted((eager | graphs).items(), key=lambda named: named[1]["layer"])
        for name, us in [("bound", bound["us"]), *found]:
            cells = [f"{us[span]:.0f}" for span in spans]
            cells.append(f"{us['layer'] / bound['us']['layer']:.2f}")
            launched = eager[name]["layer"] if name in eager else None
            rows.append(
                [str(bound["tokens"]), bound["weights"], name, *cells, _number(launched, 0)]
            )
    heads = ["tokens a rank", "experts", "", *spans, "over the bound", "layer from Python"]
    return _table(heads, rows, is_first_text=False)


def _table_of_steps(result: Result) -> list[str]:
    """Return a row for each layer launched from Python: forward and with backward, with memory."""
    rows = []
    for bound in _bounds_of(result):
        for each in _layers_of(result, bound):
            if each["in_graph"]:
                continue
            us = {span: times["p50"] for span, times in each["us"].items()}
            peaks = {part: peak / 1e9 for part, peak in each["peak_bytes"].items()}
            cells = [_number(us.get(part), 0) for part in ("layer", "step")]
            cells += [_number(peaks.get(part), 2) for part in ("layer", "step")]
            rows.append([each["weights"], _contender(each), *cells])
    heads = ["forward, us", "with backward, us", "forward, GB", "with backward, GB"]
    return _table(["experts", "layer", *heads], rows)


def _contender(timing: Result, *, in_graph: bool = False) -> str:
    parts = [(timing["mode"] or "torch").replace("_", " ")]
    parts.append(TITLES.get(timing["backend"], timing["backend"]))
    parts += [timing.get(name, "") for name in ("runner", "overlap")]
    return ", ".join(filter(None, [*parts, "graph" if in_graph else ""]))


def _render_nvlink(result: Result) -> str:
    """Return two tables: by tokens, a column for each way; by SMs, what crosses NVLink."""
    rows = []
    for finding in result["by_tokens"]:
        us = {name: span["p50"] for name, span in finding["us"].items()}
        sums = [[us[part] for part in parts if part in us] for parts in _WAYS.values()]
        cells = [_number(sum(found) if found else None, 0) for found in sums]
        rows.append([str(finding["tokens"]), *cells])
    by_sms = result["by_sms"]
    rates = list(by_sms[0]["remote_gb_per_s"]) if by_sms else []
    rate_rows = [
        [str(each["num_sms"]), *(f"{each['remote_gb_per_s'][name]:.0f}" for name in rates)]
        for each in by_sms
    ]
    rate_heads = [f"{_words(name)}, GB/s" for name in rates]
    sizes = result["configuration"]
    caption = (
        f"{sizes['ranks']} ranks on {_where(result)}, {_layer(sizes)}, {_torch(result)}, "
        f"{_commits([result])}; medians in us of captured graphs on the slowest rank"
    )
    tables = _table(["tokens a rank", *_WAYS], rows, is_first_text=False)
    if by_sms:
        tables += ["", *_table(["SMs", *rate_heads], rate_rows, is_first_text=False)]
        caption += f"; remote bytes alone, at {sizes['sms_tokens']} tokens"
    return _page(tables, f"{caption}: `{result['command']}`")


def _render_deep_ep(result: Result) -> str:
    """Return three tables: times of calls, what they cost the host, and what a product hides."""
    us = [[name, f"{us:.1f}"] for name, us in result["slowest_rank_us"].items()]
    units = [[name, f"{units:.1f}"] for name, units in result["slowest_rank_units"].items()]
    hidden = []
    for name, each in result["hidden"].items():
        times = [each["communication_us"], each["product_us"]]
        cells = [f"{us:.0f}" for us in (*times, sum(times), each["together_us"])]
        hidden.append([name, *cells, f"{each['share']:.0%}"])
    heads = ["communication, us", "product, us", "one after the other", "together", "hidden"]
    sizes = result["configuration"]
    caption = (
        f"{sizes['ranks']} ranks on {_where(result)}, {_layer(sizes)}, normal mode on "
        f"{sizes['num_sms']} SMs, {_torch(result)}; medians on the slowest rank, low latency in a "
        "captured graph, normal mode launched from Python, dispatch with its layout; hidden: of "
        f"the shorter of both: `{result['command']}`"
    )
    tables = [*_table(["call", "us"], us), ""]
    tables += [*_table(["one token, launched from Python", "add_ of torch"], units), ""]
    tables += _table(["beside a product", *heads], hidden)
    return _page(tables, caption)


def _render_eager(result: Result) -> str:
    """Return the table of what calls cost the host that launches them."""
    rows = [
        [
            name,
            f"{each['units']:.1f}",
            *(f"{each[key]:.0f}" for key in ("us", "python_calls", "torch_operators")),
        ]
        for name, each in result["slowest_rank"].items()
    ]
    heads = ["one token a rank", "add_ of torch", "us", "functions of Python", "operators of torch"]
    sizes = result["configuration"]
    caption = (
        f"{sizes['ranks']} ranks on {_where(result)}, H = {sizes['hidden']}, I = {sizes['inner']}, "
        f"top-{sizes['top_k']} of {sizes['experts']}, FP8 experts, {_torch(result)}; medians on "
        f"the slowest rank: `{result['command']}`"
    )
    return _page(_table(heads, rows), caption)


def _render_overlap(result: Result) -> str:
    """Return the table of what a product and dispatches cost each other."""
    rows = []
    for each in result["findings"]:
        cells = [f"{each['us'][name]['p50']:.0f}" for name in _OVERLAP.values()]
        cells[2:2] = [f"{each['product_lost']:.2f}", f"{each['allowed']:.2f}"]
        rows.append([f"{each['num_sms']}, {each['wire'].upper()} rows", *cells])
    heads = list(_OVERLAP)
    heads[2:2] = ["times as long", "allowed"]
    sizes = result["configuration"]
    caption = (
        f"{sizes['ranks']} ranks on {_where(result)}, {sizes['sms_tokens']} tokens a rank, "
        f"{_layer(sizes)}, FP8 product of [{sizes['m']}, {sizes['k']}] and [{sizes['k']}, "
        f"{sizes['n']}], {_torch(result)}; medians in us on the slowest rank: `{result['command']}`"
    )
    return _page(_table(["SMs of dispatch", *heads], rows), caption)


def _render_hosts(result: Result) -> str:
    """Return a row for each contender, and how near it is to the time of its bytes alone."""
    sizes, found = result["configuration"], result["contenders"]
    rate = float(sizes["gbit_per_s"])
    total = "total_without_grouping"
    first = next(iter(found.values()))["ms"][total]["p50"]
    rows = []
    for name, each in found.items():
        ms, num_bytes = each["ms"], each["host_bytes"]["total"]
        cells = [f"{ms[span]['p50']:.0f}" for span in _HOST_SPANS]
        cells += [f"{ms[total][quantile]:.0f}" for quantile in _QUANTILES[1:]]
        # The milliseconds in which a host sends its bytes.
        cells += [f"{num_bytes / 1e6:.1f}", f"{num_bytes * 8 / (rate * 1e9) * 1e3:.0f}"]
        rows.append([name, *cells, f"{ms[total]['p50'] / first:.2f}"])
    heads = [f"{_words(span)}, ms" for span in _HOST_SPANS]
    heads += [f"total {quantile}" for quantile in _QUANTILES[1:]]
    heads += ["MB from a host", "wire alone, ms", "over the first"]
    caption = (
        f"{sizes['hosts']} hosts (namespaces) of {int(sizes['ranks']) // int(sizes['hosts'])} ranks"
        f" on {_where(result)}, {rate:g} Gbit/s from each host, {sizes['tokens']} tokens a rank, "
        f"{_layer(sizes)}, {sizes['dtype']}, over {sizes['transport']}, {_torch(result)}; medians "
        f"over {sizes['iterations']} calls in turn, each as long as its slowest rank; MB as the "
        "kernel counts them, dispatch and combine together; the last column: total over that of "
        f"the first: `{result['command']}`"
    )
    return _page(_table(["backend", *heads], rows), caption)


def _render_exposed(result: Result) -> str:
    """Return a row for each step: what it computes, what it sends, and what of that is exposed."""
    sizes, ms = result["configuration"], result["ms"]
    rows = []
    for name, (title, whole) in _STEPS.items():
        cells = [ms[f"{name}, replayed"], ms[f"{whole}, exchange"], ms[name]]
        share = (cells[2] - cells[0]) / cells[1]
        title = title.format(**sizes)
        rows.append([title, *(f"{each:.0f}" for each in cells), f"{share:.2f}"])
    heads = ["forward and backward", "without wire, ms", "exchange alone", "step", "exposed"]
    caption = (
        f"{sizes['ranks']} ranks on {_where(result)}, {sizes['mbit_per_s']:g} Mbit/s from each "
        f"host, {sizes['tokens']} tokens a rank, H = {sizes['hidden']}, I = "
        f"{sizes['intermediate']}, top-{sizes['top_k']} of {sizes['experts']} experts a rank, "
        f"float32, {_torch(result)}; decoder layers of two micro-batches of "
        f"{sizes['tokens'] // 2} tokens, I = {sizes['layer_intermediate']} and {sizes['heads']} "
        f"heads of 128; medians over {sizes['iterations']} steps in turn, each as "
        f"long as its slowest rank. Shared experts of {ms['shared experts']:.0f} ms hide "
        f"{result['hidden_by_shared_experts']:.0%} of the shorter of themselves and a dispatch of "
        f"{ms['dispatch and combine'] / 2:.0f} ms; a process computes in "
        f"{result['gloo_cpu']:.1%} of an exchange: `{result['command']}`"
    )
    return _page(_table(heads, rows), caption)


def _render_gemm(result: Result) -> str:
    """Return the table of experts: BF16 comes last among the ways timed in all findings."""
    findings = result["findings"]
    names = [name for name in findings[0]["ms"] if name in _RUNNERS]
    ratios = [name for name in findings[0] if name.startswith("ratio_")]
    rows = []
    for finding in findings:
        skews = {0: ", all to an eighth of the experts", 1: ""}
        skew = skews.get(finding["skew"], f", skewed {finding['skew']}:1")
        ms = {name: finding["ms"][name]["p50"] for name in (*names, "bf16")}
        cells = [f"{value:.2f}" for value in ms.values()]
        cells.append(f"{ms['bf16'] / ms[names[0]]:.2f}")
        cells += [_number(finding.get(name), 2) for name in ratios]
        rows.append([f"{finding['rows']}{skew}", *cells])
    sizes, share = result["configuration"], findings[-1]["weights_over_copy_rate"]
    caption = (
        f"{sizes['experts']} experts, H = {sizes['hidden']}, I = {sizes['inner']}, on "
        f"{_where(result)}, {_torch(result)}; {findings[-1]['rows']} rows read the matrices at "
        f"{share:.0%} of the rate of a copy: `{result['command']}`"
    )
    heads = ["rows", *(f"{name} p50 ms" for name in (*names, "bf16")), "times as fast"]
    if ratios:
        heads += [f"{name.removeprefix('ratio_')} / DeepGEMM" for name in ratios]
        caption += f"; ratios of times to {result['ratios_to']}"
    return _page(_table(heads, rows, is_first_text=False), caption)


def _render_gate(result: Result) -> str:
    """Return a row for each routing and number of tokens, a column for each router."""
    findings = result["findings"]
    us = {
        (each["shape"], each["tokens"], each["router"]): each["us"]["p50"]
        for each in findings
        if each["us"] is not None
    }
    routers = [name for name in _ROUTERS if any(name == router for _, _, router in us)]
    rows = [
        [f"{shape}, {tokens} tokens", *(_number(us.get((shape, tokens, r)), 2) for r in routers)]
        for shape, tokens in dict.fromkeys((each["shape"], each["tokens"]) for each in findings)
    ]
    versions = result["versions"]
    sglang = f", sglang {versions['sglang']}" if "sglang" in versions else ""
    caption = (
        f"One call of {result['configuration']['calls_of_graph']} in a graph, medians, on "
        f"{_where(result)}, {_torch(result)}{sglang}: `{result['command']}`"
    )
    faults = [
        f"{_ROUTERS[each['router']]}, {each['shape']}, {each['tokens']} tokens: {each['fault']}"
        for each in findings
        if each["fault"]
    ]
    heads = ["us", *(_ROUTERS[name] for name in routers)]
    return _page(_table(heads, rows), "; ".join([caption, *faults]))


def _render_placement(result: Result) -> str:
    """Return the table: the layer with experts in order and placed, and how even their load is."""
    rows = [
        [
            way["name"],
            *(_milliseconds(way["us"][quantile]) for quantile in _QUANTILES),
            f"{way['slots_ratio']:.3f}",
        ]
        for way in result["ways"]
    ]
    sizes = result["configuration"]
    caption = (
        f"{sizes['ranks']} ranks on {_where(result)}, {sizes['tokens']} tokens a rank, H = "
        f"{sizes['hidden']}, I = {sizes['intermediate']}, top-{sizes['top_k']} of "
        f"{sizes['experts']} by a Zipf law of exponent {sizes['exponent']}, one redundant expert a "
        f"rank, {_torch(result)}; the slowest rank of {sizes['iterations']} "
        f"batches that were not counted; slots are those of equal shares of copies: "
        f"`{result['command']}`"
    )
    heads = [f"{quantile} ms" for quantile in _QUANTILES]
    return _page(_table(["experts", *heads, "most slots of a rank over the mean"], rows), caption)


def _milliseconds(us: float) -> str:
    """Return milliseconds with three digits, or all that are before the point."""
    return f"{us / 1e3:.0f}" if us >= 1e5 else f"{us / 1e3:.3g}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _layer(sizes: Mapping[str, Any]) -> str:
    return f"H = {sizes['hidden']}, top-{sizes['top_k']} of {sizes['experts']}"


def _torch(result: Result) -> str:
    return f"torch {result['versions']['torch']}"


def _commits(results: Sequence[Result]) -> str:
    """Return the measured commits; a + says that files differed from the commit."""
    found = dict.fromkeys(each["versions"]["commit"] for each in results)
    named = (each.replace("+", " with changes") for each in found)
    return f"epcomm {', '.join(named)}"


def _where(result: Result) -> str:
    """Name the accelerator, or the cores and the processor where there is none."""
    hardware = result["hardware"]
    if "accelerator" in hardware:
        return str(hardware["accelerator"])
    return f"{hardware['num_cores']} cores of {hardware['processor']}"


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, is_first_text: bool = True
) -> list[str]:
    """Return the lines of a table; the first column is text, or numbers like the others."""
    marks = ["---" if is_first_text else "---:", *["---:"] * (len(heads) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (heads, marks, *rows)]


def _page(table: Sequence[str], *captions: str) -> str:
    return "\n".join([*table, "", *captions, ""])


_RENDERERS: Mapping[str, Callable[[Result], str]] = MappingProxyType(
    {
        BENCHMARK: _render_bench,
        "nvlink": _render_nvlink,
        "deep_ep": _render_deep_ep,
        "eager": _render_eager,
        "overlap": _render_overlap,
        "hosts": _render_hosts,
        "exposed": _render_exposed,
        "gemm": _render_gemm,
        "gemm_int8": _render_gemm,
        "gemm_mxfp8": _render_gemm,
        "gate": _render_gate,
        "placement": _render_placement,
    }
)
