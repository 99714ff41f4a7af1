"""The installed deep_gemm: whether it is there, and the functions of it that are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from epcomm.errors import BackendUnavailable
from epcomm.platforms.machine import Machine

_CONTIGUOUS_NAMES = ("m_grouped_fp8_gemm_nt_contiguous",)
# The second is what version 2.1 calls it.
_MASKED_NAMES = ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked")
_ALIGNMENT_NAMES = (
    "get_mk_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
)

# Source: its README, for wheels are not published.
BUILD = (
    "git clone --recursive https://github.com/deepseek-ai/DeepGEMM && cd DeepGEMM && ./install.sh"
)


@dataclass(frozen=True, kw_only=True)
class DeepGemm:
    """The functions of the package.

    expert_alignment: rows of its tiles in the contiguous layout.
    """

    multiply_contiguous: Callable[..., None]
    multiply_masked: Callable[..., None]
    expert_alignment: Callable[[], int]


def deep_gemm_reasons(machine: Machine) -> list[str]:
    """List why the package cannot be imported; empty if it is installed. Local; imports nothing."""
    return [] if machine.has_module("deep_gemm") else ["deep_gemm is not installed"]


def load_deep_gemm() -> DeepGemm:
    """Import the package, which deep_gemm_reasons() has found; the import system keeps it.

    Raises:
        BackendUnavailable: it has other functions.
    """
    module = import_module("deep_gemm")
    return DeepGemm(
        multiply_contiguous=_find(module, _CONTIGUOUS_NAMES),
        multiply_masked=_find(module, _MASKED_NAMES),
        expert_alignment=_find(module, _ALIGNMENT_NAMES),
    )


def _find(module: ModuleType, names: tuple[str, ...]) -> Callable[..., Any]:
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise BackendUnavailable(
        f"deep_gemm: the installed package has none of {', '.join(names)}; install version 2.1 or "
        "newer, or use runner='auto'"
    )
