"""Say what ranks find before a plan is made: a specification a phase, a verdict on each backend.

A rank looks for itself first and keeps an error it meets, so that with a group every rank takes
part in one exchange, after which all of them know the same and choose, or raise, alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from epcomm.buffers.requirements import carrying_reasons, limit_reasons
from epcomm.config import EPConfig, Mode
from epcomm.errors import ConfigError, EPError, shown
from epcomm.planning.measurements import Measurements, read_measurements
from epcomm.planning.ranks import Transport, judge_together, layout_of
from epcomm.platforms.assumed import AssumedMachine
from epcomm.platforms.host import host_of_this_process
from epcomm.platforms.machine import Machine, this_machine
from epcomm.platforms.nvlink import PeerReach, reach_of
from epcomm.quantization import QUANTIZED_FORMATS
from epcomm.registry import (
    RUNNERS,
    backend_class,
    backend_names,
    class_names,
    fused_class,
    runner_class,
)
from epcomm.spec import Availability, BufferCaps, BufferSpec, HostLayout
from epcomm.types import MAX_RANKS, Int8Profile, ScaleDtype, WireDtype, WireFormat, is_size

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


def find_candidates(config: EPConfig, *, prefers_exact: bool = False) -> tuple[str, ...]:
    """Return the names of the classes that may serve `config`, in order of preference. Local.

    Of each backend, those that serve the mode, and among these those whose sizes are static or
    exact, and whose tokens are replicated or not, as the configuration says. Where a backend has
    none such, its other classes of the mode stay, to say why they do not serve.

    prefers_exact: for low latency on CPU ranks, classes of exact sizes come first in each backend.
    """
    mode, found = Mode(config.mode), list[str]()
    for backend in backend_names("auto", mode):
        of_mode = [name for name in class_names(backend) if mode in backend_class(name).modes]
        if prefers_exact and backend in _WAITS_ON_HOST:
            found += [name for name in _exact_on_cpu(backend) if name not in of_mode]
        found += [name for name in of_mode if _is_meant(name, config)] or of_mode
    return tuple(found)


# Backends whose CPU ranks wait in every exchange, so that exact sizes cost them nothing.
_WAITS_ON_HOST = ("collective", "hierarchical")


def _exact_on_cpu(backend: str) -> list[str]:
    """Return the classes of a backend that serve CPU ranks in mode normal, of exact sizes."""
    exact, found = EPConfig(mode=Mode.NORMAL), list[str]()
    for name in class_names(backend):
        kind = backend_class(name)
        if Mode.NORMAL in kind.modes and _is_meant(name, exact):
            devices = kind.caps(Mode.NORMAL).device_types
            found += [name] if devices is None or "cpu" in devices else []
    return found


def _is_meant(name: str, config: EPConfig) -> bool:
    """Tell whether mode, budget and `replicated` lead to this class of its backend."""
    mode = Mode(config.mode)
    kind = backend_class(name)
    # The other modes have one kind of sizes each.
    is_sized = mode is not Mode.NORMAL or kind.caps(mode).is_static == (
        config.max_recv_slots is not None
    )
    return is_sized and kind.serves_replicated == config.replicated


def survey_rank(
    config: EPConfig,
    spec: MoESpec,
    world_size: int,
    weights: ExpertTensors | None,
    transport: Transport | None = None,
    machine: Machine | None = None,
) -> Survey:
    """Look at every backend, and with weights at every runner. Local.

    transport: that of the ranks, where there are some; backends may not serve it.
    machine: the one that runs a rank; None: this one.

    Raises:
        ConfigError: the layer or the configuration cannot be served by anything.
    """
    spec.check()
    backend_names(config.backend, Mode(config.mode))
    measurements = None if config.measurements is None else read_measurements(config.measurements)
    if config.runner != "auto":
        runner_class(config.runner)
    if weights is not None:
        _check_fit(spec, weights)
    configs = phase_configs(config)
    wanted = WireFormat.of(spec.dtype) if weights is None else weights.wire_format
    specs = {phase: _buffer_spec(each, spec, world_size, wanted) for phase, each in configs.items()}
    is_fused = Mode(config.mode) is Mode.FUSEEP
    if is_fused and weights is not None:
        sized = replace(specs[PREFILL], intermediate_size=weights.intermediate_size)
        specs = {PREFILL: sized}
    _check_int8_profile(config, specs[PREFILL].dispatch_format, wanted)
    machine = machine or this_machine()
    is_on_cpu = not machine.has_cuda() if transport is None else transport.is_host_bound
    verdicts = {
        phase: {
            name: _probe(name, each, specs[phase], world_size, transport, weights, machine)
            for name in find_candidates(each, prefers_exact=phase == DECODE and is_on_cpu)
        }
        for phase, each in configs.items()
    }
    if weights is not None and not is_fused:
        # Runners of other experts and devices are no candidates, unless one is asked for.
        candidates = [
            name
            for name in RUNNERS
            if name == config.runner or runner_class(name).is_candidate(weights)
        ]
        verdicts[RUNNER] = {
            name: runner_class(name).supports(weights, machine) for name in candidates
        }
    return Survey(specs=specs, verdicts=verdicts, measurements=measurements)


def survey_group(
    config: EPConfig, spec: MoESpec, group: EPGroup, weights: ExpertTensors | None
) -> Survey:
    """Look as survey_rank() does on all ranks: a candidate serves where it serves on every rank.

    Collective: yes.   Host sync: yes.
    Raises:
        ConfigError: ranks disagree on the configuration or the layer, or some rank cannot plan; on
            every rank.
    """
    group.limit_waits(config.timeout_s)
    error, survey = None, Survey(specs={}, verdicts={})
    try:
        survey = survey_rank(config, spec, group.world_size, weights, Transport.of(group))
    except EPError as own_error:
        error = own_error
    found: dict[str, Scalar] = {
        f"{question}/{name}": "\n".join(verdict.reasons)
        for question, verdicts in survey.verdicts.items()
        for name, verdict in verdicts.items()
    }
    found |= {_ERROR: str(error or ""), _HOST: host_of_this_process()}
    if group.device.type == "cuda":
        found[_REACH] = reach_of(group.device).as_text()
    record: dict[str, Scalar] = {_ERROR: "", "hosts": str(group.hosts or "not given")}
    record |= _as_record(config) | _as_record(spec) | _describe_experts(weights)
    records = group.calls.agree(record, what="plan", findings=found)
    if error is not None:
        raise error
    errors = [f"rank {rank}: {other[_ERROR]}" for rank, other in enumerate(records)]
    failed = [text for text, other in zip(errors, records, strict=True) if other[_ERROR]]
    if failed:
        raise ConfigError(
            f"plan: {'; '.join(failed)} (this is {group.where}); correct the rank named"
        )
    verdicts = {
        question: {name: _combine(records, f"{question}/{name}") for name in candidates}
        for question, candidates in survey.verdicts.items()
    }
    hosts = [str(other[_HOST]) for other in records]
    reaches = [PeerReach.parse(str(other[_REACH])) for other in records if _REACH in other]
    together = judge_together(verdicts, hosts, reaches, group.hosts)
    return _placed(replace(survey, verdicts=together), layout_of(hosts, group.hosts))


def survey_alone(
    config: EPConfig,
    spec: MoESpec,
    world_size: int,
    weights: ExpertTensors | None,
    hosts: HostLayout | None = None,
) -> Survey:
    """Look as survey_rank() does, for ranks that nobody has seen, on machines like this one. Local.

    hosts: where they are said to run; None: on one host.

    Raises:
        ConfigError: the layer or the configuration cannot be served by anything.
    """
    survey = survey_rank(config, spec, world_size, weights)
    if hosts is not None:
        names = [str(host) for host in hosts.host_of_rank]
        survey = replace(survey, verdicts=judge_together(survey.verdicts, names, []))
    return _placed(survey, layout_of([], hosts))


def survey_assumed(
    config: EPConfig,
    spec: MoESpec,
    world_size: int,
    weights: ExpertTensors | None,
    assumed: AssumedMachine,
) -> Survey:
    """Look as survey_group() does, at ranks on machines that are not this one. Local.

    Raises:
        ConfigError: the layer or the configuration cannot be served by anything.
    """
    transport = Transport(
        device_type=assumed.device_type,
        host_waits=assumed.host_waits,
        has_process_group=True,
        where=f"{assumed.name} (assumed)",
    )
    survey = survey_rank(config, spec, world_size, weights, transport, assumed.machine())
    hosts, reaches = assumed.hosts(world_size), assumed.reaches(world_size)
    together = judge_together(survey.verdicts, hosts, reaches)
    return _placed(replace(survey, verdicts=together), layout_of(hosts))


def _placed(survey: Survey, hosts: HostLayout | None) -> Survey:
    """Say in the specifications on which hosts ranks are, and reject what does not serve there."""
    specs = {phase: replace(spec, hosts=hosts) for phase, spec in survey.specs.items()}
    verdicts = dict(survey.verdicts)
    for phase, spec in specs.items():
        verdicts[phase] = {
            name: verdict.also(backend_class(name).lacks_between(spec))
            for name, verdict in verdicts[phase].items()
        }
    return replace(survey, specs=specs, verdicts=verdicts)


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


def _check_int8_profile(config: EPConfig, dispatched: WireFormat, wanted: WireFormat) -> None:
    """Refuse an arithmetic that nothing uses; all phases dispatch in one format."""
    if config.int8_profile is None or WireDtype.INT8 in (dispatched.dtype, wanted.dtype):
        return
    raise ConfigError(
        f"plan: int8_profile is {config.int8_profile}, but rows travel as {dispatched} and the "
        f"experts want {wanted}; expected int8 in one of them, set dispatch_dtype or leave "
        "int8_profile None"
    )


def _buffer_spec(
    config: EPConfig, spec: MoESpec, world_size: int, wanted: WireFormat
) -> BufferSpec:
    """Make the specification of a buffer from those of the configuration and the layer.

    wanted: how hidden states best come to the experts, unless the configuration says.
    """
    if not is_size(world_size, MAX_RANKS):
        raise ConfigError(
            f"plan: world_size is {shown(world_size)}, expected an int from 1 to {MAX_RANKS}"
        )
    if spec.num_experts % world_size:
        raise ConfigError(
            f"plan: num_experts is {spec.num_experts}, expected a multiple of the {world_size} "
            "ranks; use a number of ranks that divides it"
        )
    hidden_format = _hidden_format(config, spec, wanted)
    wanted = _dispatch_format(config, hidden_format, wanted)
    if wanted.dtype.is_quantized and hidden_format.dtype is WireDtype.FP64:
        raise ConfigError(
            f"plan: rows travel as {wanted}, but the hidden states are {hidden_format}; expected "
            "bf16, fp16 or fp32, of which eight bits are made, or dispatch_dtype None"
        )
    return BufferSpec(
        hidden_size=spec.hidden_size,
        top_k=spec.top_k,
        num_local_experts=spec.num_experts // world_size,
        dispatch_format=wanted,
        hidden_format=hidden_format,
        max_tokens_per_rank=config.max_tokens_per_rank,
        max_recv_slots=config.max_recv_slots,
        compares_calls=config.check_calls,
        num_sms=config.num_sms,
        batches_in_flight=config.batches_in_flight,
    )


def _hidden_format(config: EPConfig, spec: MoESpec, wanted: WireFormat) -> WireFormat:
    """Return the format of rows that are not quantised: the hidden states' unless configured.

    Experts that are not quantised compute in any floating dtype, whatever they are held in.
    """
    dtype = config.dispatch_dtype
    if dtype is None or dtype.is_quantized or wanted.dtype.is_quantized:
        return WireFormat.of(spec.dtype)
    return WireFormat(dtype=dtype)


def _dispatch_format(config: EPConfig, hidden_format: WireFormat, wanted: WireFormat) -> WireFormat:
    """Return the format of dispatch: what the configuration says, else what the experts want."""
    dtype = config.dispatch_dtype
    chosen = wanted if dtype is None else _wire_format(dtype, hidden_format, wanted)
    if config.dispatch_scales is None:
        return chosen
    scales = ScaleDtype(config.dispatch_scales)
    is_float32 = scales is ScaleDtype.FLOAT32
    if chosen.dtype is WireDtype.FP8_E4M3 or (chosen.dtype is WireDtype.INT8 and is_float32):
        return replace(chosen, scale_dtype=scales.torch_dtype)
    asked = "None" if dtype is None else dtype.value
    raise ConfigError(
        f"plan: dispatch_scales is {scales.value}, but rows travel as {chosen} (dispatch_dtype is "
        f"{asked}, the experts want {wanted}); expected fp8_e4m3 rows for these scales, set "
        "dispatch_dtype or leave dispatch_scales None"
    )


def _wire_format(dtype: WireDtype, hidden_format: WireFormat, wanted: WireFormat) -> WireFormat:
    """Return the format that a configured dispatch_dtype means."""
    if dtype is wanted.dtype:
        return wanted
    if dtype in QUANTIZED_FORMATS:
        return QUANTIZED_FORMATS[dtype]
    # Experts in eight bits return one dtype; _hidden_format() has followed any other choice.
    if dtype is not hidden_format.dtype:
        raise ConfigError(
            f"plan: dispatch_dtype is {dtype.value}, but the hidden states are {hidden_format}; "
            "expected that, fp8_e4m3 or int8, or None"
        )
    return hidden_format


def _probe(
    name: str,
    config: EPConfig,
    spec: BufferSpec,
    world_size: int,
    transport: Transport | None,
    weights: ExpertTensors | None,
    machine: Machine,
) -> Availability:
    """Find everything that keeps one backend from serving a phase on this rank."""
    buffer, mode = backend_class(name), Mode(config.mode)
    caps, reasons = buffer.caps(mode), list(buffer.probe(machine).reasons)
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
    reasons += buffer.lacks(mode, spec, world_size)
    reasons += buffer.lacks_with(machine, spec, world_size)
    if transport is not None:
        reasons += transport.reasons(buffer, caps)
    elif buffer.needs_one_host:
        reasons.append("serves one host, which only a process group shows; run under torchrun")
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
