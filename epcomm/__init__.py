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
from epcomm.experts import ExpertParallelExperts
from epcomm.group import EPGroup
from epcomm.integrations.telemetry import Metric, as_prometheus_text, metrics
from epcomm.layers import decode_phase
from epcomm.micro_batches import interleave
from epcomm.moe import ExpertParallelMoE
from epcomm.placement.balance import balance
from epcomm.placement.expert_placement import ExpertPlacement
from epcomm.planning.plan import plan
from epcomm.planning.plans import EPPlan
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
from epcomm.spec import MoESpec
from epcomm.stats import EPStats
from epcomm.training.idle import idle_step
from epcomm.types import Int8Profile, ScaleDtype, WireDtype, WireFormat, WireTensor
from epcomm.weights.quantized import (
    Fp8BlockWeights,
    Int8ChannelWeights,
    Mxfp4Weights,
    Mxfp8Weights,
    Nvfp4Weights,
)
from epcomm.weights.unquantized import Activation, ExpertFormat, ExpertWeights

__all__ = ["ExpertParallelExperts", "ExpertParallelMoE", "decode_phase", "idle_step", "interleave"]
__all__ += ["EPConfig", "EPGroup", "EPPlan", "MoESpec", "Mode", "plan"]
__all__ += ["Dispatcher", "StandardDispatcher"]
__all__ += ["DeepEPLowLatencyDispatcher", "DeepEPNormalDispatcher"]
__all__ += ["CombineInput", "DispatchOutput", "Pending", "TopKOutput"]
__all__ += ["MaskedCombineInput", "MaskedDispatchOutput", "RowsCombineInput", "RowsDispatchOutput"]
__all__ += ["Int8Profile", "ScaleDtype", "WireDtype", "WireFormat", "WireTensor"]
__all__ += ["Activation", "ExpertFormat", "ExpertWeights", "Fp8BlockWeights", "Int8ChannelWeights"]
__all__ += ["Mxfp4Weights", "Mxfp8Weights", "Nvfp4Weights"]
__all__ += ["ExpertPlacement", "RoutingSpec", "balance", "route"]
__all__ += ["EPStats", "Metric", "as_prometheus_text", "metrics"]
__all__ += ["BackendUnavailable", "CapacityError", "ConfigError", "EPError", "EPTimeout"]
__all__ += ["HandleError", "ShapeError"]
