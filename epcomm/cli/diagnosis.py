"""Find what this machine has, what each backend and runner lacks, and what to do next.

Nothing with side effects is imported into this process, see platforms.findings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from epcomm.platforms.deep_ep import DeepEPKind, Variable, communication_variables
from epcomm.platforms.findings import Finding, Status, find_packages, find_platform
from epcomm.platforms.machine import Machine, this_machine
from epcomm.registry import BUFFERS, FUSED, RUNNERS, backend_class, class_names, runner_class
from epcomm.spec import Availability


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """The findings of doctor().

    platform: torch, its distributed backends, devices.   packages: those that epcomm may use.
    deep_ep: the kind that is installed; None where there is none.
    backends, runners: of the registries, fused operators among the backends.
    variables: see Variable.   next_steps: one step per line, with its command if it has one;
        urgent steps come first.
    """

    platform: tuple[Finding, ...]
    packages: tuple[Finding, ...]
    deep_ep: DeepEPKind | None
    backends: tuple[Finding, ...]
    runners: tuple[Finding, ...]
    variables: tuple[Variable, ...]
    next_steps: tuple[str, ...] = ()


def doctor(machine: Machine | None = None) -> DoctorReport:
    """Inspect a machine.

    machine: the machine to inspect; None: this machine.

    Local; starts up to three short-lived processes.   Host sync: none.
    """
    machine = machine or this_machine()
    deep_ep = machine.find_deep_ep()
    report = DoctorReport(
        platform=find_platform(machine),
        packages=find_packages(machine),
        deep_ep=None if deep_ep is None else deep_ep.kind,
        backends=tuple(_backend(name, machine) for name in (*BUFFERS, *FUSED)),
        runners=tuple(_runner(name, machine) for name in RUNNERS),
        variables=communication_variables(machine.environment),
    )
    return replace(report, next_steps=tuple(_next_steps(report)))


# Packages that are useful on any machine; the others need a certain device.
_OPTIONAL = ("transformers", "mpi4py")


def _next_steps(report: DoctorReport) -> Iterator[str]:
    platform = {each.name: each for each in report.platform}
    for each in (*report.platform, *report.packages):
        if each.status is Status.ATTENTION:
            yield f"{each.name} ({each.detail.splitlines()[0]}): {each.advice}"
    if "distributed backends" not in platform:
        return
    gpus = platform["CUDA devices"]
    num_gpus = len(gpus.detail.splitlines()) if gpus.status is Status.HERE else 0
    for each in (*_worth_bringing(report.backends), *_worth_bringing(report.runners)):
        yield f"for {each.name}, which would serve {', '.join(each.serves)}: {each.command}"
    if num_gpus:
        yield (
            "check and time the backends between GPUs: "
            f"torchrun --nproc-per-node {num_gpus} -m epcomm bench"
        )
    if platform["distributed backends"].status is Status.HERE:
        yield "train and decode on CPU ranks: torchrun --nproc-per-node 4 examples/hello_ep.py"
        if not num_gpus:
            yield "check and time the backends between CPU ranks: epcomm bench --ranks 4"
    if not num_gpus:
        yield (
            "see what GPUs that are not here would take: epcomm plan --device h200 --ranks 8 "
            "--hidden-size 7168 --num-experts 256 --top-k 8 --max-tokens 128"
        )
    for each in report.packages:
        if each.name in _OPTIONAL and each.status is Status.MISSING:
            yield f"{each.name} ({each.detail}): {each.advice}"


def _worth_bringing(parts: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the parts that a command would bring and that auto would then take."""
    served: set[str] = set()
    for each in parts:
        if each.command and not served.issuperset(each.serves):
            yield each
        if each.command or each.status is Status.HERE:
            served |= set(each.serves)


def _backend(name: str, machine: Machine) -> Finding:
    """Probe every class of a backend: it is here if one of them can run."""
    kinds = [backend_class(each) for each in class_names(name)]
    verdicts = [(kind, kind.probe(machine)) for kind in kinds]
    able = [kind for kind, verdict in verdicts if verdict.ok]
    modes = tuple(sorted({mode.value for kind in able or kinds for mode in kind.modes}))
    lacking = [verdict for _, verdict in verdicts if not verdict.ok]
    return _part(name, f"serves {', '.join(modes)}", modes, [] if able else lacking)


def _runner(name: str, machine: Machine) -> Finding:
    runner = runner_class(name)
    layouts = ", ".join(sorted(layout.value for layout in runner.layouts))
    kinds = tuple(kind.__name__ for kind in runner.kinds)
    verdict = runner.probe(machine)
    detail = f"computes {', '.join(kinds)}; reads {layouts}"
    return _part(name, detail, kinds, [] if verdict.ok else [verdict])


def _part(name: str, detail: str, serves: tuple[str, ...], lacking: list[Availability]) -> Finding:
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
        serves=serves,
    )
