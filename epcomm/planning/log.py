"""Log lines of a plan, one for each phase."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epcomm.group import EPGroup
    from epcomm.planning.plans import EPPlan, PhasePlan

_logger = logging.getLogger(__name__)


def log_plan(chosen: EPPlan, group: EPGroup) -> None:
    """Log at INFO what serves a layer, once for all layers of the group that are served alike.

    Local; each rank logs for itself.
    """
    for purpose, phase in chosen.phases().items():
        text = _line(phase, purpose, chosen.runner)
        if group.is_news(text):
            _logger.info("%s: %s", group.where, text)


def _line(phase: PhasePlan, purpose: str, runner: str | None) -> str:
    spec, per_token = phase.buffer_spec, phase.max_bytes_per_token()
    parts = [
        f"mode {phase.mode.value} on backend {phase.backend}{purpose and f' for {purpose}'}",
        *([] if runner is None else [f"runner {runner}"]),
        f"hidden size {spec.hidden_size}, top {spec.top_k}, experts a rank "
        f"{spec.num_local_experts}",
        f"wire {spec.dispatch_format} in dispatch, {spec.hidden_format} in combine and backward",
        f"at most {per_token['dispatch']} B a token in dispatch and {per_token['combine']} B in "
        "combine",
        *(f"{name}: {limit}" for name, limit in phase.limits().items()),
        f"memory: {_memory(phase)}",
    ]
    return "; ".join(parts)


def _memory(phase: PhasePlan) -> str:
    """Tell the bytes of a call that are bounded, and those that every token adds beside them."""
    regions = phase.regions()
    bounded = sum(region.max_bytes for region in regions if region.max_bytes is not None)
    open_ended = sum(region.bytes_per_token or 0 for region in regions if region.max_bytes is None)
    return f"at most {bounded} B" + (f" and {open_ended} B a token" if open_ended else "")
