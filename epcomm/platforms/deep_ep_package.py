"""The installed deep_ep: its kind, why its buffers cannot serve, and its import."""

from collections.abc import Set
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from epcomm.errors import BackendUnavailable
from epcomm.platforms.cuda import cuda_reasons
from epcomm.platforms.deep_ep import DeepEPKind, InstalledDeepEP, runs_on_cpu_ranks
from epcomm.platforms.machine import Machine, this_machine
from epcomm.spec import Availability, BufferSpec
from epcomm.types import WireDtype

# Packages that may have the Buffer of V1; the first releases of V2 still have it.
WITH_LEGACY_BUFFER = frozenset({DeepEPKind.V1, DeepEPKind.V2, DeepEPKind.HYBRID})
WITH_ELASTIC_BUFFER = frozenset({DeepEPKind.V2})
# Builds V2, which includes the Buffer of V1. Source: its README; there are no wheels.
_BUILD = (
    "git clone --recursive https://github.com/deepseek-ai/DeepEP && cd DeepEP && "
    "python setup.py install"
)
# Dtypes of dispatch of both; combine has only bfloat16.
WIRE_DTYPES = frozenset({WireDtype.BF16, WireDtype.FP8_E4M3})
# Elements per scale in its FP8 rows.
SCALE_BLOCK = 128


def probe_deep_ep(kinds: Set[DeepEPKind], machine: Machine | None = None) -> Availability:
    """Return whether a machine, by default this one, has one of `kinds` and devices for it.

    Local; imports nothing.
    """
    machine = machine or this_machine()
    found = machine.find_deep_ep()
    is_stand_in = found is not None and found.is_stand_in
    verdict = Availability.judge(
        missing=_missing(kinds, found),
        command=_BUILD,
        absent=[] if is_stand_in else cuda_reasons(machine),
        needs="NVIDIA GPUs",
    )
    # torch creates this attribute at run time, so type checkers do not know it.
    switch: Any = torch.utils.deterministic
    if torch.are_deterministic_algorithms_enabled() and switch.fill_uninitialized_memory:
        reason = (
            "torch fills new memory outside of the stream of the package; set "
            "torch.utils.deterministic.fill_uninitialized_memory = False"
        )
        return replace(verdict, ok=False, reasons=(*verdict.reasons, reason))
    return verdict


def _missing(kinds: Set[DeepEPKind], found: InstalledDeepEP | None) -> list[str]:
    if found is None:
        return ["deep_ep is not installed (github.com/deepseek-ai/DeepEP)"]
    wanted = " or ".join(sorted(kind.value for kind in kinds))
    if found.kind not in kinds:
        return [f"the installed deep_ep is {found.kind.value}, expected {wanted}"]
    if kinds == WITH_LEGACY_BUFFER and not found.has_legacy_buffer:
        return [f"the installed deep_ep is {found.kind.value} without the Buffer of V1"]
    return []


def load_deep_ep(kinds: Set[DeepEPKind]) -> ModuleType:
    """Import deep_ep, which must be of one of `kinds`."""
    verdict = probe_deep_ep(kinds)
    if not verdict.ok:
        raise BackendUnavailable(f"deep_ep: {'; '.join(verdict.reasons)}")
    return import_deep_ep()


def import_deep_ep() -> ModuleType:
    """Import the installed deep_ep."""
    try:
        return import_module("deep_ep")
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise BackendUnavailable(
            f"deep_ep: its import fails: {error}; rebuild it for this torch and this device"
        ) from error


def format_reasons(spec: BufferSpec) -> list[str]:
    """List the formats of a specification that no buffer of deep_ep carries."""
    reasons = []
    if spec.hidden_format.dtype is not WireDtype.BF16:
        reasons.append(f"combine carries bf16, not {spec.hidden_format}")
    if spec.dispatch_format.dtype is WireDtype.FP8_E4M3 and spec.hidden_size % SCALE_BLOCK:
        reasons.append(f"FP8 rows need a multiple of {SCALE_BLOCK}, not {spec.hidden_size}")
    return reasons


def device_types() -> frozenset[str]:
    """Return the device types of groups that the installed deep_ep, or its imitation, serves."""
    return frozenset({"cpu"} if runs_on_cpu_ranks() else {"cuda"})
