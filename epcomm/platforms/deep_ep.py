"""The packages that install as `deep_ep`: how to distinguish them, and their variables."""

import re
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path


class DeepEPKind(StrEnum):
    """The kind of a package that installs as `deep_ep`."""

    V1 = "V1"
    V2 = "V2"
    HYBRID = "Hybrid"
    ASCEND = "Ascend"
    # epcomm.integrations.deep_ep, which cannot be a backend of epcomm.
    DROP_IN = "epcomm's drop-in"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class InstalledDeepEP:
    """The package that `import deep_ep` would import.

    has_legacy_buffer: it defines the Buffer of V1.   is_stand_in: it is an imitation on the CPU.
    has_mega_moe: its fused_deep_moe(), on Ascend, has the mode MEGA_MOE.
    has_logfmt: its low_latency_combine() has the parameter use_logfmt.
    """

    kind: DeepEPKind
    has_legacy_buffer: bool
    is_stand_in: bool = False
    has_mega_moe: bool = False
    has_logfmt: bool = False


@dataclass(frozen=True, kw_only=True)
class Variable:
    """An environment variable that a communication package reads or writes.

    value: its value, or None.   written: the value that the Buffer of deep_ep V1 writes, or None.
    advice: what to do; may be empty.
    """

    name: str
    value: str | None
    written: str | None
    advice: str = ""


# Variables that the Buffer of V1 sets in the process, for all users of NVSHMEM, if ranks are on
# several hosts or low_latency_mode is on.
# Source: deepseek-ai/DeepEP, deep_ep/buffers/legacy.py, Buffer.__init__.
_V1_WRITES: Mapping[str, str] = {
    "NVSHMEM_DISABLE_P2P": "0; 1 with allow_nvlink_for_low_latency_mode=False",
    "NVSHMEM_IB_ENABLE_IBGDA": "1",
    "NVSHMEM_IBGDA_NUM_RC_PER_PE": "num_qps_per_rank, 24 by default",
    "NVSHMEM_QP_DEPTH": "1024, unless it is set",
    "NVSHMEM_MAX_TEAMS": "7",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_CUMEM_GRANULARITY": "536870912",
    "NVSHMEM_DISABLE_MNNVL": "1, unless allow_mnnvl=True",
}
# Entries of a queue. Source: deep_ep asserts NVSHMEM_QP_DEPTH >= 2 (M + 1) in low latency.
_QUEUE_DEPTH, _DEFAULT_QUEUE_DEPTH = "NVSHMEM_QP_DEPTH", "1024"

# Names that a line defines, of a class or function, or of a constant; and a parameter.
_NAMES = re.compile(
    r"^ *(?:(?:class|def|async def) +(\w+)|([A-Z_]+) *=)|\b(use_logfmt) *:", re.MULTILINE
)

# Who reads variables with each prefix, and the remedy.
_READERS: Mapping[str, str] = {
    "NVSHMEM_": "every user of NVSHMEM in the process reads it",
    "EP_": "deep_ep V2 reads such names; set the same value on all ranks",
    "DEEP_": "the deep_ep for Ascend reads such names, which may change numbers or layouts; "
    "unset it",
    "DEEPEP_": "the deep_ep for Ascend reads such names for its sizes; set the same value on "
    "all ranks",
}


def find_deep_ep() -> InstalledDeepEP | None:
    """Return the installed deep_ep, or None. Local; imports nothing."""
    try:
        found = find_spec("deep_ep")
    except ValueError:
        # A module in sys.modules without a spec.
        return None
    locations = found.submodule_search_locations if found is not None else None
    return deep_ep_in(Path(next(iter(locations)))) if locations else None


def deep_ep_in(folder: Path) -> InstalledDeepEP:
    """Return the deep_ep package in `folder`. Local; imports nothing.

    The classes and functions in its sources determine its kind. V2, the Hybrid branch and the
    package for Ascend also have the Buffer of V1.
    """
    sources = (path.read_text("utf-8", errors="replace") for path in folder.rglob("*.py"))
    names = {name for source in sources for found in _NAMES.findall(source) for name in found}
    return InstalledDeepEP(
        kind=_kind_of(names),
        has_legacy_buffer="Buffer" in names,
        is_stand_in=runs_on_cpu_ranks(),
        has_mega_moe="MEGA_MOE" in names,
        has_logfmt="use_logfmt" in names,
    )


def runs_on_cpu_ranks() -> bool:
    """Return whether fakes.deep_ep replaces the package."""
    return bool(getattr(sys.modules.get("deep_ep"), "CPU_RANKS", False))


def _kind_of(names: Set[str]) -> DeepEPKind:
    if "is_epcomm_drop_in" in names:
        return DeepEPKind.DROP_IN
    if "fused_deep_moe" in names:
        return DeepEPKind.ASCEND
    if "HybridEPBuffer" in names:
        return DeepEPKind.HYBRID
    if "ElasticBuffer" in names:
        return DeepEPKind.V2
    return DeepEPKind.V1 if "Buffer" in names else DeepEPKind.UNKNOWN


def communication_variables(variables: Mapping[str, str]) -> tuple[Variable, ...]:
    """List the variables that deep_ep V1 writes, and those that are set for a known reader."""
    listed = sorted(name for name in variables if _advice_for(name) and name not in _V1_WRITES)
    return tuple(
        Variable(
            name=name,
            value=variables.get(name),
            written=_V1_WRITES.get(name),
            advice=_advice_for(name) if name in variables else "",
        )
        for name in [*_V1_WRITES, *listed]
    )


def queue_reasons(max_tokens: int, variables: Mapping[str, str]) -> tuple[str, ...]:
    """List why low latency of V1 cannot have `max_tokens` tokens per rank with these variables."""
    depth = variables.get(_QUEUE_DEPTH, _DEFAULT_QUEUE_DEPTH)
    if not depth.isdecimal():
        return (f"{_QUEUE_DEPTH} is {depth!r}, expected a number; correct it or unset it",)
    most = int(depth) // 2 - 1
    if max_tokens <= most:
        return ()
    return (f"max_tokens_per_rank is {max_tokens}, at most {most} with {_QUEUE_DEPTH} = {depth}",)


def _advice_for(name: str) -> str:
    if name == _QUEUE_DEPTH:
        return "deep_ep V1 keeps it; it limits max_tokens_per_rank to half of it minus 1"
    if name in _V1_WRITES:
        return "deep_ep V1 overwrites it for all users of NVSHMEM in the process"
    return next((text for prefix, text in _READERS.items() if name.startswith(prefix)), "")
