"""The command `epcomm`: plan a layer, inspect a machine, measure, read loads."""

from typing import Annotated

import typer

from epcomm.bench.machine import version_of
from epcomm.cli.bench import bench_command
from epcomm.cli.doctor import doctor_command
from epcomm.cli.load import load_command
from epcomm.cli.one_line import OneLineGroup
from epcomm.cli.plan import plan_command

app = typer.Typer(
    cls=OneLineGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(version_of("epcomm"))
        raise typer.Exit


@app.callback()
def _epcomm(
    context: typer.Context,
    wants_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Expert-parallel communication: plan a layer, inspect a machine, time backends, read loads.

    Exit code 2: bad input, reported in one line.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("plan")(plan_command)
app.command("doctor")(doctor_command)
app.command("bench")(bench_command)
app.command("load")(load_command)
