"""What the Ascend deep_ep can do, by processor: limits, its communication window, its variables.

Source: sgl-kernel-npu, deep_ep and the tiling of its operators; nothing here ran on an NPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from epcomm.buffers.base import BufferSpec
from epcomm.types import WireDtype, align_up

_MIB = 2**20
_WINDOW_VARIABLES = ("DEEPEP_HCCL_BUFFSIZE", "HCCL_BUFFSIZE")
_DEFAULT_WINDOW_MIB = 200
# The kernels move rows in units of 512 bytes, and scales and indices of 32.
_ROW_UNIT, _SCALE_UNIT, _ROW_TAIL = 512, 32, 44
# Beside the rows of normal mode: its states and its counts.
_NORMAL_EXTRA_MIB = 4 + 204
MAX_TOP_K = 16
MAX_EXPERTS = 512


class Soc(StrEnum):
    """A processor, by the short name of its server generation."""

    # Ascend910B
    A2 = "A2"
    # Ascend910_93
    A3 = "A3"
    # ascend950
    A5 = "A5"


@dataclass(frozen=True, kw_only=True)
class SizeLimits:
    """Of one mode: hidden sizes, tokens a rank, ranks; inclusive."""

    hidden: tuple[int, int]
    tokens: int
    ranks: tuple[int, int]


NORMAL_LIMITS = SizeLimits(hidden=(1024, 7168), tokens=8192, ranks=(2, 384))
LOW_LATENCY_LIMITS = SizeLimits(hidden=(1024, 8192), tokens=512, ranks=(2, 768))
# Rows that the kernel can number, of all ranks together.
MAX_LOCAL_EXPERTS_TIMES_RANKS = 2048

# What a variable may be; other values change numbers or layouts behind the caller's arguments.
_REQUIRED = MappingProxyType(
    {
        "DEEP_USE_MODE": ("default",),
        "MOE_EXPERT_TOKEN_NUMS_TYPE": ("1",),
        "MOE_SHARED_EXPERT_RANK_NUM": ("0",),
    }
)
_INT8_VARIABLE = "DEEP_NORMAL_MODE_USE_INT8_QUANT"


def size_reasons(spec: BufferSpec, world_size: int, limits: SizeLimits) -> list[str]:
    """What the kernels were not written for."""
    reasons = []
    lowest, highest = limits.hidden
    if not lowest <= spec.hidden_size <= highest:
        reasons.append(f"hidden_size is {spec.hidden_size}, expected {lowest} to {highest}")
    fewest, most = limits.ranks
    if not fewest <= world_size <= most:
        reasons.append(f"serves {fewest} to {most} ranks, not {world_size}")
    tokens = spec.max_tokens_per_rank
    if tokens is not None and tokens > limits.tokens:
        reasons.append(f"max_tokens_per_rank is {tokens}, at most {limits.tokens}")
    num_experts = spec.num_local_experts * world_size
    if num_experts > MAX_EXPERTS:
        reasons.append(f"{num_experts} experts, at most {MAX_EXPERTS}")
    return reasons


def normal_window_bytes(spec: BufferSpec, max_tokens: int) -> int:
    """HCCL window that normal mode needs for `max_tokens` tokens of a rank."""
    row = align_up(2 * spec.hidden_size, _ROW_UNIT)
    received = align_up(align_up(2 * spec.hidden_size, _SCALE_UNIT) + _ROW_TAIL, _ROW_UNIT)
    return 2 * (max_tokens * spec.top_k * (row + received) + _NORMAL_EXTRA_MIB * _MIB)


def low_latency_window_bytes(spec: BufferSpec, world_size: int) -> int:
    """HCCL window that low latency needs for M tokens of a rank."""
    assert spec.max_tokens_per_rank is not None, "low latency has a limit"
    element = 1 if spec.dispatch_format.dtype is WireDtype.INT8 else 2
    received = align_up(align_up(spec.hidden_size * element, _SCALE_UNIT) + _ROW_TAIL, _ROW_UNIT)
    out = world_size * spec.num_local_experts * received
    home = align_up(2 * spec.hidden_size, _ROW_UNIT) * spec.top_k
    return 2 * spec.max_tokens_per_rank * (out + home)


def window_reasons(needed: int, environment: Mapping[str, str]) -> list[str]:
    """Why the HCCL window is too small, with the setting that is to be changed."""
    name = next((name for name in _WINDOW_VARIABLES if name in environment), _WINDOW_VARIABLES[1])
    size = int(environment.get(name, _DEFAULT_WINDOW_MIB))
    if needed <= size * _MIB:
        return []
    return [
        f"needs a window of {-(-needed // _MIB)} MiB, but {name} is {size}; set it to "
        f"{-(-needed // _MIB)} on all ranks"
    ]


def variable_reasons(spec: BufferSpec, environment: Mapping[str, str]) -> list[str]:
    """Variables that contradict what the caller asked for."""
    reasons = required_variable_reasons(environment)
    is_int8 = spec.dispatch_format.dtype is WireDtype.INT8
    if environment.get(_INT8_VARIABLE, "0") == "1" and not is_int8:
        reasons.append(
            f"{_INT8_VARIABLE} is 1, but rows were to travel as {spec.dispatch_format}; unset it"
        )
    return reasons


def required_variable_reasons(environment: Mapping[str, str]) -> list[str]:
    """Variables that contradict every caller."""
    return [
        f"{name} is {environment[name]}, expected {' or '.join(wanted)}; unset it"
        for name, wanted in _REQUIRED.items()
        if environment.get(name, wanted[0]) not in wanted
    ]
