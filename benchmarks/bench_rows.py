"""Measure the kernels on rows of one GPU, quantisation included, against a copy of as many bytes.

    python -m benchmarks.bench_rows --output rows.json

The rows are those that one of `--ranks` ranks receives when every rank sends `--tokens` tokens with
random experts; rows of all tokens, H and I wide and with every bfloat16 number among them, are
quantised and restored. Each kernel is compared with plain torch first, bit by bit, and one that
differs is not measured. The bytes of a case are those that must be read and written once;
`rate over copy` is the time of a copy that reads and writes as many over that of the case. A pack
reads the row of each slot, so its bytes are those of a copy of the slots.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.measuring import Output, gpu_of, report_of, time_cold, time_copy, write_report
from epcomm.bench.check import CheckError
from epcomm.bench.timing import Percentiles
from epcomm.buffers.row_layout import RowLayout
from epcomm.cli.records import takes_records
from epcomm.ops.slots import index_slots, localize, pack, row_ops_of
from epcomm.quantization import (
    FP8_FLOAT32_SCALES,
    FP8_POWER_OF_TWO_SCALES,
    INT8_PER_TOKEN,
    Int8Profile,
    dequantize,
    dequantizer_for,
    quantize,
    quantizer_for,
)
from epcomm.records import SlotIndex
from epcomm.types import WireDtype, WireFormat

# The quantised formats, by name.
QUANTIZATIONS = {
    "fp8": (FP8_FLOAT32_SCALES, Int8Profile.RINT127),
    "fp8 powers of two": (FP8_POWER_OF_TWO_SCALES, Int8Profile.RINT127),
    **{
        name.value: (WireFormat(dtype=name), Int8Profile.RINT127)
        for name in (WireDtype.MXFP8, WireDtype.MXFP4, WireDtype.NVFP4)
    },
    **{f"int8 {profile.value}": (INT8_PER_TOKEN, profile) for profile in Int8Profile},
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a run."""

    tokens: Annotated[int, typer.Option(min=1, help="T of each rank.")] = 4096
    hidden: Annotated[int, typer.Option(min=1, help="H.")] = 7168
    inner: Annotated[int, typer.Option(min=1, help="I.")] = 2048
    top_k: Annotated[int, typer.Option(min=1, help="K.")] = 8
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks.")] = 256
    ranks: Annotated[int, typer.Option(min=1, help="W; the rows of one of them.")] = 8
    calls: Annotated[int, typer.Option(min=1, help="Measured calls of each.")] = 50


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrived:
    """The rows on one rank: messages [R, row_bytes] with their index, and results for its slots.

    ids: [T * W, K], those of all tokens.   row_of_rank: [T, W], the rows that carry each token of
        this rank.
    """

    layout: RowLayout
    messages: Tensor
    index: SlotIndex
    slot_weights: Tensor
    results: Tensor
    ids: Tensor
    counts: Tensor
    row_of_rank: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A kernel to measure.

    num_bytes: bytes read and written.   check: raises CheckError if plain torch gives another
        result.
    """

    name: str
    num_bytes: int
    call: Callable[[], object]
    check: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The times of one case, or the reason why it has none."""

    case: str
    num_bytes: int = 0
    ms: Percentiles | None = None
    copy_ms: Percentiles | None = None
    fault: str = ""

    @property
    def rate_over_copy(self) -> float:
        """The rate of the case over that of a copy of as many bytes."""
        if self.ms is None or self.copy_ms is None:
            return float("nan")
        return self.copy_ms.p50 / self.ms.p50


