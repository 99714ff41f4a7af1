"""The installed deep_ep: which one it is, what keeps its buffers from serving, and its import."""

from __future__ import annotations

import sys
from collections.abc import Set
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from epcomm.errors import BackendUnavailable
from epcomm.platforms.deep_ep import DeepEPKind, deep_ep_kind, defines
from epcomm.spec import Availability, BufferSpec
from epcomm.types import WireDtype

# The first releases of the elastic buffer kept the older one beside it.
WITH_LEGACY_BUFFER = frozenset({DeepEPKind.V1, DeepEPKind.V2, DeepEPKind.HYBRID})
WITH_ELASTIC_BUFFER = frozenset({DeepEPKind.V2})
# What both carry towards the experts; combine knows bfloat16 alone.
WIRE_DTYPES = frozenset({WireDtype.BF16, WireDtype.FP8_E4M3})
# Elements that share a scale in its FP8 rows.
SCALE_BLOCK = 128


def probe_deep_ep(kinds: Set[DeepEPKind]) -> Availability:
    """Tell whether one of `kinds` is here, with devices for it. Local; imports nothing."""
    folder = _find_folder()
    wanted = " or ".join(sorted(kind.value for kind in kinds))
    if folder is None:
        return Availability(
            ok=False, reasons=("deep_ep is not installed (github.com/deepseek-ai/DeepEP)",)
        )
    kind = deep_ep_kind(folder)
    reasons = []
    if kind not in kinds:
        reasons.append(f"the deep_ep installed is {kind.value}, expected {wanted}")
    elif kinds == WITH_LEGACY_BUFFER and not defines(folder, "Buffer"):
        reasons.append(f"the deep_ep installed is {kind.value} without the Buffer of V1")
    if not (torch.cuda.is_available() or _runs_on_cpu_ranks()):
        reasons.append("there is no CUDA device")
    # An attribute that torch makes at run time, which type checkers cannot see.
    switch: Any = torch.utils.deterministic
    if torch.are_deterministic_algorithms_enabled() and switch.fill_uninitialized_memory:
        reasons.append(
            "torch fills new memory beside its stream; set "
            "torch.utils.deterministic.fill_uninitialized_memory = False"
        )
    return Availability(ok=not reasons, reasons=tuple(reasons))


def load_deep_ep(kinds: Set[DeepEPKind]) -> ModuleType:
    """Import it.

    Raises:
        BackendUnavailable: it is missing, another kind, or its import fails.
    """
    verdict = probe_deep_ep(kinds)
    if not verdict.ok:
        raise BackendUnavailable(f"deep_ep: {'; '.join(verdict.reasons)}")
    return import_deep_ep()


def import_deep_ep() -> ModuleType:
    """Import whichever is installed.

    Raises:
        BackendUnavailable: its import fails.
    """
    try:
        return import_module("deep_ep")
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise BackendUnavailable(
            f"deep_ep: its import fails: {error}; rebuild it for this torch and this device"
        ) from error


def format_reasons(spec: BufferSpec) -> list[str]:
    """List the rows of a specification that no buffer of deep_ep carries."""
    reasons = []
    if spec.hidden_format.dtype is not WireDtype.BF16:
        reasons.append(f"combine carries bf16, not {spec.hidden_format}")
    if spec.dispatch_format.dtype is WireDtype.FP8_E4M3 and spec.hidden_size % SCALE_BLOCK:
        reasons.append(f"FP8 rows need a multiple of {SCALE_BLOCK}, not {spec.hidden_size}")
    return reasons


def find_deep_ep() -> tuple[DeepEPKind | None, bool]:
    """Return which deep_ep is installed, or None, and whether it is imitated. Imports nothing."""
    folder = _find_folder()
    return (None if folder is None else deep_ep_kind(folder)), _runs_on_cpu_ranks()


def device_types() -> frozenset[str]:
    """Return the types of the devices of the groups that the deep_ep here serves."""
    return frozenset({"cpu"} if _runs_on_cpu_ranks() else {"cuda"})


def _find_folder() -> Path | None:
    try:
        found = find_spec("deep_ep")
    except ValueError:
        # A module that something put there by hand, without saying where it comes from.
        return None
    locations = found.submodule_search_locations if found is not None else None
    return Path(next(iter(locations))) if locations else None


def _runs_on_cpu_ranks() -> bool:
    """Tell whether fakes.deep_ep stands in for the package."""
    return bool(getattr(sys.modules.get("deep_ep"), "CPU_RANKS", False))
