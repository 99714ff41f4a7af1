"""Draw the medians of a pair by tokens; matplotlib is not a dependency of the wheel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from epcomm.bench.advice import TITLES
from epcomm.bench.records import Report, Timing
from epcomm.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot(path: Path, *, command: str) -> None:
    """Raise ConfigError if matplotlib is missing, or the suffix is not of an image. Local."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"{command}: --plot needs matplotlib, which is not installed; run pip install "
            "matplotlib, or leave --plot out"
        ) from error

    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(
            f"{command}: --plot is {str(path)!r}, expected a name that ends in one of "
            f"{sorted(known)}"
        )


def check_writable(path: Path, *, command: str) -> None:
    """Make the folder of a file; ConfigError if it cannot be written. A file keeps its content."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{command}: {path} cannot be written ({error.strerror}); name another file"
        ) from None


def draw(report: Report) -> Figure:
    """Return a figure with a line for each contender, on logarithmic axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, ScalarFormatter

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in _lines(report.results).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    sizes = report.configuration
    place = report.hardware.get("accelerator", sizes["device"])
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens a rank",
        ylabel="dispatch + combine, us (p50 of the slowest rank)",
        title=f"{sizes['ranks']} ranks on {place}, H = {sizes['hidden']}, "
        f"top-{sizes['top_k']} of {sizes['experts']}",
    )
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    return figure


def _lines(timings: Sequence[Timing]) -> dict[str, list[tuple[int, float]]]:
    lines: dict[str, list[tuple[int, float]]] = {}
    for each in sorted(timings, key=lambda timing: timing.tokens):
        name = f"{each.mode or 'torch'}: {TITLES.get(each.backend, each.backend)}"
        lines.setdefault(name, []).append((each.tokens, each.us["pair"].p50))
    return lines
