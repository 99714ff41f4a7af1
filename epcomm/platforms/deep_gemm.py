"""The installed deep_gemm: whether it can run, and the functions that are used."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from epcomm.errors import BackendUnavailable
from epcomm.platforms.machine import Machine
from epcomm.platforms.signatures import has_parameter

# The second name is that of version 2.1.
_MASKED_NAMES = ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked")
_ALIGNMENT_NAMES = (
    "get_mk_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
)

# Source: its README; there are no wheels.
BUILD = (
    "git clone --recursive https://github.com/deepseek-ai/DeepGEMM && cd DeepGEMM && ./install.sh"
)


@dataclass(frozen=True, kw_only=True)
class DeepGemm:
    """The functions of the package.

    expert_alignment: rows of its tiles in the contiguous layout.
    takes_ends: multiply_contiguous(use_psum_layout=True) takes the end of each expert instead of
        the expert of each row. Releases after 2.1 have it.
    get_num_sms, set_num_sms: the SMs of all products of the process.
    """

    multiply_contiguous: Callable[..., None]
    multiply_masked: Callable[..., None]
    expert_alignment: Callable[[], int]
    takes_ends: bool
    get_num_sms: Callable[[], int]
    set_num_sms: Callable[[int], None]


def deep_gemm_reasons(machine: Machine) -> list[str]:
    """List why the package cannot run; empty if it can. Local; imports nothing."""
    if not machine.has_module("deep_gemm"):
        return ["deep_gemm is not installed"]
    if not machine.has_library(lambda: nvcc_is_installed(machine.environment)):
        return [
            "nvcc is not installed, with which deep_gemm compiles kernels at run time; install the "
            "CUDA toolkit, or set CUDA_HOME to its folder"
        ]
    return []


def nvcc_is_installed(variables: Mapping[str, str]) -> bool:
    """Return whether the CUDA compiler is where the package searches for it."""
    home = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    if home is None and shutil.which("nvcc", path=variables.get("PATH")) is not None:
        return True
    return (Path(home or "/usr/local/cuda") / "bin" / "nvcc").is_file()


def load_deep_gemm() -> DeepGemm:
    """Import the package, after deep_gemm_reasons() found no reasons."""
    module = import_module("deep_gemm")
    multiply_contiguous = _find(module, ("m_grouped_fp8_gemm_nt_contiguous",))
    return DeepGemm(
        multiply_contiguous=multiply_contiguous,
        multiply_masked=_find(module, _MASKED_NAMES),
        expert_alignment=_find(module, _ALIGNMENT_NAMES),
        takes_ends=has_parameter(multiply_contiguous, "use_psum_layout"),
        get_num_sms=_find(module, ("get_num_sms",)),
        set_num_sms=_find(module, ("set_num_sms",)),
    )


def _find(module: ModuleType, names: tuple[str, ...]) -> Callable[..., Any]:
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise BackendUnavailable(
        f"deep_gemm: the installed package has none of {', '.join(names)}; install version 2.1 or "
        "newer, or use runner='auto'"
    )
