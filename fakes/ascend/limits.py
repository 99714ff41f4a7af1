"""Select the chip of a call, and check its limits.

Rules of use hold at any size. Limits of sizes can be lifted, for suites with small tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from epcomm.platforms.ascend.chip import DEVICE_NAMES, Soc


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that the operators run on.

    soc: the chip.
    size_limits: limits of sizes apply.
    """

    soc: Soc
    size_limits: bool


_MACHINE: ContextVar[Machine] = ContextVar("machine")


@contextmanager
def soc(name: str, *, size_limits: bool = True) -> Iterator[Machine]:
    """Make operators behave as on this chip within the context; the innermost context is used.

    Args:
        name: A2, A3 or A5.
        size_limits: False lifts limits of sizes, but no other rule.

    Raises:
        ValueError: no such chip.
    """
    if name not in list(Soc):
        raise ValueError(f"soc: name is {name!r}, expected one of {', '.join(Soc)}")
    machine = Machine(soc=Soc(name), size_limits=size_limits)
    token = _MACHINE.set(machine)
    try:
        yield machine
    finally:
        _MACHINE.reset(token)


def current_machine() -> Machine:
    """Return the machine of the innermost `soc()`.

    Raises:
        RuntimeError: no soc() is open in this thread, and there is no default chip.
    """
    machine = _MACHINE.get(None)
    if machine is None:
        raise RuntimeError(
            "current_machine: no chip is chosen in this thread, expected one of "
            f"{', '.join(Soc)}; call inside `with soc(...)`"
        )
    return machine


def device_name() -> str | None:
    """Return torch_npu's name of the device of these ranks; None if no chip is selected."""
    machine = _MACHINE.get(None)
    return None if machine is None else DEVICE_NAMES[machine.soc]


def require(operator: str, condition: bool, rule: str) -> None:
    """Require what holds at any size; rule: the expected and the actual value.

    Raises:
        RuntimeError: as the host code of an operator reports a parameter.
    """
    if not condition:
        raise RuntimeError(f"{operator} (stand-in of torch_npu): {rule}")


def require_size(operator: str, condition: bool, rule: str) -> None:
    """Require a limit that soc(size_limits=False) lifts."""
    if current_machine().size_limits:
        require(operator, condition, rule)


def require_soc(operator: str, feature: str, *allowed: Soc) -> None:
    """Require a chip that has the feature of an operator."""
    machine = current_machine()
    rule = f"{feature} runs on {' and '.join(allowed)}, this is {machine.soc}"
    require(operator, machine.soc in allowed, rule)


def require_modelled(operator: str, condition: bool, feature: str) -> None:
    """Require that a call does without a feature that the imitation lacks.

    Raises:
        NotImplementedError: the feature is used.
    """
    if not condition:
        raise NotImplementedError(f"{operator} (stand-in of torch_npu): {feature} is not modelled")
