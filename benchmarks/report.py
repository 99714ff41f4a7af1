"""Report the findings of a run: as JSON, and as a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measuring.copy_rate import CopyFinding
from benchmarks.measuring.host_profile import Section
from epcomm.bench.contenders.sent_bytes import SentBytes
from epcomm.bench.timing import Laps, Percentiles, slowest_rank

SPANS = (
    "dispatch",
    "dispatch_without_grouping",
    "combine",
    "total",
    "total_without_grouping",
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one contender.

    ms: percentiles of each span over iterations, each as long as its slowest rank.
    sent_bytes: bytes of one call on the rank that sends most.
    """

    ms: Mapping[str, Percentiles]
    sent_bytes: SentBytes

    @classmethod
    def of(
        cls, laps_by_rank: Sequence[Sequence[Laps]], bytes_by_rank: Sequence[SentBytes]
    ) -> Finding:
        """Make the finding from the numbers of all ranks."""
        spans = slowest_rank([[laps.spans() for laps in rank] for rank in laps_by_rank])
        return cls(
            ms={name: Percentiles.of(ms) for name, ms in spans.items()},
            sent_bytes=max(bytes_by_rank, key=lambda sent: sent.total),
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run, with all that its numbers depend on.

    findings: by contender, epcomm first.
    load_average: of the machine before and after the measurement.
    profile: of epcomm, of the slowest rank; empty unless it was asked for.
    copies: epcomm beside the copies of the same run; None unless it was asked for.
    """

    configuration: Mapping[str, str | int | bool]
    hardware: Mapping[str, str | int]
    versions: Mapping[str, str]
    command: str
    load_average: Sequence[float]
    findings: Mapping[str, Finding]
    profile: Sequence[Section] = ()
    copies: CopyFinding | None = None

    def ratios(self) -> dict[str, float]:
        """Return for each span how many times as fast as the alternative epcomm is, by medians."""
        ours, alternative = self.findings.values()
        return {name: alternative.ms[name].p50 / ours.ms[name].p50 for name in SPANS}

    def as_json(self) -> str:
        """Return the report as one JSON object, indented."""
        sent = {
            name: {**asdict(finding.sent_bytes), "total": finding.sent_bytes.total}
            for name, finding in self.findings.items()
        }
        values = {
            "benchmark": "dispatch_combine",
            "configuration": dict(self.configuration),
            "hardware": dict(self.hardware),
            "versions": dict(self.versions),
            "command": self.command,
            "load_average": list(self.load_average),
            "contenders": {
                name: {
                    "ms": {span: _rounded(asdict(ms)) for span, ms in finding.ms.items()},
                    "sent_bytes": sent[name],
                }
                for name, finding in self.findings.items()
            },
            "ratio_of_medians": _rounded(self.ratios()),
            "profile": [asdict(section) | {"ms": round(section.ms, 3)} for section in self.profile],
        }
        if self.copies is not None:
            values["copies"] = self.copies.as_record()
        return json.dumps(values, indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Write as_json() to `path`, whose folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.as_json(), encoding="utf-8")


def table_of(report: Report) -> Table:
    """Percentiles by contender and span, and the ratio of medians."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("ms on the\nslowest rank")
    for name in report.findings:
        for field in fields(Percentiles):
            table.add_column(f"{name.replace('_', chr(10))}\n{field.name}", justify="right")
    table.add_column("times\nas fast", justify="right")
    ratios = report.ratios()
    for span in SPANS:
        cells = [
            f"{value:.2f}"
            for finding in report.findings.values()
            for value in asdict(finding.ms[span]).values()
        ]
        table.add_row(span.replace("_", " "), *cells, f"{ratios[span]:.2f}")
    return table


def bytes_summary(report: Report) -> str:
    """Format the bytes of the rank that sends most, a line for each contender."""
    lines = [
        f"{name} sends {sent.dispatch / 1e6:.2f} MB in dispatch, {sent.combine / 1e6:.2f} MB in "
        "combine and "
        f"{sent.control} B of counts a call on the rank that sends most"
        for name, sent in ((name, one.sent_bytes) for name, one in report.findings.items())
    ]
    return "\n".join(lines)


def copies_summary(copies: CopyFinding) -> str:
    """Format the distance from the rate of copies, with both ways of counting bytes."""
    return (
        f"of the rate at which all ranks copy, {copies.copy_gb_per_s:.1f} GB/s, dispatch without "
        f"grouping and combine reach {copies.copied_over_copy_rate:.0%} by rows and sums, "
        f"{copies.moved.copied / 1e6:.1f} MB, and {copies.touched_over_copy_rate:.0%} by bytes "
        f"read and written, {copies.moved.touched / 1e6:.1f} MB"
    )


def profile_summary(sections: Sequence[Section]) -> str:
    """Format the call tree, a line for each function."""
    return "\n".join(
        f"{section.ms:8.2f} ms {'  ' * section.depth}{section.name}" for section in sections
    )


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    # A microsecond is below what any clock here can tell.
    return {name: round(value, 3) for name, value in values.items()}
