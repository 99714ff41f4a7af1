"""Survey what could serve a layer: a specification a phase, a verdict on each backend and runner.

Each rank judges alone. With a group all ranks then take part in one exchange, also one that has met
an error, after which they know the same and choose, or raise, alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from epcomm.buffers.requirements import carrying_reasons, limit_reasons
from epcomm.config import EPConfig, Mode
from epcomm.errors import ConfigError, EPError
from epcomm.planning.formats import buffer_spec
from epcomm.planning.measurements import Measurements, read_measurements
from epcomm.planning.ranks import PlannedRanks
from epcomm.platforms.host import host_of_this_process
from epcomm.platforms.nvlink import PeerReach, reach_of
from epcomm.registry import (
    RUNNERS,
    backend_class,
    backend_names,
    class_names,
    fused_class,
    runner_class,
)
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import Int8Profile, WireDtype, WireFormat

if TYPE_CHECKING:
    from epcomm.collectives.base import Scalar
    from epcomm.group import EPGroup
    from epcomm.spec import MoESpec
    from epcomm.weights.unquantized import ExpertTensors

# The field of the compared record in which a rank says why it cannot plan.
_ERROR = "error"
# That in which it says where it runs.
_HOST = "host"
# That in which it says which GPUs its own one reaches.
_REACH = "reach"
# The questions: which backend serves a phase, which runner computes the experts.
PREFILL, DECODE, RUNNER = "prefill", "decode", "runner"


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The findings of a survey of backends and runners.

    specs: by phase.   verdicts: by question, then by the candidate's name: of a class for the
        phases, of the registry for runners.
    measurements: by which to choose among backends; None: by rules.
    """

    specs: Mapping[str, BufferSpec]
    verdicts: Mapping[str, Mapping[str, Availability]]
    measurements: Measurements | None = None


def phase_configs(config: EPConfig) -> dict[str, EPConfig]:
    """Return each phase's configuration; without DECODE, decode is as prefill or unavailable."""
    mode = Mode(config.mode)
    if mode is not Mode.AUTO:
        return {PREFILL: config}
    max_tokens = config.max_tokens_per_rank
    # In auto the token limit is decode's: a prefill of exact size has none.
    prefill_tokens = None if config.max_recv_slots is None else max_tokens
    configs = {PREFILL: replace(config, mode=Mode.NORMAL, max_tokens_per_rank=prefill_tokens)}
    if max_tokens is not None:
        # Low latency has capacity for any routing of so few tokens; the budget is prefill's.
        configs[DECODE] = replace(config, mode=Mode.LOW_LATENCY, max_recv_slots=None)
    return configs


# Backends whose CPU ranks wait in every exchange, so that exact sizes cost them nothing.
_WAITS_ON_HOST = ("collective", "hierarchical")


def find_candidates(config: EPConfig, *, prefers_exact: bool = False) -> tuple[str, ...]:
    """Return the names of the classes that may serve `config`, in order of preference. Local.

    Of each backend, those that serve the mode, and among these those whose sizes are static or
    exact, and whose tokens are replicated or not, as the configuration says. Where a backend has
    none such, its other classes of the mode stay, to say why they do not serve.

    prefers_exact: for low latency on CPU ranks, classes of exact sizes come first in each backend.
    """
    mode, found = Mode(config.mode), list[str]()
    for backend in backend_names("auto", mode):
        names = class_names(backend)
        of_mode = [name for name in names if mode in backend_class(name).modes]
        if prefers_exact and backend in _WAITS_ON_HOST:
            exact = EPConfig(mode=Mode.NORMAL)
            found += [name for name in names if name not in of_mode and _is_meant(name, exact)]
        found += [name for name in of_mode if _is_meant(name, config)] or of_mode
    return tuple(found)


def _is_meant(name: str, config: EPConfig) -> bool:
    """Return whether mode, budget and `replicated` lead to this class of its backend."""
    mode, kind = Mode(config.mode), backend_class(name)
    if mode not in kind.modes or kind.serves_replicated != config.replicated:
        return False
    # The other modes have one kind of sizes each.
    has_budget = config.max_recv_slots is not None
    return mode is not Mode.NORMAL or kind.caps(mode).is_static == has_budget


