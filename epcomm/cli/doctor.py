"""`epcomm doctor`: what is on this machine, what is missing, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epcomm.cli.diagnosis import doctor
from epcomm.platforms.deep_ep import Variable
from epcomm.platforms.findings import Finding, Status

_STYLES = {Status.HERE: "green", Status.MISSING: "dim", Status.ATTENTION: "yellow"}


def doctor_command() -> None:
    """Print what is on this machine, what is missing for which backend, and what to do."""
    report = doctor()
    console = Console()
    console.print(_findings_table("platform", report.platform))
    console.print(_findings_table("package", report.packages))
    console.print(_findings_table("backend", report.backends))
    console.print(_findings_table("runner", report.runners))
    console.print(_variables_table(report.variables))


def _findings_table(kind: str, findings: Sequence[Finding]) -> Table:
    table = Table()
    table.add_column(kind, no_wrap=True)
    for heading in ("", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        status = f"[{_STYLES[finding.status]}]{finding.status.value}[/]"
        table.add_row(finding.name, status, escape(finding.detail), escape(finding.advice))
    return table


def _variables_table(variables: Sequence[Variable]) -> Table:
    table = Table()
    table.add_column("environment variable", no_wrap=True)
    for heading in ("here", "deep_ep V1 writes", "what to do"):
        table.add_column(heading, overflow="fold")
    for variable in variables:
        value = "not set" if variable.value is None else repr(variable.value)
        table.add_row(variable.name, escape(value), variable.written or "", variable.advice)
    return table
