"""Survey the candidates for a layer: a specification per phase, a verdict on each class.

Each rank judges its own machine. With a group all ranks then take part in one exchange, also a rank
that has an error, after which all ranks have the same verdicts, and make the same choice or raise.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import NoReturn, Self

from epcomm import registry
from epcomm.buffers.requirements import carrying_reasons, limit_reasons
from epcomm.collectives.base import Scalar
from epcomm.config import EPConfig, Mode
from epcomm.errors import ConfigError, EPError
from epcomm.group import EPGroup
from epcomm.planning.formats import buffer_spec
from epcomm.planning.measurements import Measurements, read_measurements
from epcomm.planning.ranks import PlannedRanks
from epcomm.platforms.host import host_of_this_process
from epcomm.platforms.nvlink import PeerReach, reach_of
from epcomm.spec import Availability, BufferCaps, BufferSpec, MoESpec
from epcomm.types import Int8Profile, WireDtype, WireFormat
from epcomm.weights.unquantized import ExpertTensors

PREFILL, DECODE = "prefill", "decode"
_RUNNER = "runner"
# Fields of the exchanged record: why a rank cannot plan, where it runs, which GPUs its own reaches.
# And what equal bits rest on, by runner.
_ERROR, _HOST, _REACH, _RESTS_ON = "error", "host", "reach", "rests on"


@dataclass(frozen=True, kw_only=True)
class PhaseSurvey:
    """The needs of one phase of a layer, and the verdict on each class by its name."""

    config: EPConfig
    spec: BufferSpec
    verdicts: Mapping[str, Availability]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The findings of a survey of backends and runners.

    phases: by PREFILL and DECODE; without the latter, decode is as prefill or unavailable.
    runners: verdicts by name; None without experts, and where an operator computes them.
    rests_on: with sum_groups, what equal bits of each runner rest on, by name.
    measurements: by which to choose among backends; None: by rules.
    """

    phases: Mapping[str, PhaseSurvey]
    runners: Mapping[str, Availability] | None
    rests_on: Mapping[str, str]
    measurements: Measurements | None

    def verdicts(self) -> dict[str, Availability]:
        """Return all verdicts, by `question/candidate`."""
        found = {f"{_RUNNER}/{name}": verdict for name, verdict in (self.runners or {}).items()}
        for phase, each in self.phases.items():
            found |= {f"{phase}/{name}": verdict for name, verdict in each.verdicts.items()}
        return found

    def of_all_ranks(self, found: Mapping[str, Availability], ranks: PlannedRanks) -> Self:
        """Return the survey with verdicts of all ranks, and of their hosts and links."""
        phases = {}
        for phase, each in self.phases.items():
            spec = replace(each.spec, hosts=ranks.layout)
            joint = {n: ranks.joint_reasons(registry.backend_class(n), spec) for n in each.verdicts}
            verdicts = {n: found[f"{phase}/{n}"].also(reasons) for n, reasons in joint.items()}
            phases[phase] = replace(each, spec=spec, verdicts=verdicts)
        runners = self.runners
        if runners is not None:
            runners = {name: found[f"{_RUNNER}/{name}"] for name in runners}
        return replace(self, phases=phases, runners=runners)


def _phase_configs(config: EPConfig) -> dict[str, EPConfig]:
    if Mode(config.mode) is not Mode.AUTO:
        return {PREFILL: config}
    max_tokens = config.max_tokens_per_rank
    # In mode auto the token limit is for decode; a prefill with exact sizes has none.
    prefill_tokens = None if config.max_recv_slots is None else max_tokens
    # Only low latency has logfmt10.
    sums = None if config.combine_dtype is WireDtype.LOGFMT10 else config.combine_dtype
    prefill = replace(config, mode=Mode.NORMAL, combine_dtype=sums)
    configs = {PREFILL: replace(prefill, max_tokens_per_rank=prefill_tokens)}
    if max_tokens is not None:
        # Low latency has capacity for any routing of max_tokens_per_rank tokens; the budget is for
        # prefill, and backward for training.
        decode = replace(config, mode=Mode.LOW_LATENCY, max_recv_slots=None, backward_dtype=None)
        configs[DECODE] = decode
    return configs


