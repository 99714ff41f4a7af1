"""Refuse what the drop-in does not have, and say what to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def refuse_missing(function: str, advice: dict[str, tuple[bool, str]]) -> None:
    """Raise if a call asks for something that is not there.

    advice: argument -> whether the call asks for it, and what to use.

    Raises:
        NotImplementedError: it does; names the argument and what to use.
    """
    for argument, (is_asked, use) in advice.items():
        if is_asked:
            raise NotImplementedError(
                f"{function}: {argument} is not there in epcomm.integrations.deep_ep; {use}"
            )


def absent_names(module: str, use: str) -> Callable[[str], NoReturn]:
    """Return the __getattr__ of a module whose names are not there; use: what to do instead.

    Importing such a name raises ImportError, which programs with an alternative expect.
    """

    def refuse(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{module}: {name} is not there in epcomm.integrations.deep_ep; {use}")

    return refuse
