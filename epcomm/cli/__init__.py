"""The command `epcomm`: plan a layer, look at a machine. Neither needs a GPU."""

import typer

from epcomm.cli.bench import bench_command
from epcomm.cli.doctor import doctor_command
from epcomm.cli.plan import plan_command

app = typer.Typer(
    help="Expert-parallel communication: plan a layer, look at a machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)
app.command("bench")(bench_command)
