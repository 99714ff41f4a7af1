"""Refuse what the drop-in does not have, and say what to use."""

from __future__ import annotations


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
