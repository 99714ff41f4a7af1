"""The output of `epcomm plan`: a record, whose keys docs/commands.md lists, and its text."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from epcomm.bench.machine import version_of
from epcomm.config import EPConfig, Mode
from epcomm.fuseep.ascend import AscendFused
from epcomm.placement.moving import MoveMemory
from epcomm.planning.plans import EPPlan, PhasePlan
from epcomm.platforms.ascend.limits import Limits
from epcomm.registry import FUSED, class_names, fused_class
from epcomm.spec import MoESpec
from epcomm.types import WireDtype
from epcomm.weights.unquantized import ExpertTensors

_NO_LIMIT = "no limit"


def record_of(
    chosen: EPPlan, config: EPConfig, spec: MoESpec, weights: ExpertTensors | None
) -> dict[str, object]:
    """Return the plan of a layer in plain values. spec: of the physical experts."""
    ranks = chosen.prefill.world_size
    return {
        "version": version_of("epcomm"),
        "layer": {**asdict(spec), "dtype": WireDtype.from_torch(spec.dtype).value, "ranks": ranks},
        "assumed": list(chosen.assumed),
        "phases": {name or "all": _phase(phase) for name, phase in chosen.phases().items()},
        "decode_lacks": chosen.decode_lacks,
        "runner": chosen.runner,
        "rejected_runners": [asdict(each) for each in chosen.rejected_runners],
        "rebalance": _rebalance(config, spec, ranks, weights),
    }


def _phase(phase: PhasePlan) -> dict[str, object]:
    spec, caps = phase.buffer_spec, phase.caps
    return {
        "mode": phase.mode.value,
        "backend": phase.backend,
        "buffer": phase.buffer,
        "chosen_by": phase.chosen_by,
        "wire_of_dispatch": str(spec.dispatch_format),
        "wire_of_combine": str(spec.combine_format or spec.hidden_format),
        "unusual": dict(phase.unusual()),
        "weights_applied_by": phase.weights_applied_by.value,
        "has_gradients": phase.is_trainable,
        "is_capturable": phase.is_capturable,
        "host_syncs": caps.host_syncs,
        "bytes_per_token": dict(phase.max_bytes_per_token()),
        "backward_bytes_per_token": (
            dict(phase.max_bytes_per_token(backward=True)) if phase.is_trainable else None
        ),
        "header_bytes": phase.header_bytes(),
        "max_bytes_between_hosts": phase.max_bytes_between_hosts(),
        "limits": dict(phase.limits()),
        "memory": [
            {"region": r.name, "bytes_per_token": r.bytes_per_token, "max_bytes": r.max_bytes}
            for r in phase.regions()
        ],
        "rejected": [asdict(each) for each in phase.rejected],
    }


def _rebalance(
    config: EPConfig, spec: MoESpec, num_ranks: int, weights: ExpertTensors | None
) -> dict[str, int | None] | None:
    """Return the bytes of redundant experts and of a move on one rank, without an optimizer.

    None where experts are not placed; null values where their size is unknown.
    """
    if config.redundant_experts is None:
        return None
    if weights is None:
        return dict.fromkeys(("redundant_bytes", "device_bytes", "host_bytes"))
    tensors = weights.tensors()
    memory = MoveMemory.of(tensors, num_physical=spec.num_experts, num_ranks=num_ranks)
    expert = sum(each[0].numel() * each.element_size() for each in tensors.values())
    return {"redundant_bytes": config.redundant_experts * expert // num_ranks, **asdict(memory)}


def text_of(chosen: EPPlan, record: Mapping[str, Any], model_type: str | None) -> str:
    """Return the explanation of a plan, with its layer and with what depends on the experts.

    record: from record_of().   model_type: of the --model file.
    """
    layer, memory = record["layer"], record["rebalance"]
    num_ranks, num_experts = layer["ranks"], layer["num_experts"]
    lines = [
        f"{num_experts} experts on {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}, "
        f"{num_experts // num_ranks} each; hidden size {layer['hidden_size']}, top "
        f"{layer['top_k']}, {layer['dtype']}",
        *([] if model_type is None else [f"model: {model_type}"]),
        chosen.explain(),
    ]
    if chosen.prefill.mode is Mode.FUSEEP:
        # Of all operators, also rejected ones, because many plan on another machine.
        for name in FUSED:
            properties = _properties(name, chosen.prefill).items()
            lines.append(f"{name}: {'; '.join(f'{label} {text}' for label, text in properties)}")
    elif chosen.runner is None:
        lines.append("no runner: the size of the experts is unknown; pass --intermediate-size")
    for name, size in (memory or {}).items():
        text = "unknown; pass --intermediate-size" if size is None else bytes_text(size)
        lines.append(f"placed experts, {name.replace('_', ' ')} of a rank, at most: {text}")
    return "".join(f"{line}\n" for line in lines)


def _properties(name: str, phase: PhasePlan) -> dict[str, str]:
    """Return the limits of a fused operator, and its window and packed experts on one rank."""
    operator = fused_class(class_names(name)[0])
    if not issubclass(operator, AscendFused):
        return {"chip": "any", **_limits(Limits())}
    spec, window, packed = phase.buffer_spec, "pass --max-tokens", "pass --max-tokens"
    if spec.max_tokens_per_rank is not None:
        regions = operator.region_bytes(spec, phase.world_size)
        *windows, packed = (bytes_text(region.max_bytes or 0) for region in regions)
        window = windows[0] if windows else "not documented"
    return {
        "chip": f"{operator.soc.value}{', deprecated' if operator.deprecated else ''}",
        **_limits(operator.limits),
        "HCCL window": window,
        "packed experts": packed,
    }


def _limits(limits: Limits) -> dict[str, str]:
    most = {
        "rows a call": limits.max_tokens,
        "top k": limits.top_k,
        "experts": limits.experts,
        "experts of a rank": limits.local_experts,
    }
    ranges = {
        "hidden size": (limits.hidden, limits.hidden_multiple),
        "2 * intermediate size": (limits.gate_up_columns, limits.gate_up_multiple),
    }
    texts = {name: f"at most {limit}" if limit else _NO_LIMIT for name, limit in most.items()}
    for name, (bounds, unit) in ranges.items():
        texts[name] = f"{bounds[0]} to {bounds[1]} in steps of {unit}" if bounds else _NO_LIMIT
    return texts


def bytes_text(number: int) -> str:
    """Write bytes exactly, and from 1 MiB on also in MiB."""
    return f"{number:,} B" + (f" ({number / 2**20:,.1f} MiB)" if number >= 2**20 else "")
