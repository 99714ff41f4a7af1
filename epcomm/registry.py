"""The classes of backends and runners by name; each is imported when it is chosen.

An unknown name raises ConfigError, whose message lists the valid names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from epcomm.config import Mode
from epcomm.errors import ConfigError

if TYPE_CHECKING:
    from epcomm.buffers.base import Backend, Buffer
    from epcomm.buffers.fused import FusedBackend
    from epcomm.runners.base import ExpertRunner

# The classes of each backend. Mode, slot budget and `replicated` select among them; if several can
# serve a layer, the plan takes the first. backend="auto" tries the names in this order. nvlink,
# which serves one host, comes before deep_ep; MEASURED_ORDER has the reason.
BUFFERS: Mapping[str, tuple[str, ...]] = {
    "nvlink": (
        "epcomm.buffers.nvlink.normal:NVLinkBuffer",
        "epcomm.buffers.nvlink.normal:NVLinkStaticBuffer",
        "epcomm.buffers.nvlink.low_latency:NVLinkLowLatencyBuffer",
    ),
    "deep_ep_v2": (
        "epcomm.buffers.deep_ep.v2:DeepEPV2Buffer",
        "epcomm.buffers.deep_ep.v2:DeepEPV2StaticBuffer",
        "epcomm.buffers.deep_ep.v2:DeepEPV2LowLatencyBuffer",
    ),
    "deep_ep_v1": (
        "epcomm.buffers.deep_ep.v1:DeepEPV1Buffer",
        "epcomm.buffers.deep_ep.v1:DeepEPV1StaticBuffer",
        "epcomm.buffers.deep_ep.v1_low_latency:DeepEPV1LowLatencyBuffer",
    ),
    "ascend": (
        "epcomm.buffers.ascend.packed:AscendNormalBuffer",
        "epcomm.buffers.ascend.packed:AscendLowLatencyBuffer",
        "epcomm.buffers.ascend.standard:AscendStandardBuffer",
    ),
    "shared_memory": ("epcomm.buffers.shared_memory.buffer:SharedMemoryBuffer",),
    "hierarchical": ("epcomm.buffers.hierarchical.buffer:HierarchicalBuffer",),
    "collective": (
        "epcomm.buffers.collective.all_to_all:CollectiveBuffer",
        "epcomm.buffers.collective.all_to_all_static:StaticCollectiveBuffer",
        "epcomm.buffers.collective.all_gather:AllGatherBuffer",
        "epcomm.buffers.collective.replicated:ReplicatedBuffer",
    ),
}
# Classes that the drop-in deep_ep opens by name; no configuration selects them.
DROP_IN_BUFFERS: Mapping[str, tuple[str, ...]] = {
    "nvlink": (
        "epcomm.buffers.nvlink.normal_row_budget:NVLinkRowBudgetBuffer",
        "epcomm.buffers.nvlink.low_latency:NVLinkMaskedBuffer",
    )
}
MEASURED_ORDER = (
    "nvlink comes before deep_ep, because on 4 H200 a low-latency pair of 128 tokens took 51 us, "
    "compared with 94 us for DeepEP V1 and 68 us for V2 (commit 46fea7d, 2026-11)"
)
# Names that stand for several backends, of which a machine has at most one.
BACKEND_GROUPS: Mapping[str, tuple[str, ...]] = {"deep_ep": ("deep_ep_v2", "deep_ep_v1")}
# Operators that dispatch, compute and combine in one call: mode fuseep.
FUSED: Mapping[str, tuple[str, ...]] = {
    "mega_moe": ("epcomm.fuseep.ascend:MegaMoE",),
    "fused_deep_moe": ("epcomm.fuseep.ascend:FusedDeepMoE",),
    "dispatch_ffn_combine": ("epcomm.fuseep.ascend:DispatchFFNCombine",),
    "fuseep_reference": ("epcomm.fuseep.reference:FuseEPReference",),
}
# The function that reads blocks of transformers. Only its name is here, because it imports the
# layer, which imports this module.
BLOCK_READER = "epcomm.integrations.transformers:from_transformers"
RUNNERS: Mapping[str, str] = {
    "fp8_wgmma": "epcomm.runners.fp8_wgmma:Fp8WgmmaRunner",
    "fp8_triton": "epcomm.runners.fp8_triton:Fp8TritonRunner",
    "deep_gemm": "epcomm.runners.deep_gemm:DeepGemmRunner",
    "ascend": "epcomm.runners.ascend.runner:AscendRunner",
    "ascend_swiglu": "epcomm.runners.ascend.runner:AscendSwigluRunner",
    "ascend_nz": "epcomm.runners.ascend.nz:AscendNZRunner",
    "ascend_swiglu_quant": "epcomm.runners.ascend.nz:AscendSwigluQuantRunner",
    "grouped_mm": "epcomm.runners.grouped_mm:GroupedMMRunner",
    "int8_triton": "epcomm.runners.int8_triton:Int8TritonRunner",
    "mxfp8_triton": "epcomm.runners.fp8_triton:Mxfp8TritonRunner",
    "quantized_reference": "epcomm.runners.quantized_reference:QuantizedReferenceRunner",
    "reference": "epcomm.runners.reference:ReferenceRunner",
    "quantized_blocks": "epcomm.runners.quantized_reference:QuantizedBlocksRunner",
    "batch_invariant": "epcomm.runners.batch_invariant:BatchInvariantRunner",
}


def _by_class(table: Mapping[str, tuple[str, ...]]) -> Mapping[str, str]:
    return {path.partition(":")[2]: path for paths in table.values() for path in paths}


# Dictionaries, because a plan looks up about a hundred names.
_BUFFER_CLASSES = {**_by_class(BUFFERS), **_by_class(DROP_IN_BUFFERS)}
_FUSED_CLASSES = _by_class(FUSED)


def buffer_class(name: str) -> type[Buffer]:
    """Return the Buffer class called `name`, for example NVLinkLowLatencyBuffer."""
    return _load("buffer", _BUFFER_CLASSES, name)


def fused_class(name: str) -> type[FusedBackend]:
    """Return the FusedBackend class called `name`."""
    return _load("operator", _FUSED_CLASSES, name)


def backend_class(name: str) -> type[Backend]:
    return fused_class(name) if name in _FUSED_CLASSES else buffer_class(name)


def backend_names(chosen: str, mode: Mode) -> tuple[str, ...]:
    """Return the backends that EPConfig.backend allows, in order of preference.

    chosen: a name of `mode`, deep_ep for either version, or auto for all.
    """
    table = FUSED if mode is Mode.FUSEEP else BUFFERS
    if chosen == "auto":
        return tuple(table)
    if chosen in BACKEND_GROUPS and table is BUFFERS:
        return BACKEND_GROUPS[chosen]
    _check_name("backend", table, chosen)
    return (chosen,)


def class_names(backend: str) -> tuple[str, ...]:
    """Return the class names of one backend, in order of preference."""
    paths = BUFFERS[backend] if backend in BUFFERS else FUSED[backend]
    return tuple(path.partition(":")[2] for path in paths)


def runner_class(name: str) -> type[ExpertRunner]:
    """Return the ExpertRunner class registered as `name`."""
    return _load("runner", RUNNERS, name)


def _check_name(kind: str, table: Mapping[str, object], name: str) -> None:
    if name not in table:
        raise ConfigError(f"EPConfig: {kind} is {name!r}, expected auto or one of {sorted(table)}")


def _load(kind: str, table: Mapping[str, str], name: str) -> type:
    _check_name(kind, table, name)
    return resolve_name(table[name])
