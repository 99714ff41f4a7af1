"""The record of a plan that `epcomm plan` prints, with the keys that docs/commands.md lists."""

from __future__ import annotations

from dataclasses import asdict

from epcomm.bench.machine import version_of
from epcomm.config import EPConfig
from epcomm.placement.moving import MoveMemory
from epcomm.planning.plans import EPPlan, PhasePlan
from epcomm.spec import MoESpec
from epcomm.types import WireDtype
from epcomm.weights.unquantized import ExpertTensors


def record_of(
    chosen: EPPlan, config: EPConfig, spec: MoESpec, weights: ExpertTensors | None
) -> dict[str, object]:
    """Return the plan of a layer in plain values. spec: of the physical experts."""
    ranks = chosen.prefill.world_size
    return {
        "version": version_of("epcomm"),
        "layer": {
            "hidden_size": spec.hidden_size,
            "num_experts": spec.num_experts,
            "top_k": spec.top_k,
            "dtype": WireDtype.from_torch(spec.dtype).value,
            "ranks": ranks,
        },
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
        "wire_of_combine": str(spec.hidden_format),
        "unusual": dict(phase.unusual()),
        "weights_applied_by": phase.weights_applied_by.value,
        "has_gradients": caps.trainable,
        "is_capturable": phase.is_capturable,
        "host_syncs": caps.host_syncs,
        "bytes_per_token": dict(phase.max_bytes_per_token()),
        "backward_bytes_per_token": (
            dict(phase.max_bytes_per_token(backward=True)) if caps.trainable else None
        ),
        "header_bytes": phase.header_bytes(),
        "max_bytes_between_hosts": phase.max_bytes_between_hosts(),
        "limits": dict(phase.limits()),
        "memory": [
            {
                "region": region.name,
                "bytes_per_token": region.bytes_per_token,
                "max_bytes": region.max_bytes,
            }
            for region in phase.regions()
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
    redundant_bytes = config.redundant_experts * expert // num_ranks
    return {"redundant_bytes": redundant_bytes, **asdict(memory)}
