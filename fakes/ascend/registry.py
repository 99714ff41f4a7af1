"""Register torch.ops.npu without torch_npu: the vendor's schemas, for CPU tensors.

An operator's module writes `@implements("npu_swiglu")` above a function that has the parameters of
the schema. Nothing is registered when a module is imported; `register()` finds the modules of this
package and registers them.
"""

import functools
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch

NAMESPACE = "npu"
# The file has the schemas of a wheel whose version it names; `self` is named `input`, as in the
# registered operator.
SCHEMAS_FILE = Path(__file__).with_name("schemas.json")

Device = Literal["CPU", "Meta"]
_P = ParamSpec("_P")
_R = TypeVar("_R")

# The function of each (operator, device), registered when the modules of operators are imported.
_IMPLEMENTATIONS: dict[tuple[str, Device], Callable[..., Any]] = {}


def implements(operator: str, *devices: Device) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Mark a function as an operator's implementation, for `register()` to find.

    The dispatcher leaves out arguments that equal their default, so the function repeats the names,
    the order and the defaults of the schema; `register()` checks that it does.

    Args:
        operator: its name, with ".overload" where it has one, without "npu::".
        devices: whose tensors the function takes, by default the CPU's. On "Meta", tensors have no
            values, so the function returns only shapes and dtypes.
    """

    def mark(function: Callable[_P, _R]) -> Callable[_P, _R]:
        for device in devices or ("CPU",):
            key = (operator, device)
            assert key not in _IMPLEMENTATIONS, f"{operator} has two implementations for {device}"
            _IMPLEMENTATIONS[key] = function
        return function

    return mark


@functools.cache
def schemas() -> dict[str, str]:
    """Return the vendor's schema of each operator, with its overload."""
    return json.loads(SCHEMAS_FILE.read_text("utf-8"))["schemas"]


@functools.cache
def register() -> torch.library.Library:
    """Define and implement torch.ops.npu.*; further calls in the same process do nothing.

    An operator without an implementation is defined too, and calling it raises NotImplementedError,
    as with torch_npu. The definitions last as long as the process.

    Raises:
        RuntimeError: torch_npu is loaded, whose operators these would hide.
    """
    if "torch_npu" in sys.modules:
        raise RuntimeError(
            "register: torch_npu is loaded, expected a process without it; run the stand-in in a "
            "process of its own"
        )
    _import_operators()
    library = torch.library.Library(NAMESPACE, "DEF")
    for schema in schemas().values():
        library.define(schema)
    for (operator, device), function in _IMPLEMENTATIONS.items():
        _check_signature(operator, function)
        library.impl(operator, function, device)
    return library


def _import_operators() -> None:
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules([str(Path(__file__).with_name("operators"))]):
        importlib.import_module(f"{package}.operators.{module.name}")


def _check_signature(operator: str, function: Callable[..., Any]) -> None:
    assert operator in schemas(), f"{SCHEMAS_FILE.name} has no schema of {operator}"
    wanted = torch._C.parse_schema(schemas()[operator]).arguments
    found = list(inspect.signature(function).parameters.values())
    assert [parameter.name for parameter in found] == [argument.name for argument in wanted], (
        f"{operator}: parameters are {[parameter.name for parameter in found]}, the schema's are "
        f"{[argument.name for argument in wanted]}"
    )
    for parameter, argument in zip(found, wanted, strict=True):
        is_keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert is_keyword == argument.kwarg_only, f"{operator}: {parameter.name} by keyword or not"
        default = argument.default_value if argument.has_default_value() else parameter.empty
        same = list(parameter.default) == default if default == [] else parameter.default == default
        assert same, f"{operator}: {parameter.name} has {parameter.default}, the schema {default}"
