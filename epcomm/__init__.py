"""Expert-parallel communication for Mixture-of-Experts models in PyTorch."""

from epcomm.config import EPConfig, Mode
from epcomm.dispatchers import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    Dispatcher,
    StandardDispatcher,
)
from epcomm.errors import (
    BackendUnavailable,
    CapacityError,
    ConfigError,
    EPError,
    EPTimeout,
    HandleError,
    ShapeError,
)
from epcomm.experts import EPStats, ExpertParallelExperts
from epcomm.group import EPGroup
from epcomm.layers import decode_phase, idle_step
from epcomm.moe import ExpertParallelMoE
from epcomm.planning import EPPlan, MoESpec, plan
from epcomm.quantized_weights import Fp8BlockWeights, Int8ChannelWeights
from epcomm.records import (
    CombineInput,
    DispatchOutput,
    MaskedCombineInput,
    MaskedDispatchOutput,
    Pending,
    RowsCombineInput,
    RowsDispatchOutput,
    TopKOutput,
)
from epcomm.routing import RoutingSpec, route
from epcomm.types import Int8Profile, ScaleDtype, WireDtype, WireFormat, WireTensor
from epcomm.weights import Activation, ExpertFormat, ExpertWeights

__all__ = [
    "Activation",
    "BackendUnavailable",
    "CapacityError",
    "CombineInput",
    "ConfigError",
    "DeepEPLowLatencyDispatcher",
    "DeepEPNormalDispatcher",
    "DispatchOutput",
    "Dispatcher",
    "EPConfig",
    "EPError",
    "EPGroup",
    "EPPlan",
    "EPStats",
    "EPTimeout",
    "ExpertFormat",
    "ExpertParallelExperts",
    "ExpertParallelMoE",
    "ExpertWeights",
    "Fp8BlockWeights",
    "HandleError",
    "Int8ChannelWeights",
    "Int8Profile",
    "MaskedCombineInput",
    "MaskedDispatchOutput",
    "MoESpec",
    "Mode",
    "Pending",
    "RoutingSpec",
    "RowsCombineInput",
    "RowsDispatchOutput",
    "ScaleDtype",
    "ShapeError",
    "StandardDispatcher",
    "TopKOutput",
    "WireDtype",
    "WireFormat",
    "WireTensor",
    "decode_phase",
    "idle_step",
    "plan",
    "route",
]
