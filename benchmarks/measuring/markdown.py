"""Write parts of the Markdown that tables of results share."""

from __future__ import annotations

from collections.abc import Mapping


def row(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def where_measured(hardware: Mapping[str, str | int]) -> str:
    """Name the accelerator, or the cores and the processor where there is none."""
    cores = f"{hardware['num_cores']} cores of {hardware['processor']}"
    return str(hardware.get("accelerator", cores))
