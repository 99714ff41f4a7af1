"""Convert fields and guarantees in docstrings to Markdown lists, for the API reference.

The docstring of a record has lines `name: meaning`, and that of a function has a line
`Collective: yes.   Host sync: none.`. Markdown would join these lines to one paragraph. mkdocs.yml
loads this file as an extension of griffe, which reads the docstrings.
"""

import re
from typing import Any

from griffe import Extension, Object

from scripts.docstring_fields import BETWEEN, split_fields

_GUARANTEE = re.compile(r"(?:Collective|Host sync|Lifetime|Local|Deterministic)\b.*")
_SECTIONS = ("Args:", "Returns:", "Yields:", "Raises:")


def as_markdown(docstring: str, *, has_fields: bool) -> str:
    """Return a docstring with its fields as list items, and one line for each guarantee.

    Empty lines surround each section, because griffe would otherwise read it as text.
    """
    if has_fields:
        parts = split_fields(docstring)
        items = [f"- `{name}`: {meaning}" for name, meaning in parts.fields.items()]
        docstring = "\n".join([parts.text.rstrip(), "", *items]) if items else docstring
    lines: list[str] = []
    for line in docstring.splitlines():
        was_section = bool(lines) and lines[-1].startswith("    ")
        if line in _SECTIONS or (was_section and not line.startswith(" ")):
            lines.append("")
        if _GUARANTEE.fullmatch(line):
            # Two spaces at the end of a line are a line break.
            lines += ["", *(f"{part.rstrip()}  " for part in BETWEEN.split(line))]
        else:
            lines.append(line)
    return "\n".join(lines)


class Lists(Extension):
    """Converts the docstrings that griffe has read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:  # noqa: ANN401  (griffe's signature)
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = as_markdown(obj.docstring.value, has_fields=obj.is_class)
