"""The load of the experts of all layers, by windows of time: a record, and a file of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from epcomm.errors import ConfigError
from epcomm.types import is_size

_FORMAT = "epcomm expert load 1"


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """The tokens that chose each logical expert, of all ranks together.

    num_ranks: W, the ranks whose loads were added up.
    windows_by_layer: for each layer by name, E counts for each window, the oldest first.
    """

    num_ranks: int
    windows_by_layer: Mapping[str, tuple[tuple[int, ...], ...]]

    def total(self, layer: str) -> tuple[int, ...]:
        """Return E counts, summed over the windows of a layer; empty before a window has ended."""
        return tuple(sum(counts) for counts in zip(*self.windows_by_layer[layer], strict=True))

    def as_json(self) -> str:
        """Return one object, which from_json() reads."""
        values = {
            "format": _FORMAT,
            "ranks": self.num_ranks,
            "layers": {name: list(map(list, w)) for name, w in self.windows_by_layer.items()},
        }
        return json.dumps(values) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "text") -> ExpertLoad:
        """Read what as_json() wrote.

        Args:
            text: the whole file.
            source: the name of the file, for messages.

        Raises:
            ConfigError: the text is not JSON, or has another format.
        """
        try:
            values = json.loads(text)
            is_load = values["format"] == _FORMAT and is_size(values["ranks"])
            windows = {name: tuple(map(tuple, rows)) for name, rows in values["layers"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_load, values, windows = False, {}, {}
        if not is_load or not all(map(_are_counts, windows.values())):
            raise ConfigError(
                f"ExpertLoad.from_json: {source} is not the load of experts, expected what "
                "ExpertLoad.as_json() returned; name another file"
            )
        return cls(num_ranks=values["ranks"], windows_by_layer=windows)

    @classmethod
    def from_file(cls, path: Path) -> ExpertLoad:
        """Read a file.

        Raises:
            ConfigError: the file cannot be read, or has another format.
        """
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(
                f"ExpertLoad.from_file: {path} cannot be read ({why}); name another file"
            ) from None
        return cls.from_json(text, source=path.name)


def _are_counts(windows: tuple[tuple[object, ...], ...]) -> bool:
    """Return whether the windows of a layer have counts, each as many as the others."""
    are_counts = all(type(each) is int and each >= 0 for row in windows for each in row)
    return are_counts and len({len(row) for row in windows}) <= 1
