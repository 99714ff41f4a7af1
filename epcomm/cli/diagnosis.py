"""Say what is on this machine, what is missing for which backend, and what to do about it.

Nothing with side effects is imported into this process, see platforms.findings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epcomm.platforms.deep_ep import DeepEPKind, Variable, communication_variables
from epcomm.platforms.findings import (
    Finding,
    Status,
    find_deep_ep_kind,
    find_packages,
    find_platform,
)
from epcomm.platforms.machine import Machine, this_machine
from epcomm.registry import BUFFERS, FUSED, RUNNERS, backend_class, class_names, runner_class
from epcomm.spec import Availability


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings of doctor().

    platform: torch, its distributed backends, devices.   packages: those that epcomm may use.
    deep_ep: which one it is; None where there is none.
    backends, runners: of the registries, fused operators among the backends.
    variables: see Variable.
    """

    platform: tuple[Finding, ...]
    packages: tuple[Finding, ...]
    deep_ep: DeepEPKind | None
    backends: tuple[Finding, ...]
    runners: tuple[Finding, ...]
    variables: tuple[Variable, ...]


def doctor(machine: Machine | None = None) -> Report:
    """Look at this machine.

    Args:
        machine: how to look; None: at the real one.

    Local; starts up to three short-lived processes.   Host sync: none.
    """
    machine = machine or this_machine()
    return Report(
        platform=find_platform(machine),
        packages=find_packages(machine),
        deep_ep=find_deep_ep_kind(machine),
        backends=tuple(_backend(name, machine) for name in (*BUFFERS, *FUSED)),
        runners=tuple(_runner(name, machine) for name in RUNNERS),
        variables=communication_variables(machine.environment),
    )


def _backend(name: str, machine: Machine) -> Finding:
    """Ask every class of a backend: it is here if one of them can run."""
    kinds = [backend_class(each) for each in class_names(name)]
    verdicts = [(kind, kind.probe(machine)) for kind in kinds]
    able = [kind for kind, verdict in verdicts if verdict.ok]
    modes = sorted({mode.value for kind in able or kinds for mode in kind.modes})
    lacking = [verdict for _, verdict in verdicts if not verdict.ok]
    return _part(name, f"serves {', '.join(modes)}", [] if able else lacking)


def _runner(name: str, machine: Machine) -> Finding:
    runner = runner_class(name)
    layouts = ", ".join(sorted(layout.value for layout in runner.layouts))
    kinds = ", ".join(kind.__name__ for kind in runner.kinds)
    verdict = runner.probe(machine)
    detail = f"computes {kinds}; reads {layouts}"
    return _part(name, detail, [] if verdict.ok else [verdict])


def _part(name: str, detail: str, lacking: Sequence[Availability]) -> Finding:
    """Return the finding on a backend or runner; `lacking`: what each of its classes lacks."""
    reasons = tuple(dict.fromkeys(reason for each in lacking for reason in each.reasons))
    needs = next((each.needs for each in lacking if each.needs), "")
    command = "" if needs else next((each.command for each in lacking if each.command), "")
    advice = f"run: {command}" if command else ""
    return Finding(
        name=name,
        status=Status.MISSING if lacking else Status.HERE,
        detail=detail,
        advice=f"no command can: it needs {needs}" if needs else advice,
        reasons=reasons,
        command=command,
    )
