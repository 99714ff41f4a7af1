"""What ranks find before a plan is made: a specification a phase, a verdict on each backend.

A rank looks for itself first and keeps an error it meets, so that with a group every rank takes
part in one exchange, after which all of them know the same and choose, or raise, alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NoReturn

from epcomm.buffers.base import Availability, BufferCaps, BufferSpec
from epcomm.config import EPConfig, Mode, environment
from epcomm.errors import BackendUnavailable, ConfigError, EPError
from epcomm.quantization import QUANTIZED_FORMATS
from epcomm.registry import BUFFERS, RUNNERS, buffer_class, buffer_family, runner_class
from epcomm.types import ScaleDtype, WireDtype, WireFormat

if TYPE_CHECKING:
    from epcomm.collectives.base import Scalar
    from epcomm.group import EPGroup
    from epcomm.planning import MoESpec
    from epcomm.weights import ExpertTensors

# The field of the compared record in which a rank says why it cannot plan.
_ERROR = "error"
# The questions: which backend serves a phase, which runner computes the experts.
PREFILL, DECODE, RUNNER = "prefill", "decode", "runner"


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What was found.

    specs: by phase.   verdicts: by question, then by name of the candidate.
    """

    specs: Mapping[str, BufferSpec]
    verdicts: Mapping[str, Mapping[str, Availability]]


def phase_configs(config: EPConfig) -> dict[str, EPConfig]:
    """What is asked for in each phase; without DECODE, decode is as prefill or unavailable.

    Raises:
        BackendUnavailable: the mode is not built.
    """
    mode = Mode(config.mode)
    if mode is Mode.FUSEEP:
        built = sorted(other.value for other in Mode if other is not Mode.FUSEEP)
        raise BackendUnavailable(
            f"plan: mode is fuseep, expected one of {built}, because the fused path is not built "
            "yet; change EPConfig.mode"
        )
    if mode is not Mode.AUTO:
        return {PREFILL: config}
    max_tokens = config.max_tokens_per_rank
    # In auto the token limit is decode's: a prefill of exact size has none.
    prefill_tokens = None if config.max_recv_slots is None else max_tokens
    configs = {PREFILL: replace(config, mode=Mode.NORMAL, max_tokens_per_rank=prefill_tokens)}
    if max_tokens is not None:
        # Low latency has room for any routing of so few tokens; the budget is prefill's.
        configs[DECODE] = replace(config, mode=Mode.LOW_LATENCY, max_recv_slots=None)
    return configs


def survey_rank(
    config: EPConfig,
    spec: MoESpec,
    world_size: int,
    weights: ExpertTensors | None,
    group: EPGroup | None = None,
) -> Survey:
    """Look at every backend, and with weights at every runner. Local.

    group: the ranks, where there are some; backends may not serve their device or transport.

    Raises:
        ConfigError: the layer or the configuration cannot be served by anything.
        BackendUnavailable: the mode is not built.
    """
    if config.backend != "auto":
        buffer_family(config.backend)
    if config.runner != "auto":
        runner_class(config.runner)
    if weights is not None:
        _check_fit(spec, weights)
    configs = phase_configs(config)
    wanted = WireFormat.of(spec.dtype) if weights is None else weights.wire_format
    specs = {phase: _buffer_spec(each, spec, world_size, wanted) for phase, each in configs.items()}
    _check_int8_profile(config, specs[PREFILL].dispatch_format, wanted)
    snapshot = environment()
    verdicts = {
        phase: {
            name: _probe(name, each, specs[phase], world_size, group, snapshot) for name in BUFFERS
        }
        for phase, each in configs.items()
    }
    if weights is not None:
        # Runners of other experts and devices are no candidates, unless one is asked for.
        candidates = [
            name
            for name in RUNNERS
            if name == config.runner or runner_class(name).is_candidate(weights)
        ]
        verdicts[RUNNER] = {name: runner_class(name).supports(weights) for name in candidates}
    return Survey(specs=specs, verdicts=verdicts)


def survey_group(
    config: EPConfig, spec: MoESpec, group: EPGroup, weights: ExpertTensors | None
) -> Survey:
    """As survey_rank for all ranks: a candidate serves where it serves on every rank.

    Collective: yes.   Host sync: yes.
    Raises:
        ConfigError: ranks disagree on the configuration or the layer, or some rank cannot plan; on
            every rank.
        BackendUnavailable: the mode is not built.
    """
    group.limit_waits(config.timeout_s)
    error, survey = None, Survey(specs={}, verdicts={})
    try:
        survey = survey_rank(config, spec, group.world_size, weights, group)
    except EPError as own_error:
        error = own_error
    found: dict[str, Scalar] = {
        f"{question}/{name}": "\n".join(verdict.reasons)
        for question, verdicts in survey.verdicts.items()
        for name, verdict in verdicts.items()
    }
    found[_ERROR] = str(error or "")
    record = {_ERROR: ""} | _as_record(config) | _as_record(spec) | _describe_experts(weights)
    records = group.collectives.agree(record, what="plan", findings=found)
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
    return replace(survey, verdicts=verdicts)


def refuse_plan(group: EPGroup, error: ConfigError) -> NoReturn:
    """Raise what keeps this rank from planning, after the others, which plan, have heard of it.

    Collective: yes, with their plan().   Host sync: yes.
    """
    with suppress(ConfigError):
        group.collectives.agree({_ERROR: str(error)}, what="plan")
    raise error


def _describe_experts(weights: ExpertTensors | None) -> dict[str, Scalar]:
    """What ranks compute; equal on all of them, or a token's result depends on where it goes."""
    if weights is None:
        return {}
    return {
        "experts": type(weights).__name__,
        "format": str(weights.format),
        "wanted rows": str(weights.wire_format),
        "intermediate_size": weights.intermediate_size,
    }


