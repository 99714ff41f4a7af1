"""Return whether an installed package has the parameters that an adapter passes by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence


def has_parameter(function: Callable[..., object], name: str) -> bool:
    """Return whether a function of an installed package has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except ValueError:
        # A function of pybind11 has its signature in its docstring alone.
        return f" {name}:" in (function.__doc__ or "")


def signature_reasons(owner: type, calls: Mapping[str, Sequence[str]]) -> list[str]:
    """List what the methods of a class lack, or want beyond what is passed.

    Args:
        owner: the class whose methods are called.
        calls: the names passed to each method, all of them by name.

    `**kwargs` proves nothing: it takes a parameter that nobody reads.
    """
    reasons = []
    for method, names in calls.items():
        where = owner.__name__ if method == "__init__" else f"{owner.__name__}.{method}"
        function = getattr(owner, method, None)
        if function is None:
            reasons.append(f"the package installed has no {where}; install another release")
            continue
        _self, *parameters = inspect.signature(function).parameters.values()
        known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        wanted = {p.name for p in parameters if p.default is p.empty and p.kind not in variadic}
        reasons += [
            f"{where} of the package installed has no parameter {name}; install another release"
            for name in names
            if name not in known
        ]
        reasons += [
            f"{where} of the package installed wants {name}, which is not passed; install another "
            "release"
            for name in sorted(wanted - set(names))
        ]
    return reasons