def arrive(sizes: Sizes, wire: WireFormat, device: torch.device) -> Arrived:
    """Make the rows and the index that rank 0 has after a dispatch."""
    generator = torch.Generator(device).manual_seed(0)
    num_tokens, num_local = sizes.tokens * sizes.ranks, sizes.experts // sizes.ranks

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    ids = random(num_tokens, sizes.experts).topk(sizes.top_k, dim=1).indices
    mine = localize(ids, 0, num_local)
    row_ids = ids[(mine >= 0).any(1)].to(torch.int32)
    layout = RowLayout(hidden_size=sizes.hidden, top_k=sizes.top_k, format=wire, has_ids=True)
    # Bytes below 64 are not NaN in any format.
    messages = torch.randint(
        64,
        (row_ids.shape[0], layout.row_bytes),
        generator=generator,
        device=device,
        dtype=torch.uint8,
    )
    layout.ids(messages).copy_(row_ids)
    layout.scalars(messages).copy_(random(*row_ids.shape))
    counts = torch.bincount(mine[mine >= 0], minlength=num_local)
    index, slot_weights = index_slots(
        layout.ids(messages),
        layout.scalars(messages),
        counts,
        counts.tolist(),
        first_expert=0,
    )
    needed = torch.zeros(sizes.tokens, sizes.ranks, dtype=torch.bool, device=device)
    needed.scatter_(1, ids[: sizes.tokens] // num_local, True)
    by_rank = needed.T.flatten().cumsum(0).view(sizes.ranks, sizes.tokens).T - 1
    results = random(slot_weights.shape[0], sizes.hidden).bfloat16()
    return Arrived(
        layout=layout,
        messages=messages,
        index=index,
        slot_weights=slot_weights,
        results=results,
        ids=ids,
        counts=counts,
        row_of_rank=torch.where(needed, by_rank, -1).to(torch.int32).contiguous(),
    )


def pack_case(arrived: Arrived) -> Case:
    """Pack rows, and their scales if they have some, into slots."""
    layout, index = arrived.layout, arrived.index
    assert index.row_of_slot is not None, "an index over rows"
    row_of_slot = index.row_of_slot
    parts = [_indexable(layout.data(arrived.messages))]
    scales = layout.scales(arrived.messages)
    if scales is not None:
        parts.append(scales)
    num_bytes = 2 * row_of_slot.shape[0] * sum(p.shape[1] * p.itemsize for p in parts)

    def check() -> None:
        for part in parts:
            _same("pack", pack(part, index), part[row_of_slot.long()])

    return Case(
        name=f"pack {layout.format.dtype}",
        num_bytes=num_bytes,
        call=lambda: [pack(part, index) for part in parts],
        check=check,
    )


def sums_case(name: str, rows: Tensor, table: Tensor, weights: Tensor | None) -> Case:
    """Sum the rows that a table names: the inverse of pack, and both halves of combine."""
    ops = row_ops_of(rows.device)
    assert ops is not None, "a GPU has kernels"
    num_read = int((table >= 0).sum())
    row_bytes = rows.shape[1] * rows.itemsize

    def plain() -> Tensor:
        total = torch.zeros(table.shape[0], rows.shape[1], device=rows.device)
        for k in range(table.shape[1]):
            sources = table[:, k].clamp(min=0).long()
            term = rows[sources].float()
            if weights is not None:
                term *= weights[sources].unsqueeze(1)
            total += term.masked_fill_((table[:, k] < 0).unsqueeze(1), 0)
        return total.to(rows.dtype)

    return Case(
        name=name,
        num_bytes=(num_read + table.shape[0]) * row_bytes,
        call=lambda: ops.sum_members(rows, table, weights),
        check=lambda: _same(name, ops.sum_members(rows, table, weights), plain()),
    )


def scatter_case(arrived: Arrived, sizes: Sizes) -> Case:
    """Copy the tokens of one rank to the rows that carry them, with ids and weights."""
    ops, layout = row_ops_of(arrived.messages.device), arrived.layout
    assert ops is not None, "a GPU has kernels"
    table, ids = arrived.row_of_rank, arrived.ids[: sizes.tokens].contiguous()
    x = arrived.results[: sizes.tokens].contiguous()
    weights = torch.rand_like(ids, dtype=torch.float32)
    num_rows = int((table >= 0).sum())
    out = arrived.messages.new_empty(num_rows, layout.row_bytes)
    token_of_row = (table.T >= 0).nonzero()[:, 1]

    def call() -> Tensor:
        parts = (layout.data(out), None, layout.ids(out), layout.scalars(out))
        ops.scatter_tokens((x, None, ids, weights), table, parts)
        return out

    def plain() -> Tensor:
        rows = torch.zeros_like(out)
        layout.data(rows).copy_(x[token_of_row])
        layout.ids(rows).copy_(ids[token_of_row])
        layout.scalars(rows).copy_(weights[token_of_row])
        return rows

    def check() -> None:
        out.zero_()
        _same("scatter", call(), plain())

    num_bytes = x.nbytes + ids.nbytes + weights.nbytes + out.nbytes
    return Case(name="tokens to rows", num_bytes=num_bytes, call=call, check=check)


def index_case(arrived: Arrived) -> Case:
    """Build the index; its bytes mean little, because latency limits it."""
    layout, index = arrived.layout, arrived.index
    ids, scalars = layout.ids(arrived.messages), layout.scalars(arrived.messages)
    host_counts = index.host_num_tokens_per_expert
    assert host_counts is not None, "arrive() gave them"

    def check() -> None:
        assert index.row_of_slot is not None, "an index over rows"
        experts = localize(ids, 0, len(host_counts)).flatten()
        order = experts.argsort(stable=True)[(experts < 0).sum() :]
        _same("index", index.row_of_slot, (order // ids.shape[1]).to(torch.int32))

    return Case(
        name="slot index",
        num_bytes=2 * ids.numel() * ids.itemsize + 3 * 4 * arrived.results.shape[0],
        call=lambda: index_slots(ids, scalars, arrived.counts, host_counts, first_expert=0),
        check=check,
    )


def quantize_case(name: str, x: Tensor) -> Case:
    """Quantise hidden states [T, H] by one of QUANTIZATIONS."""
    wire, profile = QUANTIZATIONS[name]
    quantizer = quantizer_for(x.device)
    out = quantizer(x, wire, profile=profile)
    assert out.scales is not None, "quantised formats have scales"

    def check() -> None:
        came = quantizer(x, wire, profile=profile)
        expected = quantize(x, wire, profile=profile)
        for found, wanted in ((came.data, expected.data), (came.scales, expected.scales)):
            assert found is not None, "quantised formats have scales"
            assert wanted is not None, "quantised formats have scales"
            _same(name, found.view(torch.uint8), wanted.view(torch.uint8))

    return Case(
        name=f"quantise {name} {x.shape[1]}",
        num_bytes=x.nbytes + out.data.nbytes + out.scales.nbytes,
        call=partial(quantizer, x, wire, profile=profile, out=out),
        check=check,
    )


def dequantize_case(name: str, x: Tensor) -> Case:
    """Restore hidden states [T, H] from one of QUANTIZATIONS, in their dtype."""
    wire, restore = quantize(x, QUANTIZATIONS[name][0]), dequantizer_for(x.device)
    assert wire.scales is not None, "quantised formats have scales"

    def check() -> None:
        found, expected = (_bits(each(wire, x.dtype)) for each in (restore, dequantize))
        _same(name, found, expected)

    return Case(
        name=f"dequantise {name} {x.shape[1]}",
        num_bytes=x.nbytes + wire.data.nbytes + wire.scales.nbytes,
        call=lambda: restore(wire, x.dtype),
        check=check,
    )


def rows_with_all_numbers(num_rows: int, width: int, device: torch.device) -> Tensor:
    """Make random rows [num_rows, width], bfloat16, that begin with as many patterns as fit."""
    x = torch.randn(num_rows, width, device=device).bfloat16()
    patterns = torch.arange(2**16, device=device)[: x.numel()].to(torch.int16)
    x.view(torch.int16).flatten()[: len(patterns)] = patterns
    return x


def cases_of(sizes: Sizes, device: torch.device) -> list[Callable[[], Case]]:
    """List a function that makes each case, so that a fault of one does not affect the others."""
    bf16 = arrive(sizes, WireFormat(dtype=WireDtype.BF16), device)
    table = bf16.index.slots_of_row
    assert table is not None, "an index over rows"
    most = int(bf16.row_of_rank.max()) + 1
    returned = bf16.results[:most] if most <= bf16.results.shape[0] else bf16.results.repeat(2, 1)
    # Restoring does not depend on the profile.
    restored = [
        name for name, (_, profile) in QUANTIZATIONS.items() if profile is Int8Profile.RINT127
    ]
    widths = [
        rows_with_all_numbers(sizes.tokens * sizes.ranks, width, device)
        for width in (sizes.hidden, sizes.inner)
    ]
    return [
        lambda: pack_case(bf16),
        lambda: pack_case(arrive(sizes, FP8_FLOAT32_SCALES, device)),
        lambda: sums_case("inverse of pack", bf16.results, table, None),
        lambda: sums_case("slots to rows, weighted", bf16.results, table, bf16.slot_weights),
        lambda: sums_case("returned rows to tokens", returned, bf16.row_of_rank, None),
        lambda: scatter_case(bf16, sizes),
        lambda: index_case(bf16),
        *(partial(quantize_case, name, x) for x in widths for name in QUANTIZATIONS),
        *(partial(dequantize_case, name, x) for x in widths for name in restored),
    ]


def measure(make: Callable[[], Case], device: torch.device, num_calls: int) -> Finding:
    """Check one case, then time it; a fault becomes part of the finding."""
    name = "a case that could not be made"
    try:
        case = make()
        name = case.name
        case.check()
        return Finding(
            case=name,
            num_bytes=case.num_bytes,
            ms=time_cold(case.call, device, num_calls),
            copy_ms=time_copy(case.num_bytes, device, num_calls),
        )
    except (CheckError, RuntimeError) as error:
        return Finding(case=name, fault=str(error).partition("\n")[0])


def line_of(finding: Finding) -> str:
    """Return a finding as a line for the terminal."""
    if finding.ms is None or finding.copy_ms is None:
        return f"{finding.case}: {finding.fault}"
    return (
        f"{finding.case}, {finding.num_bytes / 1e6:.0f} MB: {finding.ms.p50 * 1e3:.1f} us, p99 "
        f"{finding.ms.p99 * 1e3:.1f}, {finding.rate_over_copy:.2f} of a copy's rate"
    )


def _indexable(rows: Tensor) -> Tensor:
    """View elements of one byte as uint8, which torch can index."""
    return rows.view(torch.uint8) if rows.itemsize == 1 else rows


def _bits(numbers: Tensor) -> Tensor:
    """View numbers of 16 bits as integers, in which -0 differs from 0 and all NaN are one."""
    return numbers.masked_fill(numbers.isnan(), torch.nan).view(torch.int16)


def _same(name: str, came: Tensor, expected: Tensor) -> None:
    if came.shape != expected.shape:
        raise CheckError(f"{name}: {list(came.shape)} differs from plain torch; not measured")
    num_differing = int((came != expected).sum())
    if num_differing:
        raise CheckError(f"{name}: {num_differing} elements differ from plain torch; not measured")


@takes_records
def main(sizes: Sizes, output: Output) -> None:
    """Check all kernels, measure them, and print the results."""
    device = gpu_of("bench_rows")
    findings = [measure(make, device, sizes.calls) for make in cases_of(sizes, device)]
    sys.stdout.writelines(f"{line_of(each)}\n" for each in findings)
    configuration = {**asdict(sizes), "cold_cache": True}
    report = report_of("rows", configuration, device, "benchmarks.bench_rows")
    report["findings"] = [
        {**asdict(each), "rate_over_copy": each.rate_over_copy} for each in findings
    ]
    write_report(report, output)
    if any(each.fault for each in findings):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
