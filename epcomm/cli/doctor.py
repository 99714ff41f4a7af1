"""`epcomm doctor`: what works on this machine, and what to do next."""

import json as json_module
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from epcomm.bench.machine import version_of
from epcomm.cli.diagnosis import DoctorReport, doctor
from epcomm.cli.one_line import BadInput
from epcomm.config import Mode
from epcomm.errors import grouped
from epcomm.platforms.findings import TESTED_VERSIONS, Finding, Status
from epcomm.registry import BACKEND_GROUPS, BUFFERS, FUSED, RUNNERS

_STYLES = {Status.HERE: "green", Status.MISSING: "dim", Status.ATTENTION: "yellow"}
# The modes that backends serve.
_MODES = tuple(mode.value for mode in Mode if mode is not Mode.AUTO)
# Steps without --verbose, so that the output has 20 lines at most.
_SHOWN_STEPS = 5
# The exit code if something that the user named is not available.
NOT_HERE = 1


def doctor_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Backends and runners that have to be here; none: something to serve."),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Print what is not here too, why, and what would bring it."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one object; docs/commands.md has its keys.")
    ] = False,
) -> None:
    """Print what works on this machine and what to do next, or details of the parts NAMED.

    Exit code 0: every backend and runner NAMED is available; without names, at least one of each.
    1: one of them is not available. 2: bad input, such as a name that does not exist.
    """
    known = sorted({*BUFFERS, *BACKEND_GROUPS, *FUSED, *RUNNERS})
    for name in names or []:
        if name not in known:
            raise BadInput(f"epcomm doctor: {name!r} is no backend or runner, expected of {known}")
    report = doctor()
    if json:
        sys.stdout.write(as_json(report, names or []))
    elif names:
        _show_parts(Console(), report, names)
    else:
        _show(report, verbose=verbose)
    raise typer.Exit(0 if _is_enough(report, names or []) else NOT_HERE)


def as_json(report: DoctorReport, names: Sequence[str]) -> str:
    """Return the report as one JSON object; with names, with these backends and runners alone."""
    parts = {"backends": report.backends, "runners": report.runners}
    values = {
        "version": version_of("epcomm"),
        "ok": _is_enough(report, names),
        "platform": [_plain(each) for each in report.platform],
        "packages": [_plain(each) for each in report.packages],
        "deep_ep": report.deep_ep,
        **{kind: [_plain(each) for each in _named(found, names)] for kind, found in parts.items()},
        "variables": [asdict(each) for each in report.variables],
        "next_steps": list(report.next_steps),
    }
    return json_module.dumps(values, indent=1) + "\n"


def _named(findings: Sequence[Finding], names: Sequence[str]) -> list[Finding]:
    # deep_ep stands for its two backends, any other name for itself.
    wanted = {part for name in names for part in BACKEND_GROUPS.get(name, (name,))}
    return [each for each in findings if not names or each.name in wanted]


def _is_enough(report: DoctorReport, names: Sequence[str]) -> bool:
    parts = (report.backends, report.runners)
    asked = [_named([*parts[0], *parts[1]], [name]) for name in names]
    return all(any(each.status is Status.HERE for each in found) for found in asked or parts)


def _plain(finding: Finding) -> dict[str, object]:
    return {**asdict(finding), "command": finding.command or None}


def _show(report: DoctorReport, *, verbose: bool) -> None:
    console = Console(highlight=False)
    console.print(_summary(report))
    write = partial(console.print, markup=False, soft_wrap=True)
    steps = report.next_steps if verbose else report.next_steps[:_SHOWN_STEPS]
    is_cut = len(steps) < len(report.next_steps)
    write(f"next ({len(steps)} of {len(report.next_steps)} steps):" if is_cut else "next:")
    for step in steps:
        write(f"- {step}")
    if not verbose:
        write("- see what is not here, and why: epcomm doctor --verbose")
        return
    for kind, findings in (("platform", report.platform), ("package", report.packages)):
        rows = [(each.name, each.status, each.detail, each.advice) for each in findings]
        console.print(_table((kind, "", "found", "what to do"), rows))
    _show_parts(console, report, ())
    found = [each for each in report.variables if each.value is not None]
    if found:
        headings = ("environment variable", "here", "deep_ep V1 writes", "what to do")
        rows = [(each.name, repr(each.value), each.written or "", each.advice) for each in found]
        console.print(_table(headings, rows))


def _summary(report: DoctorReport) -> Table:
    """Return what works here, a line each; longer lines are cut."""
    found = {each.name: each for each in (*report.platform, *report.packages)}
    here = {name: each.detail for name, each in found.items() if each.status is Status.HERE}
    tested = ", ".join(f"{name} {low} to {high}" for name, (low, high) in TESTED_VERSIONS.items())
    gpus = here.get("CUDA devices", "").splitlines()
    transports = [here.get("distributed backends"), "mpi4py" in here and f"MPI {here['mpi4py']}"]
    lines = {
        "tested with": tested,
        "torch": found["torch"].detail,
        "triton": found["triton"].detail,
        "devices": f"{len(gpus)} x {gpus[0]}; CPU" if gpus else "CPU",
        "transports": ", ".join(filter(None, transports)) or "none",
    }
    kinds = sorted({kind for each in report.runners for kind in each.serves})
    for served in (*_MODES, *kinds):
        parts = [each for each in (*report.backends, *report.runners) if served in each.serves]
        names = [each.name for each in parts if each.status is Status.HERE]
        lines[served] = ", ".join(names) or "none"
    title = f"epcomm {version_of('epcomm')}: what works here"
    table = Table("", Column(title, overflow="ellipsis", no_wrap=True), box=None)
    for name, text in lines.items():
        table.add_row(name, escape(text.splitlines()[0]))
    return table


def _show_parts(console: Console, report: DoctorReport, names: Sequence[str]) -> None:
    for kind, found in (("backend", report.backends), ("runner", report.runners)):
        if parts := _named(found, names):
            console.print(_parts_table(kind, parts))


def _parts_table(kind: str, findings: Sequence[Finding]) -> Table:
    """Return a row for each part that is here, and one for all that lack the same."""
    rows: list[tuple[str, ...]] = []
    keys = [
        (each.detail,) if each.status is Status.HERE else (each.advice, *each.reasons)
        for each in findings
    ]
    for group in grouped(zip(keys, findings, strict=True)).values():
        first = group[0]
        names = "\n".join(each.name for each in group)
        served = dict.fromkeys(served for each in group for served in each.serves)
        detail = first.detail if first.status is Status.HERE else ", ".join(served)
        rows.append((names, first.status, detail, "\n".join(first.reasons), first.advice))
    return _table((kind, "", "found", "why not", "what would bring it"), rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(
        Column(headings[0], no_wrap=True), *(Column(each, overflow="fold") for each in headings[1:])
    )
    for row in rows:
        table.add_row(*(Text(c, _STYLES[c]) if isinstance(c, Status) else Text(c) for c in row))
    return table
