"""The plan as one JSON object, with the keys that docs/commands.md lists."""

from __future__ import annotations

import json
from dataclasses import asdict

from epcomm.bench.machine import version_of
from epcomm.cli.plan_rebalance import Rebalance
from epcomm.planning.plans import EPPlan, PhasePlan, Rejection
from epcomm.spec import MoESpec
from epcomm.types import WireDtype


def as_json(chosen: EPPlan, spec: MoESpec, ranks: int, rebalance: Rebalance | None) -> str:
    """Return the plan of a layer on `ranks` ranks, as text that ends with a line break."""
    values = {
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
        "rejected_runners": _rejections(chosen.rejected_runners),
        "rebalance": rebalance and asdict(rebalance),
    }
    return json.dumps(values, indent=1) + "\n"


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
        "rejected": _rejections(phase.rejected),
    }


def _rejections(rejected: tuple[Rejection, ...]) -> list[dict[str, object]]:
    return [{"name": each.name, "reasons": list(each.reasons)} for each in rejected]
