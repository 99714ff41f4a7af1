"""Names of backends and runners, and where they live; each is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from epcomm.errors import ConfigError

if TYPE_CHECKING:
    from epcomm.buffers.base import Buffer
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
        "collective": "epcomm.buffers.collective:CollectiveBuffer",
        "collective_static": "epcomm.buffers.static:StaticCollectiveBuffer",
        "all_gather": "epcomm.buffers.all_gather:AllGatherBuffer",
        "replicated": "epcomm.buffers.replicated:ReplicatedBuffer",
    }
)
RUNNERS: Mapping[str, str] = MappingProxyType(
    {
        "fp8_wgmma": "epcomm.runners.fp8_wgmma:Fp8WgmmaRunner",
        "fp8_triton": "epcomm.runners.fp8_triton:Fp8TritonRunner",
        "deep_gemm": "epcomm.runners.deep_gemm:DeepGemmRunner",
        "ascend": "epcomm.runners.ascend:AscendRunner",
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


def buffer_family(name: str) -> tuple[str, ...]:
    """The buffer registered as `name`, or all whose names begin with it: deep_ep, deep_ep_v1_...

    Raises:
        ConfigError: no such name; the message lists those that exist.
    """
    if name not in BUFFERS and (family := [n for n in BUFFERS if n.startswith(f"{name}_")]):
        return tuple(family)
    buffer_class(name)
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
