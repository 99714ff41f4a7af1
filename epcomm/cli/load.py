"""`epcomm load`: read the load of experts that a recorder has written, and draw it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from epcomm.bench.plot import check_plot, check_writable
from epcomm.cli.one_line import BadInput
from epcomm.errors import ConfigError
from epcomm.placement.recorder import ExpertLoad
from epcomm.stats import imbalance_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load_command(
    file: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="What ExpertLoad.as_json() returned."),
    ],
    plot: Annotated[
        Path | None, typer.Option(help="Draw a heatmap there: .png, .svg; needs matplotlib.")
    ] = None,
) -> None:
    """Print the load of the experts of each layer, summed over all windows.

    Exit code 0: the file was read. 2: bad input.
    """
    try:
        if plot is not None:
            check_plot(plot, command="epcomm load")
        load = ExpertLoad.from_json(file.read_text("utf-8", errors="replace"))
        if plot is not None:
            check_writable(plot, command="epcomm load")
            draw_load(load).savefig(plot, dpi=110)
    except ConfigError as error:
        raise BadInput(f"epcomm load: {str(error).removeprefix('epcomm load: ')}") from None
    Console(highlight=False, markup=False).print(table_of(load))


def table_of(load: ExpertLoad) -> Table:
    """Return a table with a row for each layer, for ranks that hold the experts in order."""
    names = ("windows", "entries", "most loaded", "experts max/mean", "ranks max/mean")
    columns = [Column(name, justify="right") for name in names]
    table = Table("layer", *columns, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for layer, windows in load.windows_by_layer.items():
        total = load.total(layer)
        most = max(range(len(total)), key=lambda e: total[e]) if sum(total) else "-"
        table.add_row(
            layer,
            *map(str, (len(windows), sum(total), most)),
            f"{imbalance_of(total):.2f}",
            _imbalance_of_ranks(total, load.num_ranks),
        )
    return table


def draw_load(load: ExpertLoad) -> "Figure":
    """Return a heatmap: a row for each layer, a column for each expert, load over the mean."""
    from matplotlib.figure import Figure

    layers = list(load.windows_by_layer)
    if not layers:
        raise ConfigError("the file has no layer, so there is nothing to draw; leave out --plot")
    totals = [load.total(layer) for layer in layers]
    rows = [[count * len(total) / max(sum(total), 1) for count in total] for total in totals]
    width = max((len(row) for row in rows), default=0)
    # Layers with fewer experts have empty columns at the end.
    cells = [row + [float("nan")] * (width - len(row)) for row in rows]
    figure = Figure(figsize=(9, 1.5 + 0.25 * max(4, len(rows))), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(cells, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0.0)
    axes.set(
        xlabel="expert",
        yticks=range(len(layers)),
        yticklabels=layers,
        title=f"load of experts, {load.num_ranks} ranks",
    )
    figure.colorbar(image, ax=axes, label="tokens over the mean of the layer")
    return figure


def _imbalance_of_ranks(total: tuple[int, ...], num_ranks: int) -> str:
    if not total or len(total) % num_ranks:
        return "-"
    num_local = len(total) // num_ranks
    ranks = [sum(total[at : at + num_local]) for at in range(0, len(total), num_local)]
    return f"{imbalance_of(tuple(ranks)):.2f}"
