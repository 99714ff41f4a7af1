"""Find the Ascend chip of this process, without imports."""

import sys
from enum import StrEnum


class Soc(StrEnum):
    """A chip, named after its server generation."""

    # Ascend910B
    A2 = "A2"
    # Ascend910_93
    A3 = "A3"
    # Ascend950
    A5 = "A5"


# Prefixes of device names, which the runtime reports in upper or lower case.
DEVICE_NAMES = {Soc.A2: "Ascend910B", Soc.A3: "Ascend910_93", Soc.A5: "Ascend950"}


def soc_of(device_name: str) -> Soc | None:
    """Return the chip of a device such as `Ascend910_9392`, or None."""
    given = device_name.lower()
    return next((soc for soc, name in DEVICE_NAMES.items() if given.startswith(name.lower())), None)


def device_name() -> str | None:
    """Return the name of the device of this process in torch_npu, or None.

    Local; if torch_npu is imported, it starts its device.
    """
    stand_in = getattr(sys.modules.get("deep_ep"), "cpu_device_name", None)
    if stand_in is not None:
        return stand_in()
    npu = getattr(sys.modules.get("torch_npu"), "npu", None)
    return npu.get_device_name() if npu is not None and npu.is_available() else None


def is_torch_npu_imported() -> bool:
    """Return whether torch_npu is imported. Users import it, because it loads the toolkit."""
    return "torch_npu" in sys.modules


def current_soc() -> Soc | None:
    """Return the chip of this process; None if unknown, as in a plan on another machine."""
    name = device_name()
    return None if name is None else soc_of(name)
