"""`epcomm doctor`: what is on this machine, what is missing, and what to do about it."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epcomm.cli.diagnosis import Report, doctor
from epcomm.cli.one_line import BadInput
from epcomm.cli.version import version
from epcomm.platforms.deep_ep import Variable
from epcomm.platforms.findings import Finding, Status
from epcomm.registry import BACKEND_GROUPS, BUFFERS, FUSED, RUNNERS

_STYLES = {Status.HERE: "green", Status.MISSING: "dim", Status.ATTENTION: "yellow"}
# The exit code where something that was asked for is not here.
NOT_HERE = 1


def doctor_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Backends and runners that have to be here; none: something to serve."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one object, which docs/commands.md tells of.")
    ] = False,
) -> None:
    """Print what is on this machine, what is missing for which backend, and what would bring it.

    Exit code 0: every backend and runner NAMED is here; without names, at least one of each.
    1: one of them is not. 2: bad input, such as a name that does not exist.
    """
    _check_names(names or [])
    report = doctor()
    if json:
        sys.stdout.write(as_json(report, names or []))
    else:
        _show(report, names or [])
    raise typer.Exit(0 if _is_enough(report, names or []) else NOT_HERE)


def as_json(report: Report, names: Sequence[str]) -> str:
    """Return the report as one JSON object; with names, with these backends and runners alone."""
    parts = {"backends": report.backends, "runners": report.runners}
    values = {
        "version": version(),
        "ok": _is_enough(report, names),
        "platform": [_plain(each) for each in report.platform],
        "packages": [_plain(each) for each in report.packages],
        "deep_ep": report.deep_ep,
        **{kind: [_plain(each) for each in _named(found, names)] for kind, found in parts.items()},
        "variables": [asdict(each) for each in report.variables],
    }
    return json_module.dumps(values, indent=1) + "\n"


def _check_names(names: Sequence[str]) -> None:
    known = sorted({*BUFFERS, *BACKEND_GROUPS, *FUSED, *RUNNERS})
    for name in names:
        if name not in known:
            raise BadInput(f"epcomm doctor: {name!r} is no backend or runner, expected of {known}")


def _named(findings: Sequence[Finding], names: Sequence[str]) -> list[Finding]:
    wanted = {part for name in names for part in _parts(name)}
    return [each for each in findings if not names or each.name in wanted]


def _parts(name: str) -> tuple[str, ...]:
    """Return what a name stands for: deep_ep for its two backends, any other for itself."""
    return BACKEND_GROUPS.get(name, (name,))


def _is_enough(report: Report, names: Sequence[str]) -> bool:
    here = {each.name for each in (*report.backends, *report.runners) if each.status is Status.HERE}
    if names:
        return all(not here.isdisjoint(_parts(name)) for name in names)
    parts = (report.backends, report.runners)
    return all(any(each.name in here for each in found) for found in parts)


def _plain(finding: Finding) -> dict[str, object]:
    return {**asdict(finding), "command": finding.command or None}


def _show(report: Report, names: Sequence[str]) -> None:
    console = Console()
    if not names:
        console.print(_findings_table("platform", report.platform))
        console.print(_findings_table("package", report.packages))
    for kind, found in (("backend", report.backends), ("runner", report.runners)):
        if parts := _named(found, names):
            console.print(_parts_table(kind, parts))
    if not names:
        console.print(_variables_table(report.variables))


def _findings_table(kind: str, findings: Sequence[Finding]) -> Table:
    table = _table(kind, "found", "what to do")
    for finding in findings:
        table.add_row(*_verdict(finding), escape(finding.detail), escape(finding.advice))
    return table


def _parts_table(kind: str, findings: Sequence[Finding]) -> Table:
    table = _table(kind, "found", "why not", "what would bring it")
    for finding in findings:
        why = "\n".join(finding.reasons)
        cells = (finding.detail, why, finding.advice)
        table.add_row(*_verdict(finding), *map(escape, cells))
    return table


def _table(kind: str, *headings: str) -> Table:
    table = Table()
    table.add_column(kind, no_wrap=True)
    for heading in ("", *headings):
        table.add_column(heading, overflow="fold")
    return table


def _verdict(finding: Finding) -> tuple[str, str]:
    return finding.name, f"[{_STYLES[finding.status]}]{finding.status.value}[/]"


def _variables_table(variables: Sequence[Variable]) -> Table:
    table = Table()
    table.add_column("environment variable", no_wrap=True)
    for heading in ("here", "deep_ep V1 writes", "what to do"):
        table.add_column(heading, overflow="fold")
    for variable in variables:
        value = "not set" if variable.value is None else repr(variable.value)
        table.add_row(variable.name, escape(value), variable.written or "", variable.advice)
    return table
