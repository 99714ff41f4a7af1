"""Names of backends and runners, and where they live; each is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from epcomm.config import Mode
from epcomm.errors import ConfigError

if TYPE_CHECKING:
    from epcomm.buffers.base import Backend, Buffer
    from epcomm.fuseep.base import FusedBackend
    from epcomm.runners.base import ExpertRunner

BUFFERS: Mapping[str, str] = MappingProxyType(
    {
        "deep_ep_v2": "epcomm.buffers.deep_ep_v2:DeepEPV2Buffer",
        "deep_ep_v2_static": "epcomm.buffers.deep_ep_v2:DeepEPV2StaticBuffer",
        "deep_ep_v1": "epcomm.buffers.deep_ep_v1:DeepEPV1Buffer",
        "deep_ep_v1_static": "epcomm.buffers.deep_ep_v1:DeepEPV1StaticBuffer",
        "deep_ep_v1_low_latency": "epcomm.buffers.deep_ep_v1_low_latency:DeepEPV1LowLatencyBuffer",
        "deep_ep_v2_low_latency": "epcomm.buffers.deep_ep_v2_expand:DeepEPV2LowLatencyBuffer",
        "deep_ep_v2_expand": "epcomm.buffers.deep_ep_v2_expand:DeepEPV2ExpandBuffer",
        "ascend_normal": "epcomm.buffers.ascend:AscendNormalBuffer",
        "ascend_low_latency": "epcomm.buffers.ascend_low_latency:AscendLowLatencyBuffer",
        "ascend_standard": "epcomm.buffers.ascend_standard:AscendStandardBuffer",
        "nvlink": "epcomm.buffers.nvlink_exact:NVLinkBuffer",
        "nvlink_static": "epcomm.buffers.nvlink_static:NVLinkStaticBuffer",
        "nvlink_low_latency": "epcomm.buffers.nvlink_low_latency:NVLinkLowLatencyBuffer",
        "nvlink_low_latency_masked": "epcomm.buffers.nvlink_masked:NVLinkMaskedBuffer",
        "shared_memory": "epcomm.buffers.shared_memory:SharedMemoryBuffer",
        "collective": "epcomm.buffers.collective:CollectiveBuffer",
        "collective_static": "epcomm.buffers.static:StaticCollectiveBuffer",
        "all_gather": "epcomm.buffers.all_gather:AllGatherBuffer",
        "replicated": "epcomm.buffers.replicated:ReplicatedBuffer",
    }
)
# Operators that dispatch, compute and combine in one call: mode fuseep.
FUSED: Mapping[str, str] = MappingProxyType(
    {
        "fused_deep_moe": "epcomm.fuseep.ascend:FusedDeepMoE",
        "dispatch_ffn_combine": "epcomm.fuseep.ascend:DispatchFFNCombine",
        "fuseep_reference": "epcomm.fuseep.reference:FuseEPReference",
    }
)
RUNNERS: Mapping[str, str] = MappingProxyType(
    {
        "fp8_wgmma": "epcomm.runners.fp8_wgmma:Fp8WgmmaRunner",
        "fp8_triton": "epcomm.runners.fp8_triton:Fp8TritonRunner",
        "deep_gemm": "epcomm.runners.deep_gemm:DeepGemmRunner",
        "ascend": "epcomm.runners.ascend:AscendRunner",
        "ascend_swiglu": "epcomm.runners.ascend_swiglu:AscendSwigluRunner",
        "ascend_nz": "epcomm.runners.ascend_nz:AscendNZRunner",
        "ascend_swiglu_quant": "epcomm.runners.ascend_swiglu_quant:AscendSwigluQuantRunner",
        "grouped_mm": "epcomm.runners.grouped_mm:GroupedMMRunner",
        "int8_triton": "epcomm.runners.int8_triton:Int8TritonRunner",
        "quantized_reference": "epcomm.runners.quantized_reference:QuantizedReferenceRunner",
        "reference": "epcomm.runners.reference:ReferenceRunner",
    }
)


def buffer_class(name: str) -> type[Buffer]:
    """The Buffer class registered as `name`.

    Raises:
        ConfigError: no such name; the message lists those that exist.
    """
    return _load("backend", BUFFERS, name)


def fused_class(name: str) -> type[FusedBackend]:
    """The FusedBackend class registered as `name`.

    Raises:
        ConfigError: no such name; the message lists those that exist.
    """
    return _load("backend", FUSED, name)


def backend_class(name: str) -> type[Backend]:
    """The class of a buffer or a fused operator.

    Raises:
        ConfigError: no such name; the message lists the buffers that exist.
    """
    return fused_class(name) if name in FUSED else buffer_class(name)


def backend_names(mode: Mode) -> tuple[str, ...]:
    """What a mode may be served by, the first that can being chosen."""
    return tuple(FUSED if mode is Mode.FUSEEP else BUFFERS)


def buffer_family(name: str) -> tuple[str, ...]:
    """The buffer registered as `name`, or all whose names begin with it: deep_ep, deep_ep_v1_...

    Raises:
        ConfigError: no such name; the message lists those that exist.
    """
    if name not in BUFFERS and (family := [n for n in BUFFERS if n.startswith(f"{name}_")]):
        return tuple(family)
    buffer_class(name)
    return (name,)


def backend_family(name: str, mode: Mode) -> tuple[str, ...]:
    """As buffer_family(), or of the fused operators in mode fuseep.

    Raises:
        ConfigError: no such name; the message lists those that exist.
    """
    if mode is not Mode.FUSEEP:
        return buffer_family(name)
    fused_class(name)
    return (name,)


def runner_class(name: str) -> type[ExpertRunner]:
    """The ExpertRunner class registered as `name`.

    Raises:
        ConfigError: no such name; the message lists those that exist.
    """
    return _load("runner", RUNNERS, name)


def _load(kind: str, table: Mapping[str, str], name: str) -> type:
    if name not in table:
        raise ConfigError(f"EPConfig: {kind} is {name!r}, expected auto or one of {sorted(table)}")
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)
