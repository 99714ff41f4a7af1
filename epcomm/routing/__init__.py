"""Turn router logits into top-k entries: one spec, one reference function, presets per model.

Routes of a whole model are recorded, read from engines, and replayed.
"""

from epcomm.routing.engine_routes import routes_from_sglang, routes_from_vllm, routes_of_batch
from epcomm.routing.gates import GateCall, watch_gates
from epcomm.routing.reference import route
from epcomm.routing.replay import (
    ReplayCounts,
    RouteRecord,
    RouteReplay,
    record_routes,
    replay_routes,
)
from epcomm.routing.spec import (
    CorrectionBias,
    CustomRoutingFunction,
    DroppedGroups,
    EpsilonMode,
    RoutingSpec,
    ScoreFunction,
    SoftmaxOrder,
)

__all__ = ["CorrectionBias", "CustomRoutingFunction", "RoutingSpec", "route"]
__all__ += ["DroppedGroups", "EpsilonMode", "ScoreFunction", "SoftmaxOrder"]
__all__ += ["GateCall", "watch_gates"]
__all__ += ["ReplayCounts", "RouteRecord", "RouteReplay", "record_routes", "replay_routes"]
__all__ += ["routes_from_sglang", "routes_from_vllm", "routes_of_batch"]