def survey(
    config: EPConfig,
    spec: MoESpec,
    weights: ExpertTensors | None,
    ranks: PlannedRanks,
    group: EPGroup | None = None,
) -> Survey:
    """Judge every backend, and with weights every runner: a candidate serves where all ranks can.

    group: that of the ranks, which then judge together; None for ranks that are not here.

    Collective: with a group, yes; without, no.   Host sync: with a group, yes.
    Raises:
        ConfigError: nothing serves such a layer or configuration; or ranks disagree on them, or
            another rank cannot plan: on every rank.
    """
    if group is None:
        found = judge(config, spec, weights, ranks)
    else:
        found, ranks = _judge_on_all(config, spec, weights, ranks, group)
    specs = {phase: replace(each, hosts=ranks.layout) for phase, each in found.specs.items()}
    verdicts = dict(found.verdicts)
    for phase, each in specs.items():
        verdicts[phase] = {
            name: verdict.also(ranks.joint_reasons(backend_class(name), each))
            for name, verdict in verdicts[phase].items()
        }
    return replace(found, specs=specs, verdicts=verdicts)


def judge(
    config: EPConfig, spec: MoESpec, weights: ExpertTensors | None, ranks: PlannedRanks
) -> Survey:
    """Judge what one rank can, as far as it knows without the others. Local.

    Raises:
        ConfigError: nothing serves such a layer or configuration.
    """
    spec.check()
    backend_names(config.backend, Mode(config.mode))
    measurements = None if config.measurements is None else read_measurements(config.measurements)
    if config.runner != "auto":
        runner_class(config.runner)
    wanted = WireFormat.of(spec.dtype)
    if weights is not None:
        _check_fit(spec, weights)
        wanted = weights.wire_format
    configs = phase_configs(config)
    specs = {
        phase: buffer_spec(each, spec, ranks.world_size, wanted) for phase, each in configs.items()
    }
    is_fused = Mode(config.mode) is Mode.FUSEEP
    if is_fused and weights is not None:
        sized = replace(specs[PREFILL], intermediate_size=weights.intermediate_size)
        specs = {PREFILL: sized}
    verdicts: dict[str, Mapping[str, Availability]] = {}
    for phase, each in configs.items():
        names = find_candidates(each, prefers_exact=phase == DECODE and ranks.is_host_bound)
        verdicts[phase] = {
            name: _judge_backend(name, each, specs[phase], ranks, weights) for name in names
        }
    if weights is not None and not is_fused:
        # Runners of other experts and devices are no candidates, unless one is asked for.
        verdicts[RUNNER] = {
            name: runner_class(name).supports(weights, ranks.machine)
            for name in RUNNERS
            if name == config.runner or runner_class(name).is_candidate(weights)
        }
    return Survey(specs=specs, verdicts=verdicts, measurements=measurements)


def _judge_on_all(
    config: EPConfig,
    spec: MoESpec,
    weights: ExpertTensors | None,
    ranks: PlannedRanks,
    group: EPGroup,
) -> tuple[Survey, PlannedRanks]:
    """Return the verdicts of all ranks, and their hosts and reaches, in one exchange.

    A rank that cannot judge keeps its error until the others have heard of it.
    """
    group.limit_waits(config.timeout_s)
    error, found = None, Survey(specs={}, verdicts={})
    try:
        found = judge(config, spec, weights, ranks)
    except EPError as own_error:
        error = own_error
    findings: dict[str, Scalar] = {
        f"{question}/{name}": "\n".join(verdict.reasons)
        for question, verdicts in found.verdicts.items()
        for name, verdict in verdicts.items()
    }
    findings |= {_ERROR: str(error or ""), _HOST: host_of_this_process()}
    if group.device.type == "cuda":
        findings[_REACH] = reach_of(group.device).as_text()
    record: dict[str, Scalar] = {_ERROR: "", "hosts": str(group.hosts or "not given")}
    record |= _as_record(config) | _as_record(spec) | _describe_experts(weights)
    records = group.calls.agree(record, what="plan", findings=findings)
    if error is not None:
        raise error
    failed = [f"rank {rank}: {each[_ERROR]}" for rank, each in enumerate(records) if each[_ERROR]]
    if failed:
        raise ConfigError(
            f"plan: {'; '.join(failed)} (this is {group.where}); correct the rank named"
        )
    verdicts = {
        question: {name: _combine(records, f"{question}/{name}") for name in candidates}
        for question, candidates in found.verdicts.items()
    }
    hosts = [str(each[_HOST]) for each in records]
    reaches = [PeerReach.parse(str(each[_REACH])) for each in records if _REACH in each]
    return replace(found, verdicts=verdicts), replace(ranks, hosts=hosts, reaches=reaches)


def refuse_plan(group: EPGroup, error: ConfigError) -> NoReturn:
    """Raise what keeps this rank from planning, after the others, which plan, have heard of it.

    Collective: yes, with their plan().   Host sync: yes.
    """
    with suppress(ConfigError):
        group.calls.agree({_ERROR: str(error)}, what="plan")
    raise error