def _as_record(values: EPConfig | MoESpec) -> dict[str, Scalar]:
    """The fields of a flat record as plain values."""
    plain = (str, int, float, type(None))
    found = {field.name: getattr(values, field.name) for field in fields(values)}
    # StrEnum members are strings, and JSON writes them as such.
    return {name: v if isinstance(v, plain) else str(v) for name, v in found.items()}


def _combine(records: Sequence[Mapping[str, Scalar]], key: str) -> Availability:
    """The verdict of all ranks; a reason names its rank, unless all ranks have the same."""
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
    """Experts of other hidden states would compute rows that never come."""
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
    """An arithmetic that nothing uses would be ignored. All phases dispatch in one format."""
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
    """wanted: how hidden states best come to the experts, unless the configuration says."""
    if world_size < 1:
        raise ConfigError(f"plan: world_size is {world_size}, expected at least 1")
    if spec.num_experts % world_size:
        raise ConfigError(
            f"plan: num_experts is {spec.num_experts}, expected a multiple of the {world_size} "
            "ranks; add redundant experts or use fewer ranks"
        )
    hidden_format = WireFormat.of(spec.dtype)
    wanted = _dispatch_format(config, hidden_format, wanted)
    if config.combine_dtype not in (None, hidden_format.dtype):
        raise ConfigError(
            f"plan: combine_dtype is {config.combine_dtype}, but experts return {hidden_format}, "
            "the dtype of the hidden states; leave it None"
        )
    return BufferSpec(
        hidden_size=spec.hidden_size,
        top_k=spec.top_k,
        num_local_experts=spec.num_experts // world_size,
        dispatch_format=wanted,
        combine_format=hidden_format,
        backward_format=hidden_format,
        max_tokens_per_rank=config.max_tokens_per_rank,
        max_recv_slots=config.max_recv_slots,
        slot_alignment=config.slot_alignment,
        compares_calls=config.check_calls,
    )


def _dispatch_format(config: EPConfig, hidden_format: WireFormat, wanted: WireFormat) -> WireFormat:
    """What the configuration says of dispatch, and for the rest what the experts want."""
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
    """The format that a configured dispatch_dtype means."""
    if dtype is wanted.dtype:
        return wanted
    if dtype in QUANTIZED_FORMATS:
        return QUANTIZED_FORMATS[dtype]
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
    group: EPGroup | None,
    environment: Mapping[str, str],
) -> Availability:
    """Everything that keeps one backend from serving a phase on this rank."""
    buffer, mode = buffer_class(name), Mode(config.mode)
    if mode not in buffer.modes:
        serves = ", ".join(sorted(m.value for m in buffer.modes))
        return Availability(ok=False, reasons=(f"serves {serves}, not {mode.value}",))
    caps, reasons = buffer.caps(mode), list(buffer.probe(environment).reasons)
    if spec.dispatch_format.dtype not in caps.wire_dtypes:
        carried = sorted(dtype.value for dtype in caps.wire_dtypes)
        reasons.append(f"carries {carried}, not {spec.dispatch_format}")
    if caps.max_top_k is not None and spec.top_k > caps.max_top_k:
        reasons.append(f"top_k is {spec.top_k}, at most {caps.max_top_k}")
    if spec.hidden_size % caps.hidden_multiple:
        reasons.append(f"hidden_size {spec.hidden_size} is no multiple of {caps.hidden_multiple}")
    if config.deterministic and not caps.ordered:
        reasons.append("slots arrive in any order, and EPConfig.deterministic is set")
    if caps.serves_replicated != config.replicated:
        reasons.append(f"needs EPConfig.replicated = {caps.serves_replicated}")
    if config.runner != "auto" and caps.layout not in runner_class(config.runner).layouts:
        reasons.append(f"hands out {caps.layout.value}, which runner {config.runner} does not read")
    reasons += _limit_reasons(spec, caps, mode)
    reasons += buffer.lacks(mode, spec, world_size)
    if group is not None:
        reasons += _group_reasons(group, caps)
    return Availability(ok=not reasons, reasons=tuple(reasons))


def _group_reasons(group: EPGroup, caps: BufferCaps) -> list[str]:
    """The device and the transport of the ranks."""
    reasons, device_type = [], group.device.type
    if caps.device_types is not None and device_type not in caps.device_types:
        served = ", ".join(sorted(caps.device_types))
        reasons.append(f"serves groups on {served}, and this one is on {device_type}")
    if caps.needs_process_group and group.collectives.process_group is None:
        reasons.append("needs a group made of a torch.distributed process group")
    return reasons


def _limit_reasons(spec: BufferSpec, caps: BufferCaps, mode: Mode) -> list[str]:
    """Static buffers want limits, and limits want static buffers."""
    max_tokens, most = spec.max_tokens_per_rank, caps.max_tokens_per_rank
    reasons = []
    if max_tokens is not None and most is not None and max_tokens > most:
        reasons.append(f"max_tokens_per_rank is {max_tokens}, at most {most}")
    if not caps.is_static:
        if spec.max_recv_slots is not None:
            reasons.append("has exact sizes and no slot budget; leave max_recv_slots None")
        return reasons
    if max_tokens is None:
        reasons.append("has static sizes; set max_tokens_per_rank")
    if mode is Mode.NORMAL and spec.max_recv_slots is None:
        reasons.append("has static sizes; set max_recv_slots")
    if spec.max_recv_slots is not None and not caps.has_slot_budget:
        reasons.append("has room for any routing and no slot budget; leave max_recv_slots None")
    return reasons
