"""Draw medians of whole calls by tokens; matplotlib is not a dependency of the wheel."""

from pathlib import Path
from typing import TYPE_CHECKING

from epcomm.bench.records import Report
from epcomm.bench.report import name_of
from epcomm.errors import ConfigError, grouped

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
    """Raise ConfigError if a file cannot be written. A file keeps its content."""
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{command}: {path} cannot be written ({error.strerror}); name another file, or make "
            "its folder"
        ) from None


def draw(report: Report) -> "Figure":
    """Return a figure with a line for each contender, on logarithmic axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, ScalarFormatter

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in _lines(report).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    sizes, calls = report.configuration, "layer" if report.is_of_layers else "dispatch + combine"
    place = report.hardware.get("accelerator", sizes["device"])
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens a rank",
        ylabel=f"{calls}, us (p50 of the slowest rank)",
        title=f"{sizes['ranks']} ranks on {place}, H = {sizes['hidden']}, "
        f"top-{sizes['top_k']} of {sizes['experts']}",
    )
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    return figure


def _lines(report: Report) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each line, by its name: those of bounds, then those of contenders."""
    points = [(f"bound: {b.weights}", b.tokens, b.us["layer"]) for b in report.bounds]
    points += [
        (f"{each.mode or 'torch'}: {name_of(each)}", each.tokens, each.whole.p50)
        for each in report.results
    ]
    points.sort(key=lambda point: point[1])
    return grouped((name, (tokens, us)) for name, tokens, us in points)
