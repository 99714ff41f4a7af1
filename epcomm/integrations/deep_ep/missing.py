"""Refuse what the drop-in does not have, and say what to use."""

from __future__ import annotations

from epcomm.errors import ConfigError


class MissingArgumentError(ConfigError, NotImplementedError):
    """A call asks for an argument of deep_ep that the drop-in does not have."""


def missing_error(
    function: str, advice: dict[str, tuple[bool, str]], where: str = ""
) -> MissingArgumentError | None:
    """Return the error of a call that asks for an argument that is not there, or None.

    advice: argument -> whether the call asks for it, and what to use.   where: this rank.
    """
    for argument, (is_asked, use) in advice.items():
        if is_asked:
            return MissingArgumentError(
                f"{function}: {argument} is not there in epcomm.integrations.deep_ep"
                f"{where and f' ({where})'}; {use}"
            )
    return None


def refuse_missing(function: str, advice: dict[str, tuple[bool, str]]) -> None:
    """Raise what missing_error() returns.

    Raises:
        NotImplementedError: names the argument and what to use.
    """
    error = missing_error(function, advice)
    if error is not None:
        raise error
