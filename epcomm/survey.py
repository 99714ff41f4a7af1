"""What ranks find before a plan is made: a specification a phase, a verdict on each backend.

A rank looks for itself first and keeps an error it meets, so that with a group every rank takes
part in one exchange, after which all of them know the same and choose, or raise, alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from epcomm.buffers.base import Availability, BufferCaps, BufferSpec
from epcomm.config import EPConfig, Mode, environment
from epcomm.errors import BackendUnavailable, ConfigError, EPError
from epcomm.registry import BUFFERS, RUNNERS, buffer_class, runner_class
from epcomm.types import WireFormat

if TYPE_CHECKING:
    from epcomm.collectives.base import Scalar
    from epcomm.group import EPGroup
    from epcomm.planning import MoESpec
    from epcomm.weights import ExpertWeights

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
        configs[DECODE] = replace(config, mode=Mode.LOW_LATENCY)
    return configs


def survey_rank(
    config: EPConfig, spec: MoESpec, world_size: int, weights: ExpertWeights | None
) -> Survey:
    """Look at every backend, and with weights at every runner. Local.

    Raises:
        ConfigError: the layer or the configuration cannot be served by anything.
        BackendUnavailable: the mode is not built.
    """
    if config.backend != "auto":
        buffer_class(config.backend)
    if config.runner != "auto":
        runner_class(config.runner)
    configs = phase_configs(config)
    specs = {phase: _buffer_spec(each, spec, world_size) for phase, each in configs.items()}
    verdicts = {
        phase: {name: _probe(name, each, specs[phase]) for name in BUFFERS}
        for phase, each in configs.items()
    }
    if weights is not None:
        verdicts[RUNNER] = {name: runner_class(name).supports(weights) for name in RUNNERS}
    return Survey(specs=specs, verdicts=verdicts)


def survey_group(
    config: EPConfig, spec: MoESpec, group: EPGroup, weights: ExpertWeights | None
) -> Survey:
    """As survey_rank for all ranks: a candidate serves where it serves on every rank.

    Collective: yes.   Host sync: yes.
    Raises:
        ConfigError: ranks disagree on the configuration or the layer, or some rank cannot plan; on
            every rank.
        BackendUnavailable: the mode is not built.
    """
    group.limit_waits(config.timeout_s)
    group.collectives.agree(_as_record(config) | _as_record(spec), what="plan")
    error, survey = None, Survey(specs={}, verdicts={})
    try:
        survey = survey_rank(config, spec, group.world_size, weights)
    except EPError as own_error:
        error = own_error
    record: dict[str, Scalar] = {
        f"{question}/{name}": "\n".join(verdict.reasons)
        for question, verdicts in survey.verdicts.items()
        for name, verdict in verdicts.items()
    }
    record["error"] = str(error or "")
    records = group.collectives.gather_records(record, phase="plan")
    if error is not None:
        raise error
    errors = [f"rank {rank}: {other['error']}" for rank, other in enumerate(records)]
    failed = [text for text, other in zip(errors, records, strict=True) if other["error"]]
    if failed:
        raise ConfigError(
            f"plan: {'; '.join(failed)} (this is {group.where}); correct the rank named"
        )
    verdicts = {
        question: {name: _combine(records, f"{question}/{name}") for name in candidates}
        for question, candidates in survey.verdicts.items()
    }
    return replace(survey, verdicts=verdicts)


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


def _buffer_spec(config: EPConfig, spec: MoESpec, world_size: int) -> BufferSpec:
    if world_size < 1:
        raise ConfigError(f"plan: world_size is {world_size}, expected at least 1")
    if spec.num_experts % world_size:
        raise ConfigError(
            f"plan: num_experts is {spec.num_experts}, expected a multiple of the {world_size} "
            "ranks; add redundant experts or use fewer ranks"
        )
    hidden_format = WireFormat.of(spec.dtype)
    wanted = {"dispatch_dtype": config.dispatch_dtype, "combine_dtype": config.combine_dtype}
    for name, dtype in wanted.items():
        if dtype is not None and dtype is not hidden_format.dtype:
            raise ConfigError(
                f"plan: {name} is {dtype.value}, but unquantised experts read and return "
                f"{hidden_format}; leave it None"
            )
    return BufferSpec(
        hidden_size=spec.hidden_size,
        top_k=spec.top_k,
        num_local_experts=spec.num_experts // world_size,
        dispatch_format=hidden_format,
        combine_format=hidden_format,
        backward_format=hidden_format,
        max_tokens_per_rank=config.max_tokens_per_rank,
        max_recv_slots=config.max_recv_slots,
        slot_alignment=config.slot_alignment,
        compares_calls=config.check_calls,
    )


def _probe(name: str, config: EPConfig, spec: BufferSpec) -> Availability:
    """Everything that keeps one backend from serving a phase on this rank."""
    buffer, mode = buffer_class(name), Mode(config.mode)
    if mode not in buffer.modes:
        serves = ", ".join(sorted(m.value for m in buffer.modes))
        return Availability(ok=False, reasons=(f"serves {serves}, not {mode.value}",))
    caps, reasons = buffer.caps(mode), list(buffer.probe(environment()).reasons)
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
    return Availability(ok=not reasons, reasons=tuple(reasons))


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
    return reasons
