"""plan(): choose the backends and the runner of a layer, with reasons, without a group or a device.

A layer has two phases: prefill and training, and decode. Mode auto chooses a mechanism for each;
every other mode serves both with one.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial

from epcomm.config import EPConfig, Mode
from epcomm.errors import BackendUnavailable, ConfigError, PlanRefused, grouped, shown
from epcomm.group import EPGroup
from epcomm.planning.candidates import DECODE, PREFILL, PhaseSurvey, survey
from epcomm.planning.measurements import Measurements, PreferredOrder
from epcomm.planning.plans import EPPlan, PhasePlan, Rejection
from epcomm.planning.ranks import PlannedRanks
from epcomm.platforms.assumed import AssumedMachine
from epcomm.registry import backend_class, class_names, runner_class
from epcomm.spec import Availability, HostLayout, MoESpec
from epcomm.types import MAX_RANKS, Int8Profile, WeightsAppliedBy, WireDtype, is_size
from epcomm.weights.unquantized import ExpertTensors

_logger = logging.getLogger(__name__)


def plan(
    config: EPConfig,
    spec: MoESpec,
    group: EPGroup | None = None,
    *,
    world_size: int | None = None,
    weights: ExpertTensors | None = None,
    machine: AssumedMachine | None = None,
    hosts: HostLayout | None = None,
) -> EPPlan:
    """Choose a backend for each phase of a layer, and a runner for its experts.

    Args:
        config: the user's choices.
        spec: the layer.
        group: the ranks; then the probes of all ranks count, and the call is collective.
        world_size: W when there is no group; default 1.
        machine: plan for ranks on machines such as this, which need not be here, as in
            platforms.assumed.DEVICES; without a group. The plan lists what it assumes.
        weights: the experts, or any share of them, for the choice of a runner; their values do
            not matter, so they may be on the meta device.
        hosts: where W ranks run on machines like this one, without a group; None: on one host.

    Collective: with a group, yes; without, no.   Host sync: with a group, yes.
    Raises:
        PlanRefused: no backend serves the layer, with a reason for each.
        ConfigError: the request is impossible; ranks disagree; or another rank cannot plan.
        BackendUnavailable: a backend or runner that is named lacks something on some rank.
    """
    ranks = _ranks_of(group, world_size, machine, hosts)
    found = survey(config, spec, weights, ranks, group)
    plan_phase = partial(_plan_phase, measurements=found.measurements, ranks=ranks, weights=weights)
    phases = {phase: plan_phase(each) for phase, each in found.phases.items()}
    prefill, is_auto = phases[PREFILL], Mode(config.mode) is Mode.AUTO
    chosen = EPPlan(
        prefill=prefill,
        decode=phases.get(DECODE) if is_auto else prefill,
        assumed=() if machine is None else machine.describe(ranks.world_size),
    )
    if found.runners is not None:
        assert weights is not None, "runners are judged by their experts"
        chosen = _with_runner(chosen, config, found.runners, weights)
        limit = None if ranks.device_type == "cpu" else config.product_sms
        rests_on = found.rests_on.get(chosen.runner or "", "")
        chosen = replace(chosen, product_sms=limit, rests_on=rests_on)
    elif config.runner != "auto":
        chosen = _map_phases(chosen, partial(_aligned, runner=config.runner))
    if group is None:
        return chosen
    for purpose, phase in chosen.phases().items():
        runner = [] if chosen.runner is None else [f"runner {chosen.runner}"]
        text = "; ".join([*phase.facts(phase=purpose), *runner])
        # Once for all layers of a group that are served alike.
        if group.is_news(text):
            _logger.info("%s: %s", group.where, text)
    return chosen


def _ranks_of(
    group: EPGroup | None,
    world_size: int | None,
    machine: AssumedMachine | None,
    hosts: HostLayout | None,
) -> PlannedRanks:
    """Return the ranks to plan for; ConfigError if the arguments contradict one another."""
    places = {"group": group, "machine": machine, "hosts": hosts}
    given = [name for name, place in places.items() if place is not None]
    if len(given) > 1:
        raise ConfigError(
            f"plan: got {' and '.join(given)}, but each of them defines the hosts of the ranks; "
            "pass one of them"
        )
    if hosts is not None and hosts.world_size != world_size:
        raise ConfigError(
            f"plan: hosts are {hosts}, expected those of world_size = {world_size} ranks; make "
            "them agree"
        )
    if group is not None:
        return PlannedRanks.of(group)
    num_ranks = 1 if world_size is None else world_size
    if not is_size(num_ranks, MAX_RANKS):
        came = f"world_size is {shown(num_ranks)}"
        raise ConfigError(f"plan: {came}, expected an int from 1 to {MAX_RANKS}")
    if machine is not None:
        return PlannedRanks.assumed(num_ranks, machine)
    return PlannedRanks.here(num_ranks, hosts)


def _plan_phase(
    found: PhaseSurvey,
    measurements: Measurements | None,
    ranks: PlannedRanks,
    weights: ExpertTensors | None,
) -> PhasePlan:
    config, spec, verdicts = found.config, found.spec, found.verdicts
    mode = Mode(config.mode)
    experts = None if weights is None else weights.wire_format.dtype
    # Classes without the mode are those of exact sizes, which serve decode on CPU ranks.
    kinds = [backend_class(name) for name in verdicts]
    exact = frozenset(kind.name for kind in kinds if mode not in kind.modes)
    order = PreferredOrder(config, measurements, exact)
    buffer = _choose_buffer(config, order.backends, verdicts)
    kind = backend_class(buffer)
    caps = kind.caps(mode)
    # With gradients the runner applies the weights, so that combine saves no rows. With sum_groups
    # the weighted results must not be rounded before they are summed.
    by_runner = caps.trainable and config.sum_groups is None
    quantizes = caps.trainable and spec.combine_format is not None
    is_refused = quantizes and not config.combine_dtype_with_gradients
    return PhasePlan(
        mode=mode,
        backend=kind.name,
        buffer=buffer,
        buffer_spec=spec,
        caps=caps,
        weights_applied_by=WeightsAppliedBy.RUNNER if by_runner else WeightsAppliedBy.COMBINE,
        world_size=ranks.world_size,
        rejected=_rejected_backends(verdicts),
        chosen_by=order.reason_for(kind.name),
        int8_profile=Int8Profile(config.int8_profile or kind.int8_profile),
        rounds_int8=WireDtype.INT8 in (spec.dispatch_format.dtype, experts),
        refuses_gradients="combine_dtype_with_gradients is not set" if is_refused else "",
    )


def _choose_buffer(
    config: EPConfig, backends: Sequence[str], verdicts: Mapping[str, Availability]
) -> str:
    """Return the name of the first class that serves, of the backends in order of preference."""
    mode = Mode(config.mode)
    names = [name for backend in backends for name in class_names(backend)]
    found = {name: verdicts[name] for name in names if name in verdicts}
    for name, verdict in found.items():
        if verdict.ok:
            return name
    rejected = _rejected_backends(found)
    if config.backend == "auto":
        raise PlanRefused(f"plan: no backend serves mode {mode.value}: {_by_reason(rejected)}")
    absent = [name for name in backends if name not in {each.name for each in rejected}]
    rejected += tuple(Rejection(name=n, reasons=(f"has no mode {mode.value}",)) for n in absent)
    why = _by_reason(rejected) if len(backends) > 1 else "; ".join(rejected[0].reasons)
    raise BackendUnavailable(
        f"plan: backend {config.backend} cannot serve this layer: {why}; change the configuration "
        "or use backend='auto'"
    )


def _by_reason(rejected: Sequence[Rejection]) -> str:
    """Return each reason once with its backends, the most frequent first."""
    names = grouped((reason, each.name) for each in rejected for reason in each.reasons)
    ordered = sorted(names.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{', '.join(of_reason)}: {reason}" for reason, of_reason in ordered)


def _with_runner(
    chosen: EPPlan, config: EPConfig, verdicts: Mapping[str, Availability], weights: ExpertTensors
) -> EPPlan:
    """Add the runner asked for, or the first that computes these experts in every phase."""
    complete = {
        name: verdict.also(_reading_reasons(name, chosen.phases().values(), weights))
        for name, verdict in verdicts.items()
    }
    rejected = tuple(
        Rejection(name=name, reasons=each.reasons) for name, each in complete.items() if not each.ok
    )
    name, advice = config.runner, "" if config.product_sms is None else ", or unset product_sms"
    if name == "auto":
        name = next((name for name, verdict in complete.items() if verdict.ok), None)
        if name is None:
            raise PlanRefused(
                f"plan: no runner computes these experts: {'; '.join(map(str, rejected))}; change "
                f"the experts or the wire formats{advice}"
            )
    elif not complete[name].ok:
        raise BackendUnavailable(
            f"plan: runner {name} cannot compute these experts: "
            f"{'; '.join(complete[name].reasons)}; use runner='auto'{advice}"
        )
    read = _map_phases(chosen, partial(_read_by, runner=name, weights=weights))
    return replace(read, runner=name, rejected_runners=rejected)


def _read_by(phase: PhasePlan, runner: str, weights: ExpertTensors) -> PhasePlan:
    """Return the phase with slots aligned and scales laid out as a runner reads them."""
    kind, refusal = runner_class(runner), phase.refuses_gradients
    readings = kind.readings(weights, phase.caps.layout)
    layouts = {reading.format: reading.scale_layout for reading in readings}
    layout = layouts[phase.buffer_spec.dispatch_format]
    if not kind.has_gradients and phase.caps.trainable:
        refusal = f"runner {runner} has no gradients"
    return replace(_aligned(phase, runner), scale_layout=layout, refuses_gradients=refusal)


def _map_phases(chosen: EPPlan, change: Callable[[PhasePlan], PhasePlan]) -> EPPlan:
    """Change every phase; one that serves both stays one object."""
    prefill, decode = change(chosen.prefill), chosen.decode
    if decode is not None:
        decode = prefill if decode is chosen.prefill else change(decode)
    return replace(chosen, prefill=prefill, decode=decode)


def _aligned(phase: PhasePlan, runner: str) -> PhasePlan:
    """Return the phase with the alignment of experts' slots that a runner needs."""
    alignment = runner_class(runner).expert_alignment
    if alignment == phase.buffer_spec.expert_alignment:
        return phase
    return replace(phase, buffer_spec=replace(phase.buffer_spec, expert_alignment=alignment))


