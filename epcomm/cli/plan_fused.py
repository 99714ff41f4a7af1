"""The fused operators in `epcomm plan`: what each takes, and what memory it wants."""

from __future__ import annotations

from rich.table import Table

from epcomm.cli.numbers import bytes_text
from epcomm.fuseep.ascend import AscendFused
from epcomm.planning.plans import PhasePlan
from epcomm.platforms.ascend.limits import Limits
from epcomm.registry import FUSED, class_names, fused_class

_NO_LIMIT = "no limit"


def fused_table(phase: PhasePlan) -> Table:
    """Tabulate every operator, also where it was rejected: many plan on another machine.

    The HCCL window and the packed experts, beside those of the checkpoint, are those of a rank.
    """
    table = Table("operator")
    for name in FUSED:
        table.add_column(name, overflow="fold")
    rows = [_properties(name, phase) for name in FUSED]
    for label in rows[0]:
        table.add_row(label, *(row.get(label, "none") for row in rows))
    return table


def _properties(name: str, phase: PhasePlan) -> dict[str, str]:
    operator = fused_class(class_names(name)[0])
    if not issubclass(operator, AscendFused):
        return {"chip": "any", **_limits(Limits())}
    spec, window, packed = phase.buffer_spec, "pass --max-tokens", "pass --max-tokens"
    if spec.max_tokens_per_rank is not None:
        regions = operator.region_bytes(spec, phase.world_size)
        *windows, packed = (bytes_text(region.max_bytes or 0) for region in regions)
        window = windows[0] if windows else "not documented"
    return {
        "chip": f"{operator.kind.soc.value}{', deprecated' if operator.deprecated else ''}",
        **_limits(operator.limits),
        "HCCL window": window,
        "packed experts": packed,
    }


def _limits(limits: Limits) -> dict[str, str]:
    return {
        "rows a call": _most(limits.max_tokens),
        "hidden size": _range(limits.hidden, limits.hidden_multiple),
        "2 * intermediate size": _range(limits.gate_up_columns, limits.gate_up_multiple),
        "top k": _most(limits.top_k),
        "experts": _most(limits.experts),
        "experts of a rank": _most(limits.local_experts),
    }


def _most(limit: int | None) -> str:
    return _NO_LIMIT if limit is None else f"at most {limit}"


def _range(bounds: tuple[int, int] | None, unit: int) -> str:
    if bounds is None:
        return _NO_LIMIT
    return f"{bounds[0]} to {bounds[1]} in steps of {unit}"
