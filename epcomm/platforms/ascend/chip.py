"""Tell which Ascend chip this process runs on; nothing is imported to find out."""

from __future__ import annotations

import sys
from enum import StrEnum
from types import MappingProxyType


class Soc(StrEnum):
    """A chip, by the short name of its server generation."""

    # Ascend910B
    A2 = "A2"
    # Ascend910_93
    A3 = "A3"
    # Ascend950
    A5 = "A5"


# How the names of devices begin, which the runtime gives in either case.
DEVICE_NAMES = MappingProxyType({Soc.A2: "Ascend910B", Soc.A3: "Ascend910_93", Soc.A5: "Ascend950"})


def soc_of(device_name: str) -> Soc | None:
    """Return the chip of a device such as `Ascend910_9392`, or None of another kind."""
    lowered = device_name.lower()
    return next(
        (soc for soc, name in DEVICE_NAMES.items() if lowered.startswith(name.lower())), None
    )


def device_name() -> str | None:
    """Return the device of this process, as torch_npu names it; None where there is none.

    Local; torch_npu is asked only if somebody has imported it, and then starts its device.
    """
    stand_in = getattr(sys.modules.get("deep_ep"), "cpu_device_name", None)
    if stand_in is not None:
        return stand_in()
    npu = getattr(sys.modules.get("torch_npu"), "npu", None)
    return npu.get_device_name() if npu is not None and npu.is_available() else None


def is_torch_npu_imported() -> bool:
    """Return whether torch_npu is imported; that loads the toolkit, so it is the caller's to do."""
    return "torch_npu" in sys.modules


def current_soc() -> Soc | None:
    """Return the chip of this process; None where it is unknown, as in a plan made elsewhere."""
    name = device_name()
    return None if name is None else soc_of(name)