def _reading_reasons(name: str, phases: Iterable[PhasePlan], weights: ExpertTensors) -> list[str]:
    """Return what keeps a runner from reading the rows that the buffers of the phases return."""
    runner, reasons = runner_class(name), list[str]()
    if not isinstance(weights, runner.kinds):
        return reasons
    is_int8 = weights.wire_format.dtype is WireDtype.INT8
    for phase in phases:
        layout, wire = phase.caps.layout, phase.buffer_spec.dispatch_format
        if layout not in runner.layouts:
            read = _names(runner.layouts)
            reasons.append(f"reads {read}, but {phase.backend} returns {layout.value}")
        readable = [reading.format for reading in runner.readings(weights, layout)]
        if wire not in readable:
            reasons.append(
                f"reads {', '.join(sorted(map(str, readable)))}, but {phase.backend} was asked to "
                f"carry {wire}, of {_names(phase.caps.wire_dtypes)}"
            )
        aligned = _aligned(phase, name)
        if aligned is not phase:
            kind = backend_class(phase.buffer)
            reasons += kind.lacks(phase.mode, aligned.buffer_spec, phase.world_size)
        if is_int8 and phase.int8_profile not in runner.int8_profiles:
            reasons.append(
                f"rounds INT8 by {_names(runner.int8_profiles)}, but EPConfig.int8_profile is "
                f"{phase.int8_profile.value}"
            )
    return list(dict.fromkeys(reasons))


def _names(members: Iterable[StrEnum]) -> str:
    return ", ".join(sorted(member.value for member in members))


def _rejected_backends(verdicts: Mapping[str, Availability]) -> tuple[Rejection, ...]:
    """Return the backends of which no class serves; a reason of some classes alone names them."""
    found: list[Rejection] = []
    for backend in dict.fromkeys(backend_class(name).name for name in verdicts):
        of_backend = {n: v for n, v in verdicts.items() if backend_class(n).name == backend}
        if any(verdict.ok for verdict in of_backend.values()):
            continue
        # A reason that all classes share is a reason of the backend.
        reasons = grouped((r, name) for name, v in of_backend.items() for r in v.reasons)
        texts = [
            reason if len(names) == len(of_backend) else f"{', '.join(names)} {reason}"
            for reason, names in reasons.items()
        ]
        found.append(Rejection(name=backend, reasons=tuple(texts)))
    return tuple(found)
