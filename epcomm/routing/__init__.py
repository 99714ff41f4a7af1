"""Turn router logits into top-k entries: one spec, one reference function, presets per model."""

from epcomm.routing.reference import route
from epcomm.routing.spec import (
    CorrectionBias,
    CustomRoutingFunction,
    DroppedGroups,
    EpsilonMode,
    RoutingSpec,
    ScoreFunction,
    SoftmaxOrder,
)

__all__ = [
    "CorrectionBias",
    "CustomRoutingFunction",
    "DroppedGroups",
    "EpsilonMode",
    "RoutingSpec",
    "ScoreFunction",
    "SoftmaxOrder",
    "route",
]
