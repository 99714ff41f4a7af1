"""Parse the fields in the docstring of a record, for tables and the API reference."""

import re
from dataclasses import dataclass

_FIELDS = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*): (.*)")
# The separator of several fields on one line.
BETWEEN = re.compile(r" {3,}(?=\w[\w ,]*[:.])")


@dataclass(frozen=True, kw_only=True)
class Documented:
    """A parsed docstring. fields: meanings by name; text: the rest."""

    text: str
    fields: dict[str, str]


def split_fields(docstring: str) -> Documented:
    """Return the fields of a docstring, and the other text."""
    text: list[str] = []
    fields: dict[str, str] = {}
    names: list[str] = []
    for line in docstring.splitlines():
        if line.startswith("    ") and names:
            for name in names:
                fields[name] += " " + line.strip()
            continue
        names = []
        for part in BETWEEN.split(line):
            found = _FIELDS.fullmatch(part.strip())
            if found is None:
                text.append(part)
                continue
            names = found[1].split(", ")
            fields |= dict.fromkeys(names, found[2])
    return Documented(text="\n".join(text), fields=fields)
