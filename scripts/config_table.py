"""Write the fields of EPConfig between two markers of docs/reference/configuration.md.

    python -m scripts.config_table

The type and default are those of the class; the meaning comes from its docstring.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from epcomm.config import EPConfig, Mode, Router
from epcomm.types import (
    GRADIENT_DTYPES,
    ROW_DTYPES,
    SUM_DTYPES,
    Int8Profile,
    ScaleDtype,
    WireDtype,
)
from scripts.docstring_fields import split_fields

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "configuration.md"
_MARKED = re.compile(r"(?<=<!-- fields -->\n).*?(?=<!-- /fields -->)", re.DOTALL)
_VALUES: Mapping[str, Iterable[StrEnum]] = MappingProxyType(
    {
        "mode": Mode,
        "router": Router,
        "dispatch_dtype": [each for each in WireDtype if each in ROW_DTYPES],
        "combine_dtype": [
            each for each in WireDtype if each in SUM_DTYPES or each is WireDtype.LOGFMT10
        ],
        "backward_dtype": [each for each in WireDtype if each in GRADIENT_DTYPES],
        "dispatch_scales": ScaleDtype,
        "int8_profile": Int8Profile,
    }
)


def table() -> str:
    """Return a Markdown table with one row per field."""
    meanings = split_fields(inspect.getdoc(EPConfig) or "").fields
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in fields(EPConfig):
        cells = (
            f"`{field.name}`",
            _type(field.name, str(field.type)),
            f"`{_plain(field.default)}`",
        )
        lines.append(f"| {' | '.join(cells)} | {meanings[field.name]} |")
    return "\n".join([*lines, ""])


def fill(text: str) -> str:
    """Return the text of the page with the current table."""
    return _MARKED.sub(lambda _: table(), text)


def _type(name: str, annotation: str) -> str:
    """Return the values that a file may contain: those of an enum, or the name of a type."""
    if name not in _VALUES:
        return f"`{annotation}`".replace(" | ", "` or `")
    values = [f"`{member.value}`" for member in _VALUES[name]]
    return ", ".join([*values, *(["`None`"] if annotation.endswith("None") else [])])


def _plain(value: object) -> object:
    return value.value if isinstance(value, StrEnum) else value


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text("utf-8")), encoding="utf-8")
