"""Check that an installed package has the parameters that an adapter passes by name."""

import inspect
from collections.abc import Callable, Mapping, Sequence


def has_parameter(function: Callable[..., object], name: str) -> bool:
    """Return whether a function of an installed package has a parameter `name`."""
    try:
        return name in inspect.signature(function).parameters
    except ValueError:
        # A pybind11 function has its signature only in its docstring.
        return f" {name}:" in (function.__doc__ or "")


def signature_reasons(owner: type, calls: Mapping[str, Sequence[str]]) -> list[str]:
    """List the parameters that methods of a class lack, and required ones that are not passed.

    calls: the keyword arguments passed to each method of the class.

    `**kwargs` does not count, because it accepts parameters that the method ignores.
    """
    reasons = []
    for method, names in calls.items():
        where = owner.__name__ if method == "__init__" else f"{owner.__name__}.{method}"
        function = getattr(owner, method, None)
        if function is None:
            reasons.append(f"the installed package has no {where}; install another release")
            continue
        _self, *parameters = inspect.signature(function).parameters.values()
        known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        wanted = {p.name for p in parameters if p.default is p.empty and p.kind not in variadic}
        faults = [f"has no parameter {name}" for name in names if name not in known]
        faults += [f"requires {name}, which is not passed" for name in sorted(wanted - set(names))]
        reasons += [
            f"{where} of the installed package {fault}; install another release" for fault in faults
        ]
    return reasons