def _describe_experts(weights: ExpertTensors | None) -> dict[str, Scalar]:
    """Describe what a rank computes; if it differs, a token's result depends on where it goes."""
    if weights is None:
        return {}
    return {
        "experts": type(weights).__name__,
        "format": str(weights.format),
        "wanted rows": str(weights.wire_format),
        "intermediate_size": weights.intermediate_size,
        # Experts frozen on one rank alone by mistake would stay as they are silently.
        "requires_grad": weights.requires_grad,
    }


def _as_record(values: EPConfig | MoESpec) -> dict[str, Scalar]:
    """Return the fields of a flat record as plain values; of a file its digest, not its path."""
    plain = (str, int, float, type(None))
    found = {field.name: getattr(values, field.name) for field in fields(values)}
    if found.get("measurements") is not None:
        found["measurements"] = _digest_of(found["measurements"])
    # StrEnum members are strings, and JSON writes them as such.
    return {name: v if isinstance(v, plain) else str(v) for name, v in found.items()}


def _digest_of(path: str | Path) -> str:
    """Return the digest of a file, or why it has none, which the other ranks are to hear."""
    try:
        return f"sha256 {read_measurements(path).digest}"
    except ConfigError as error:
        return str(error)


def _combine(records: Sequence[Mapping[str, Scalar]], key: str) -> Availability:
    """Return the verdict of all ranks; a reason names its rank, unless all ranks have the same."""
    texts = [str(record.get(key, "unknown to this version")) for record in records]
    if len(set(texts)) == 1:
        reasons = [line for line in texts[0].split("\n") if line]
    else:
        reasons = [
            f"rank {rank}: {line}"
            for rank, text in enumerate(texts)
            for line in text.split("\n")
            if line
        ]
    return Availability(ok=not reasons, reasons=tuple(reasons))


def _check_fit(spec: MoESpec, weights: ExpertTensors) -> None:
    """Check that the experts take the layer's hidden states, so that what they compute comes."""
    sides = {
        "hidden_size": (weights.hidden_size, spec.hidden_size),
        "dtype": (weights.dtype, spec.dtype),
    }
    for name, (found, expected) in sides.items():
        if found != expected:
            raise ConfigError(
                f"plan: {name} of the experts is {found}, expected {expected} as MoESpec says; "
                "make the MoESpec from these experts"
            )


def _judge_backend(
    name: str,
    config: EPConfig,
    spec: BufferSpec,
    ranks: PlannedRanks,
    weights: ExpertTensors | None,
) -> Availability:
    """Return everything that keeps one backend from serving a phase on this rank."""
    buffer, mode = backend_class(name), Mode(config.mode)
    caps, reasons = buffer.caps(mode), list(buffer.probe(ranks.machine).reasons)
    reasons += carrying_reasons(spec, caps)
    if config.deterministic and not caps.ordered:
        reasons.append("slots arrive in any order, and EPConfig.deterministic is set")
    if buffer.serves_replicated != config.replicated:
        reasons.append(f"needs EPConfig.replicated = {buffer.serves_replicated}")
    if mode is Mode.FUSEEP:
        reasons += _fused_reasons(name, config, weights)
    else:
        reasons += _runner_reasons(config, caps)
        if spec.dispatch_format.dtype is WireDtype.INT8:
            reasons += _int8_reasons(config, caps)
    reasons += limit_reasons(spec, caps, mode)
    reasons += buffer.lacks(mode, spec, ranks.world_size)
    reasons += buffer.lacks_with(ranks.machine, spec, ranks.world_size)
    reasons += ranks.own_reasons(buffer, caps)
    return Availability(ok=not reasons, reasons=tuple(reasons))


def _fused_reasons(name: str, config: EPConfig, weights: ExpertTensors | None) -> list[str]:
    """Return what keeps a fused operator from computing the experts as configured."""
    operator, reasons = fused_class(name), []
    if weights is not None:
        reasons += operator.supports(weights).reasons
    if config.runner != "auto":
        reasons.append(f"computes experts itself, without runner {config.runner}; leave it auto")
    if config.int8_profile not in (None, operator.int8_profile):
        reasons.append(f"rounds INT8 by {operator.int8_profile.value}, not {config.int8_profile}")
    return reasons


def _runner_reasons(config: EPConfig, caps: BufferCaps) -> list[str]:
    if config.runner == "auto" or caps.layout in runner_class(config.runner).layouts:
        return []
    return [f"hands out {caps.layout.value}, which runner {config.runner} does not read"]


def _int8_reasons(config: EPConfig, caps: BufferCaps) -> list[str]:
    """Say why the INT8 rows that a package makes itself are not those asked for."""
    profile = Int8Profile(config.int8_profile or Int8Profile.RINT127)
    if profile in caps.int8_profiles:
        return []
    made = ", ".join(sorted(each.value for each in caps.int8_profiles))
    return [f"makes INT8 rows by {made}, but EPConfig.int8_profile is {profile.value}"]
