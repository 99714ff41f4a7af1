"""Record the load of experts over windows of time, on the device, and add it up over the ranks.

Routers count into tables, in device graphs too. A window ends without a host sync; only gather()
exchanges anything, and reads.
"""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from epcomm.calls.order import Calls
from epcomm.errors import ConfigError
from epcomm.types import is_size

# Number of rows of a table; a token may be counted in any of them. A line of a GPU's cache takes
# one addition a cycle, so one row would make thousands of tokens wait for one another.
_ROWS = 16
# Windows that are kept by default, such as an hour of minutes; 8 bytes for each expert and window.
_MAX_WINDOWS = 60
_FORMAT = "epcomm expert load 1"


def load_table(num_experts: int, device: torch.device) -> Tensor:
    """Return a table that routers count into, [N, E], int64, zeros: its rows add up to the load."""
    return torch.zeros(_ROWS, num_experts, dtype=torch.int64, device=device)


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
    def from_json(cls, text: str) -> Self:
        """Read what as_json() wrote.

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
                "ExpertLoad.from_json: the text is not the load of experts, expected what "
                "ExpertLoad.as_json() returned; read another file"
            )
        return cls(num_ranks=values["ranks"], windows_by_layer=windows)


class LoadRecorder:
    """Divides the counts of the layers of one rank into windows.

    The last `max_windows` windows are kept, the newest last.
    """

    def __init__(self, tables: Mapping[str, Tensor], *, max_windows: int = _MAX_WINDOWS) -> None:
        """Begin the first window.

        Args:
            tables: the load_table of each layer, by the layer's name, equal names on all ranks.
            max_windows: windows to keep.

        Raises:
            ConfigError: tables is empty, a value is not a table, or max_windows is below 1.
        """
        if not tables:
            raise ConfigError(
                "LoadRecorder: tables is empty, expected the load of a layer at least; set "
                "EPConfig(record_load=True)"
            )
        for name, table in tables.items():
            if not isinstance(table, Tensor) or table.dim() != 2 or table.dtype != torch.int64:
                raise ConfigError(
                    f"LoadRecorder: the table of {name!r} is {type(table).__name__}, expected an "
                    "int64 tensor [N, E]; make it by load_table()"
                )
        if max_windows < 1:
            raise ConfigError(f"LoadRecorder: max_windows is {max_windows}, expected at least 1")
        self._tables = dict(tables)
        self._windows: deque[Tensor] = deque(maxlen=max_windows)
        self._before = self._count()

    def end_window(self) -> None:
        """End a window, and begin the next one.

        Local.   Host sync: none.   On the stream of the layers' calls, not within a graph.
        """
        counts = self._count()
        self._windows.append(counts - self._before)
        self._before = counts

    def gather(self, calls: Calls) -> ExpertLoad:
        """Add up the windows of all ranks, without the current one.

        A token that all ranks have (EPConfig.replicated) is counted on each of them.

        Collective: yes, one comparison of sizes and one all-gather.
        Host sync: yes.
        Raises:
            ConfigError: layers or numbers of windows differ by rank, or a table was zeroed within a
                window; on every rank.
        """
        sizes = {name: table.shape[1] for name, table in self._tables.items()}
        layers = " ".join(f"{n}={e}" for n, e in sizes.items())
        calls.agree({"windows": len(self._windows), "layers": layers}, what="LoadRecorder.gather")
        loads: dict[str, tuple[tuple[int, ...], ...]] = dict.fromkeys(sizes, ())
        if self._windows:
            local = torch.stack(tuple(self._windows))
            counts = calls.collectives.all_gather(local, phase="LoadRecorder.gather")
            if counts.lt(0).any():
                raise ConfigError(
                    "LoadRecorder.gather: counts of a window are below 0, expected tables that "
                    "only grow; pass differences to update_expert_bias() instead of zeroing them"
                )
            total = counts.sum(0)
            for name, part in zip(sizes, total.split(list(sizes.values()), dim=1), strict=True):
                loads[name] = tuple(tuple(row) for row in part.tolist())
        return ExpertLoad(num_ranks=calls.world_size, windows_by_layer=loads)

    def _count(self) -> Tensor:
        """Return the counts so far, the layers one after another: [sum of E]."""
        return torch.cat([table.sum(0) for table in self._tables.values()])


def loads_of_ranks(
    load: Tensor, *, num_ranks: int, physical_to_logical: Tensor | None = None
) -> Tensor:
    """Return the load of each rank, [W], float64, from the load of each logical expert, [E].

    Args:
        load: [E], integers, on any device.
        num_ranks: W; rank r holds the P / W physical experts from r * P / W on.
        physical_to_logical: the logical expert of each of P, int64, on the same device; its copies
            share the load equally. None: each expert has one, in their order.

    Local.   Host sync: none.
    """
    per_copy = load.to(torch.float64)
    if physical_to_logical is not None:
        logical = physical_to_logical
        copies = torch.zeros_like(per_copy).index_add_(0, logical, per_copy.new_ones(len(logical)))
        per_copy = (per_copy / copies.clamp(min=1))[logical]
    return per_copy.view(num_ranks, -1).sum(1)


def _are_counts(windows: tuple[tuple[object, ...], ...]) -> bool:
    """Return whether the windows of a layer have counts, each as many as the others."""
    are_counts = all(type(each) is int and each >= 0 for row in windows for each in row)
    return are_counts and len({len(row) for row in windows}) <= 1
