"""EPPlan: what serves a layer, what was rejected and why; works with no group and no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from epcomm.buffers.base import Availability, BufferCaps, BufferSpec
from epcomm.config import EPConfig, Mode, environment
from epcomm.errors import BackendUnavailable, ConfigError
from epcomm.registry import BUFFERS, buffer_class
from epcomm.types import WeightsAppliedBy, WireDtype, WireFormat

if TYPE_CHECKING:
    from epcomm.group import EPGroup


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """What one MoE layer looks like to the communication; equal on all ranks.

    hidden_size: H.   num_experts: P, physical experts of all ranks.   top_k: K.
    dtype: of the hidden states.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"MoESpec: {name} is {getattr(self, name)}, expected at least 1")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"MoESpec: top_k is {self.top_k}, expected at most num_experts = {self.num_experts}"
            )
        WireDtype.from_torch(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A backend that does not serve this layer, with every reason."""

    backend: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EPPlan:
    """What was chosen for one layer.

    backend: buffer registry name.   weights_applied_by: who multiplies by topk_weights.
    rejected: the other backends and why.
    """

    mode: Mode
    backend: str
    buffer_spec: BufferSpec
    caps: BufferCaps
    weights_applied_by: WeightsAppliedBy
    world_size: int
    rejected: tuple[Rejection, ...]

    def max_bytes_per_token(self) -> Mapping[str, int]:
        """Most bytes that one token puts on the wire, by phase: min(K, W) copies of it."""
        spec = self.buffer_spec
        copies = min(spec.top_k, self.world_size)
        if self.mode is Mode.STANDARD:
            copies = self.world_size
        ids_and_weights = 8 * spec.top_k
        row = spec.dispatch_format.data_bytes(spec.hidden_size)
        row += spec.dispatch_format.scale_bytes(spec.hidden_size)
        home = spec.combine_format.data_bytes(spec.hidden_size)
        return {"dispatch": copies * (row + ids_and_weights), "combine": copies * home}

    def explain(self) -> str:
        """What was chosen, what was rejected and why, bytes and limits, as text."""
        spec, per_token = self.buffer_spec, self.max_bytes_per_token()
        limit = spec.max_tokens_per_rank
        lines = [
            f"mode {self.mode.value} on backend {self.backend}, {self.world_size} ranks with "
            f"{spec.num_local_experts} experts each",
            f"wire: dispatch {spec.dispatch_format}, combine {spec.combine_format}, "
            f"backward {spec.backward_format}",
            f"router weights applied by {self.weights_applied_by.value}; "
            f"trainable: {self.caps.trainable}; host reads a dispatch: {self.caps.host_reads}",
            f"at most {per_token['dispatch']} B a token out, {per_token['combine']} B home",
            f"tokens a rank: {'no limit' if limit is None else f'at most {limit}'}",
        ]
        lines += [
            f"rejected {rejection.backend}: {'; '.join(rejection.reasons)}"
            for rejection in self.rejected
        ]
        return "\n".join(lines)


def plan(
    config: EPConfig, spec: MoESpec, group: EPGroup | None = None, *, world_size: int | None = None
) -> EPPlan:
    """Choose a backend for a layer.

    Args:
        config: the user's choices.
        spec: the layer.
        group: the ranks; then the probes of all ranks count, and the call is collective.
        world_size: W when there is no group; default 1.

    Collective: with a group, yes; without, no.   Host sync: with a group, yes.
    Raises:
        ConfigError: nothing can serve this, with a reason for each backend.
        BackendUnavailable: the backend asked for by name lacks something on some rank.
    """
    world_size = group.world_size if group is not None else (world_size or 1)
    mode = Mode.NORMAL if config.mode is Mode.AUTO else Mode(config.mode)
    buffer_spec = _buffer_spec(config, spec, world_size)
    local = {name: _probe(name, mode, config, buffer_spec) for name in BUFFERS}
    verdicts = local if group is None else _combine_probes(local, group)
    backend = _choose(config, mode, verdicts)
    caps = buffer_class(backend).caps(mode)
    return EPPlan(
        mode=mode,
        backend=backend,
        buffer_spec=buffer_spec,
        caps=caps,
        weights_applied_by=_who_applies_weights(caps),
        world_size=world_size,
        rejected=tuple(
            Rejection(backend=name, reasons=verdict.reasons)
            for name, verdict in verdicts.items()
            if not verdict.ok
        ),
    )


def _buffer_spec(config: EPConfig, spec: MoESpec, world_size: int) -> BufferSpec:
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
    )


def _probe(name: str, mode: Mode, config: EPConfig, spec: BufferSpec) -> Availability:
    """Everything that keeps one backend from serving this layer on this rank."""
    buffer = buffer_class(name)
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
    reasons += _static_reasons(spec, caps, mode)
    return Availability(ok=not reasons, reasons=tuple(reasons))


def _static_reasons(spec: BufferSpec, caps: BufferCaps, mode: Mode) -> list[str]:
    """Static buffers want limits, and limits want static buffers."""
    if not caps.is_static:
        if spec.max_recv_slots is not None:
            return ["has exact sizes and no slot budget; leave max_recv_slots None"]
        return []
    reasons = []
    if spec.max_tokens_per_rank is None:
        reasons.append("has static sizes; set max_tokens_per_rank")
    if mode is Mode.NORMAL and spec.max_recv_slots is None:
        reasons.append("has static sizes; set max_recv_slots")
    return reasons


def _combine_probes(local: Mapping[str, Availability], group: EPGroup) -> dict[str, Availability]:
    """A backend serves only where it serves on all ranks; a reason names its rank."""
    records = group.collectives.gather_records(
        {name: "\n".join(verdict.reasons) for name, verdict in local.items()}
    )
    combined = {}
    for name in local:
        reasons = [str(record.get(name, "unknown to this version")) for record in records]
        if len(set(reasons)) == 1:
            named = [line for line in reasons[0].split("\n") if line]
        else:
            named = [f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text]
        combined[name] = Availability(ok=not named, reasons=tuple(named))
    return combined


def _choose(config: EPConfig, mode: Mode, verdicts: Mapping[str, Availability]) -> str:
    if config.backend != "auto":
        buffer_class(config.backend)
        verdict = verdicts[config.backend]
        if not verdict.ok:
            raise BackendUnavailable(
                f"plan: backend {config.backend} cannot serve this layer: "
                f"{'; '.join(verdict.reasons)}; change the configuration or use backend='auto'"
            )
        return config.backend
    for name, verdict in verdicts.items():
        if verdict.ok:
            return name
    reasons = "; ".join(f"{name}: {', '.join(v.reasons)}" for name, v in verdicts.items())
    raise ConfigError(f"plan: no backend serves mode {mode.value}: {reasons}")


def _who_applies_weights(caps: BufferCaps) -> WeightsAppliedBy:
    """With gradients the runner, so that combine saves no rows; without, combine, if it may."""
    preferred = WeightsAppliedBy.RUNNER if caps.trainable else WeightsAppliedBy.COMBINE
    if preferred in caps.weights_applied_by:
        return preferred
    return next(iter(caps.weights_applied_by))