# Backends whose CPU ranks wait in every exchange, so that exact sizes cost them nothing.
_WAITS_ON_HOST = ("collective", "hierarchical")


def find_candidates(config: EPConfig, *, prefers_exact: bool = False) -> tuple[str, ...]:
    """Return the names of the classes that may serve `config`, in order of preference. Local.

    Of each backend, those that serve the mode, and among these those whose sizes are static or
    exact, and whose tokens are replicated or not, as the configuration says. Where a backend has
    none such, its other classes of the mode stay, so that a plan reports why they do not serve.

    prefers_exact: for low latency on CPU ranks, classes of exact sizes come first in each backend.
    """
    mode, found = Mode(config.mode), list[str]()
    for backend in registry.backend_names("auto", mode):
        names = registry.class_names(backend)
        of_mode = [name for name in names if mode in registry.backend_class(name).modes]
        if prefers_exact and backend in _WAITS_ON_HOST:
            exact = EPConfig(mode=Mode.NORMAL)
            found += [name for name in names if name not in of_mode and _is_meant(name, exact)]
        found += [name for name in of_mode if _is_meant(name, config)] or of_mode
    return tuple(found)


def _is_meant(name: str, config: EPConfig) -> bool:
    """Return whether mode, budget and `replicated` lead to this class of its backend."""
    mode, kind = Mode(config.mode), registry.backend_class(name)
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

    group: that of the ranks, which then exchange verdicts, hosts and reaches once; None for ranks
        that are not here. A rank that cannot judge raises its error after the exchange, in which
        the others learn of it.

    Collective: with a group, yes; without, no.   Host sync: with a group, yes.
    Raises:
        ConfigError: no class supports the layer or configuration; ranks disagree on them; or
            another rank cannot plan. Raised on every rank.
    """
    if group is None:
        found = judge(config, spec, weights, ranks)
        return found.of_all_ranks(found.verdicts(), ranks)
    group.limit_waits(config.timeout_s)
    found, error = None, None
    try:
        found = judge(config, spec, weights, ranks)
    except EPError as own_error:
        error = own_error
    own = {} if found is None else found.verdicts()
    findings: dict[str, Scalar] = {key: "\n".join(own[key].reasons) for key in own}
    findings |= {_ERROR: str(error or ""), _HOST: host_of_this_process()}
    if found is not None:
        findings |= {f"{_RESTS_ON}/{name}": text for name, text in found.rests_on.items()}
    if group.device.type == "cuda":
        findings[_REACH] = reach_of(group.device).as_text()
    record: dict[str, Scalar] = {_ERROR: "", "hosts": str(group.hosts or "not given")}
    record |= _as_record(config) | _as_record(spec) | _describe_experts(weights)
    records = group.calls.agree(record, what="plan", findings=findings)
    if error is not None:
        raise error
    failed = [f"rank {rank}: {each[_ERROR]}" for rank, each in enumerate(records) if each[_ERROR]]
    if failed:
        why = "; ".join(failed)
        raise ConfigError(f"plan: {why} (this is {group.where}); correct the rank named")
    assert found is not None, "this rank has met no error"
    hosts = [str(each[_HOST]) for each in records]
    reaches = [PeerReach.parse(str(each[_REACH])) for each in records if _REACH in each]
    verdicts = {key: _combine(records, key) for key in own}
    for name in found.runners or ():
        key = f"{_RUNNER}/{name}"
        verdicts[key] = verdicts[key].also(_unequal_machines(records, f"{_RESTS_ON}/{name}"))
    return found.of_all_ranks(verdicts, replace(ranks, hosts=hosts, reaches=reaches))


def judge(
    config: EPConfig, spec: MoESpec, weights: ExpertTensors | None, ranks: PlannedRanks
) -> Survey:
    """Judge the candidates by the facts that one rank knows without the others. Local.

    Raises:
        ConfigError: nothing serves such a layer or configuration.
    """
    spec.check()
    mode = Mode(config.mode)
    registry.backend_names(config.backend, mode)
    measurements = None if config.measurements is None else read_measurements(config.measurements)
    if config.runner != "auto":
        registry.runner_class(config.runner)
    for name in ("hidden_size", "dtype") if weights is not None else ():
        found, expected = getattr(weights, name), getattr(spec, name)
        if found != expected:
            raise ConfigError(
                f"plan: {name} of the experts is {found}, expected {expected} as in MoESpec; "
                "make the MoESpec from these experts"
            )
    runners, rests_on = None, {}
    if weights is not None and mode is not Mode.FUSEEP:
        machine = ranks.machine
        # Runners of other experts and devices are not candidates, unless one is named.
        kinds = {
            name: registry.runner_class(name)
            for name in registry.RUNNERS
            if name == config.runner or _is_candidate(name, config, weights)
        }
        runners = {name: kind.supports(weights, machine) for name, kind in kinds.items()}
        device = machine.device_of(weights.gate_up_proj)
        if config.product_sms is not None and device.type not in ("cpu", "meta"):
            most = {n: kinds[n].limit_reasons(weights, machine) for n, v in runners.items() if v.ok}
            runners |= {name: runners[name].also(reasons) for name, reasons in most.items()}
        if config.sum_groups is not None:
            able = [name for name, verdict in runners.items() if verdict.ok]
            found = {name: kinds[name].batch_invariance(weights, machine) for name in able}
            rests_on = {name: each.rests_on for name, each in found.items() if not each.reasons}
            runners |= {name: runners[name].also(each.reasons) for name, each in found.items()}
    phases = {
        phase: _survey_phase(
            each, spec, weights, ranks, prefers_exact=phase == DECODE and ranks.is_host_bound
        )
        for phase, each in _phase_configs(config).items()
    }
    return Survey(phases=phases, runners=runners, rests_on=rests_on, measurements=measurements)


def _is_candidate(name: str, config: EPConfig, weights: ExpertTensors) -> bool:
    runner, sums_groups = registry.runner_class(name), config.sum_groups is not None
    return runner.is_candidate(weights) and (sums_groups or not runner.is_for_sum_groups)


def _survey_phase(
    config: EPConfig,
    layer: MoESpec,
    weights: ExpertTensors | None,
    ranks: PlannedRanks,
    *,
    prefers_exact: bool,
) -> PhaseSurvey:
    wanted = WireFormat.of(layer.dtype) if weights is None else weights.wire_format
    spec = buffer_spec(config, layer, ranks.world_size, wanted)
    if weights is not None and Mode(config.mode) is Mode.FUSEEP:
        spec = replace(spec, intermediate_size=weights.intermediate_size)
    names = find_candidates(config, prefers_exact=prefers_exact)
    verdicts = {name: _judge_backend(name, config, spec, ranks, weights) for name in names}
    return PhaseSurvey(config=config, spec=spec, verdicts=verdicts)


def refuse_plan(group: EPGroup, error: ConfigError) -> NoReturn:
    """Raise the error that keeps this rank from planning, after the planning ranks learn of it.

    Collective: yes, with their plan().   Host sync: yes.
    """
    with suppress(ConfigError):
        group.calls.agree({_ERROR: str(error)}, what="plan")
    raise error


def _describe_experts(weights: ExpertTensors | None) -> dict[str, Scalar]:
    """Describe the experts, on whose agreement the result of a token depends."""
    if weights is None:
        return {}
    return {
        "experts": type(weights).__name__,
        "format": str(weights.format),
        "wanted rows": str(weights.wire_format),
        "intermediate_size": weights.intermediate_size,
        # Without this reason, experts that are frozen on one rank by mistake would silently not be
        # trained.
        "requires_grad": weights.requires_grad,
    }


def _as_record(values: EPConfig | MoESpec) -> dict[str, Scalar]:
    """Return the fields of a flat record as plain values; of a file its digest, not its path."""
    plain = (str, int, float, type(None))
    found = {field.name: getattr(values, field.name) for field in fields(values)}
    if found.get("measurements") is not None:
        try:
            found["measurements"] = f"sha256 {read_measurements(found['measurements']).digest}"
        except ConfigError as error:
            found["measurements"] = str(error)
    # StrEnum members are strings, and JSON writes them as such.
    return {name: v if isinstance(v, plain) else str(v) for name, v in found.items()}


def _combine(records: Sequence[Mapping[str, Scalar]], key: str) -> Availability:
    """Return the verdict of all ranks; a reason names its rank, unless all ranks have the same."""
    texts = [str(record.get(key, "unknown to this version")) for record in records]
    named = [("", texts[0])]
    if len(set(texts)) > 1:
        named = [(f"rank {rank}: ", text) for rank, text in enumerate(texts)]
    reasons = tuple(f"{name}{line}" for name, text in named for line in text.split("\n") if line)
    return Availability(ok=not reasons, reasons=reasons)


def _unequal_machines(records: Sequence[Mapping[str, Scalar]], key: str) -> list[str]:
    """Return why ranks would compute other bits than one another; empty if they are alike."""
    texts = [each.get(key) for each in records]
    found = dict.fromkeys(text for text in texts if text is not None)
    if len(found) <= 1:
        return []
    places = ", ".join(f"{text} on rank {texts.index(text)}" for text in found)
    return [f"sum_groups needs ranks that compute alike, but they have {places}"]


def _judge_backend(
    name: str,
    config: EPConfig,
    spec: BufferSpec,
    ranks: PlannedRanks,
    weights: ExpertTensors | None,
) -> Availability:
    buffer, mode = registry.backend_class(name), Mode(config.mode)
    caps, reasons = buffer.caps(mode), list(buffer.probe(ranks.machine).reasons)
    reasons += carrying_reasons(spec, caps)
    if config.deterministic and not caps.ordered:
        reasons.append("slots arrive in any order, and EPConfig.deterministic is set")
    if config.sum_groups is not None and not buffer.sums_groups:
        reasons.append("sums the results itself, in an order that depends on the number of ranks")
    if buffer.serves_replicated != config.replicated:
        reasons.append(f"needs EPConfig.replicated = {buffer.serves_replicated}")
    if mode is Mode.FUSEEP:
        reasons += _fused_reasons(name, config, weights)
    else:
        reasons += _row_reasons(config, spec, caps)
    reasons += limit_reasons(spec, caps, mode)
    reasons += buffer.lacks(mode, spec, ranks.world_size)
    reasons += buffer.lacks_with(ranks.machine, spec, ranks.world_size)
    reasons += ranks.own_reasons(buffer, caps)
    return Availability(ok=not reasons, reasons=tuple(reasons))


def _fused_reasons(name: str, config: EPConfig, weights: ExpertTensors | None) -> list[str]:
    operator, reasons = registry.fused_class(name), []
    if weights is not None:
        reasons += operator.supports(weights).reasons
    if config.runner != "auto":
        reasons.append(f"computes experts itself, without runner {config.runner}; leave it auto")
    if config.product_sms is not None:
        reasons.append("computes experts itself, without the limit of EPConfig.product_sms")
    if config.int8_profile not in (None, operator.int8_profile):
        reasons.append(f"rounds INT8 by {operator.int8_profile.value}, not {config.int8_profile}")
    return reasons


def _row_reasons(config: EPConfig, spec: BufferSpec, caps: BufferCaps) -> list[str]:
    """Return why the rows that a backend returns are not those that the configuration asks for."""
    reasons, profile = [], Int8Profile(config.int8_profile or Int8Profile.RINT127)
    if config.runner != "auto" and caps.layout not in registry.runner_class(config.runner).layouts:
        reasons.append(f"returns {caps.layout.value}, which runner {config.runner} does not read")
    if spec.dispatch_format.dtype is WireDtype.INT8 and profile not in caps.int8_profiles:
        made = ", ".join(sorted(each.value for each in caps.int8_profiles))
        reasons.append(f"makes INT8 rows by {made}, but EPConfig.int8_profile is {profile.value}")
    return reasons
