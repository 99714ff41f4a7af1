"""Terminal output: a progress bar, a table of steps, a summary."""

from collections.abc import Sequence
from dataclasses import dataclass

from comparison import Comparison
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# Number of rows of the table, so that it fits on a screen with the other output.
MAX_ROWS = 12


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The results of one step.

    tokens_by_rank: bytes predicted on each rank.
    sent_bytes: bytes sent by the MoE layers of the rank that sent most, forward and backward.
    duration_s: time of training, without the comparison.
    """

    step: int
    comparison: Comparison
    tokens_by_rank: Sequence[int]
    sent_bytes: int
    duration_s: float

    @property
    def loss(self) -> float:
        """The loss over all ranks."""
        return self.comparison.loss.value


@dataclass(frozen=True, kw_only=True)
class MoveRecord:
    """The load of the most loaded rank, relative to the mean of the ranks, before and after a move.

    It is that of the layer where it is largest, for the tokens since the previous move; the copies
    of an expert share its tokens equally.

    step: step after which experts were moved.
    in_order: load with one copy of each expert, in the order of their ids.
    before: load with the previous placement.   after: load with the new placement.
    """

    step: int
    in_order: float
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class Written:
    """The text that the ranks generated.

    texts: by rank.   difference: relative difference of the logits from one process.
    ms_per_byte: time in which every rank generates one byte.
    """

    texts: Sequence[str]
    difference: float
    ms_per_byte: float


def moves_table(moves: Sequence[MoveRecord]) -> Table:
    """Return a table with one row per move."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("moved after step", "load in order", "before", "after"):
        table.add_column(heading, justify="right")
    for move in moves:
        shares = (move.in_order, move.before, move.after)
        table.add_row(str(move.step), *(f"{share:.3f}" for share in shares))
    return table


def decode_summary(written: Written) -> str:
    """Return the texts, and the difference of their logits from one process."""
    lines = [f"rank {rank} writes {text!r}" for rank, text in enumerate(written.texts)]
    lines.append(
        f"decoded in low latency, {written.ms_per_byte:.0f} ms a byte on each rank; "
        f"logits differ from one process by {written.difference:.1e}"
    )
    return "\n".join(lines)


def resumed_summary(first: int, last: int, difference: float) -> str:
    """Return the difference of a resumed run from an uninterrupted one, as text."""
    return (
        f"resumed after step {first - 1}: losses of steps {first} to {last} differ from those "
        f"without interruption by {difference:.1e}"
    )


def progress_bar(console: Console) -> Progress:
    """Return a bar with steps and the last loss; without a terminal only its end is printed."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=console.quiet,
    )


def steps_table(records: Sequence[StepRecord]) -> Table:
    """Return a table of the first step, every n-th and the last."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    headings = (
        "step",
        "tokens",
        "a rank",
        "loss",
        "in one\nprocess",
        "loss\ndiffers by",
        "norm\ndiffers by",
        "MB sent\na rank",
        "ms",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    interval = -(-len(records) // MAX_ROWS)
    for record in records:
        if record.step % interval == 0 or record.step in (1, len(records)):
            table.add_row(*_row(record))
    return table


def summary(records: Sequence[StepRecord], tolerance: float) -> str:
    """Return the decrease of the loss and the largest differences of all steps, as text."""
    comparisons = [record.comparison for record in records]
    loss = max(comparison.loss.relative for comparison in comparisons)
    gradient_norm = max(comparison.gradient_norm.relative for comparison in comparisons)
    parameter = max(comparison.parameter.relative for comparison in comparisons)
    choice = max(comparison.choice.relative for comparison in comparisons)
    num_ties = sum(comparison.num_ties for comparison in comparisons)
    num_idle = sum(0 in record.tokens_by_rank for record in records)
    return (
        f"loss from {records[0].loss:.2f} to {records[-1].loss:.2f} in {len(records)} steps; "
        f"in {num_idle} of them a rank had no data\n"
        f"largest relative differences, limit {tolerance:.0e}: loss {loss:.1e}, "
        f"gradient norm {gradient_norm:.1e},\n"
        f"norm of one parameter {parameter:.1e}, choice of experts {choice:.1e} (ties: {num_ties})"
    )


def _row(record: StepRecord) -> list[str]:
    comparison = record.comparison
    return [
        str(record.step),
        str(sum(record.tokens_by_rank)),
        f"{min(record.tokens_by_rank)}-{max(record.tokens_by_rank)}",
        f"{record.loss:.4f}",
        f"{comparison.loss.expected:.4f}",
        f"{comparison.loss.relative:.1e}",
        f"{comparison.gradient_norm.relative:.1e}",
        f"{record.sent_bytes / 1e6:.2f}",
        f"{record.duration_s * 1e3:.0f}",
    ]
