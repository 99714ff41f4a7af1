"""Terminal output about several paths through the same experts."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from epcomm.buffers.traffic import BufferTraffic


@dataclass(frozen=True, kw_only=True)
class PathRecord:
    """The results of one path over the tokens of all ranks. Errors are relative, in the L2 norm.

    to_bf16: error against the layer in float64 with the BF16 weights.
    to_w8a8: error against the layer in float64 with the dequantised W8A8 weights.
    to_reference: error against the FuseEP reference; None for the reference itself.
    sent: traffic of each rank.
    host_syncs: host syncs of a call.
    choice: the first line of explain(), and the line about the runner.
    """

    name: str
    to_bf16: float
    to_w8a8: float
    to_reference: float | None
    sent: Sequence[BufferTraffic]
    host_syncs: int
    choice: str

    def failure(self, max_error: float, max_difference: float) -> str | None:
        """Return the errors that exceed their limits, as text, or None."""
        limits = {
            "the layer in float64 with these W8A8 weights": (self.to_w8a8, max_error),
            "the FuseEP reference": (self.to_reference, max_difference),
        }
        failures = [
            f"{self.name} differs from {what} by {error:.2e}, expected at most {limit:.2e}"
            for what, (error, limit) in limits.items()
            # Not `>`: NaN must fail too.
            if error is not None and not error <= limit
        ]
        return "; ".join(failures) or None


def paths_table(records: Sequence[PathRecord]) -> Table:
    """Return a table with one row per path; bytes are those of the rank that sends most."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("path", no_wrap=True)
    for heading in (
        "from\nBF16",
        "from\nW8A8",
        "from the\nreference",
        "kB\ndispatch",
        "kB\ncombine",
        "header\nbytes",
        "host\nsyncs",
    ):
        table.add_column(heading, justify="right")
    for record in records:
        table.add_row(*_row(record))
    return table


def choices(records: Sequence[PathRecord]) -> str:
    """Return one line for each path."""
    width = max(len(record.name) for record in records)
    return "\n".join(f"{record.name:{width}}  {record.choice}" for record in records)


def _row(record: PathRecord) -> list[str]:
    to_reference = "" if record.to_reference is None else f"{record.to_reference:.1e}"
    return [
        record.name,
        f"{record.to_bf16:.5f}",
        f"{record.to_w8a8:.5f}",
        to_reference,
        f"{max(sent.dispatch_bytes for sent in record.sent) / 1e3:.1f}",
        f"{max(sent.combine_bytes for sent in record.sent) / 1e3:.1f}",
        str(max(sent.control_bytes for sent in record.sent)),
        str(record.host_syncs),
    ]
