"""The output of `epcomm plan`: a record, whose keys docs/commands.md lists, and its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from epcomm.bench.machine import version_of
from epcomm.config import EPConfig, Mode
from epcomm.fuseep.ascend import AscendFused
from epcomm.placement.moving import MoveMemory
from epcomm.planning.plans import EPPlan, PhasePlan
from epcomm.platforms.ascend.limits import Limits
from epcomm.registry import FUSED, class_names, fused_class
from epcomm.spec import MoESpec
from epcomm.types import WireDtype
from epcomm.weights.unquantized import ExpertTensors

_NO_LIMIT = "no limit"
# Parts of the record of a phase that have separate tables.
_TABLES = ("memory", "rejected")


def record_of(
    chosen: EPPlan, config: EPConfig, spec: MoESpec, weights: ExpertTensors | None
) -> dict[str, object]:
    """Return the plan of a layer in plain values. spec: of the physical experts."""
    ranks = chosen.prefill.world_size
    return {
        "version": version_of("epcomm"),
        "layer": {
            "hidden_size": spec.hidden_size,
            "num_experts": spec.num_experts,
            "top_k": spec.top_k,
            "dtype": WireDtype.from_torch(spec.dtype).value,
            "ranks": ranks,
        },
        "assumed": list(chosen.assumed),
        "phases": {name or "all": _phase(phase) for name, phase in chosen.phases().items()},
        "decode_lacks": chosen.decode_lacks,
        "runner": chosen.runner,
        "rejected_runners": [asdict(each) for each in chosen.rejected_runners],
        "rebalance": _rebalance(config, spec, ranks, weights),
    }


def _phase(phase: PhasePlan) -> dict[str, object]:
    spec, caps = phase.buffer_spec, phase.caps
    return {
        "mode": phase.mode.value,
        "backend": phase.backend,
        "buffer": phase.buffer,
        "chosen_by": phase.chosen_by,
        "wire_of_dispatch": str(spec.dispatch_format),
        "wire_of_combine": str(spec.hidden_format),
        "unusual": dict(phase.unusual()),
        "weights_applied_by": phase.weights_applied_by.value,
        "has_gradients": caps.trainable,
        "is_capturable": phase.is_capturable,
        "host_syncs": caps.host_syncs,
        "bytes_per_token": dict(phase.max_bytes_per_token()),
        "backward_bytes_per_token": (
            dict(phase.max_bytes_per_token(backward=True)) if caps.trainable else None
        ),
        "header_bytes": phase.header_bytes(),
        "max_bytes_between_hosts": phase.max_bytes_between_hosts(),
        "limits": dict(phase.limits()),
        "memory": [
            {
                "region": region.name,
                "bytes_per_token": region.bytes_per_token,
                "max_bytes": region.max_bytes,
            }
            for region in phase.regions()
        ],
        "rejected": [asdict(each) for each in phase.rejected],
    }


def _rebalance(
    config: EPConfig, spec: MoESpec, num_ranks: int, weights: ExpertTensors | None
) -> dict[str, int | None] | None:
    """Return the bytes of redundant experts and of a move on one rank, without an optimizer.

    None where experts are not placed; null values where their size is unknown.
    """
    if config.redundant_experts is None:
        return None
    if weights is None:
        return dict.fromkeys(("redundant_bytes", "device_bytes", "host_bytes"))
    tensors = weights.tensors()
    memory = MoveMemory.of(tensors, num_physical=spec.num_experts, num_ranks=num_ranks)
    expert = sum(each[0].numel() * each.element_size() for each in tensors.values())
    redundant_bytes = config.redundant_experts * expert // num_ranks
    return {"redundant_bytes": redundant_bytes, **asdict(memory)}


def print_plan(chosen: EPPlan, record: Mapping[str, Any], model_type: str | None) -> None:
    """Print the tables of a plan.

    record: from record_of().   model_type: of the --model file.
    """
    console, layer = Console(), record["layer"]
    phases: Mapping[str, Mapping[str, Any]] = record["phases"]
    num_ranks, num_experts = layer["ranks"], layer["num_experts"]
    lines = [
        f"{num_experts} experts on {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}, "
        f"{num_experts // num_ranks} each; hidden size {layer['hidden_size']}, top "
        f"{layer['top_k']}, {layer['dtype']}",
        *([] if model_type is None else [f"model: {model_type}"]),
        *(f"assumed: {fact}" for fact in record["assumed"]),
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    console.print(_choice_table(phases))
    lines = [] if chosen.decode_lacks is None else [f"no decode: {chosen.decode_lacks}"]
    lines.append(_who_computes(chosen))
    console.print("\n".join(lines), markup=False, highlight=False)
    console.print(_rejection_table(record))
    if chosen.prefill.mode is Mode.FUSEEP:
        console.print(_fused_table(chosen.prefill))
    for name, phase in phases.items():
        console.print(_memory_table(name, phase["memory"]))
    memory = record["rebalance"]
    if memory is not None:
        rows = [
            ("redundant experts", memory["redundant_bytes"]),
            ("a rebalance, on the device", memory["device_bytes"]),
            ("a rebalance, on the host", memory["host_bytes"]),
        ]
        cells = [(name, _bytes_or(size, "pass --intermediate-size")) for name, size in rows]
        console.print(_sizes_table(("memory of placed experts", "a rank, at most"), cells))


def _who_computes(chosen: EPPlan) -> str:
    if chosen.prefill.mode is Mode.FUSEEP:
        return f"no runner: {chosen.prefill.backend} computes the experts itself"
    if chosen.runner is None:
        return "no runner chosen: the size of the experts is unknown; pass --intermediate-size"
    return f"runner: {chosen.runner}"


def _choice_table(phases: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("chosen", *phases)
    columns = [dict(_cells(phase)) for phase in phases.values()]
    for label in dict.fromkeys(label for column in columns for label in column):
        table.add_row(label, *(escape(column.get(label, "")) for column in columns))
    return table


def _cells(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the labels and texts of a record, without what is null."""
    for key, value in values.items():
        label = f"{prefix}{key.replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from _cells(value, f"{label}: ")
        elif isinstance(value, bool):
            yield label, "yes" if value else "no"
        elif isinstance(value, int) and "bytes" in label:
            yield label, bytes_text(value)
        elif value is not None and key not in _TABLES:
            yield label, str(value)


def _rejection_table(record: Mapping[str, Any]) -> Table:
    table = Table("rejected", "for", "why")
    rejected = {name: phase["rejected"] for name, phase in record["phases"].items()}
    for what, found in (rejected | {"runner": record["rejected_runners"]}).items():
        for each in found:
            table.add_row(each["name"], what, escape("\n".join(each["reasons"])))
    return table


def _memory_table(phase: str, regions: list[Mapping[str, Any]]) -> Table:
    rows = [
        (
            region["region"],
            _bytes_or(region["bytes_per_token"], "fixed"),
            _bytes_or(region["max_bytes"], _NO_LIMIT),
        )
        for region in regions
    ]
    return _sizes_table(
        (f"memory of a call, {phase}", "a token, all ranks", "a rank, at most"), rows
    )


def _sizes_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    name, *sizes = headings
    table = Table(Column(name, no_wrap=True), *(Column(each, justify="right") for each in sizes))
    for row in rows:
        table.add_row(*row)
    return table


def _bytes_or(number: int | None, otherwise: str) -> str:
    return otherwise if number is None else bytes_text(number)


def _fused_table(phase: PhasePlan) -> Table:
    """Return a column for every operator, also if it was rejected: many plan on another machine.

    The HCCL window and the packed experts, which do not replace those of the checkpoint, are of one
    rank.
    """
    table = Table("operator", *(Column(name, overflow="fold") for name in FUSED))
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
        "chip": f"{operator.soc.value}{', deprecated' if operator.deprecated else ''}",
        **_limits(operator.limits),
        "HCCL window": window,
        "packed experts": packed,
    }


def _limits(limits: Limits) -> dict[str, str]:
    most = {
        "rows a call": limits.max_tokens,
        "top k": limits.top_k,
        "experts": limits.experts,
        "experts of a rank": limits.local_experts,
    }
    ranges = {
        "hidden size": (limits.hidden, limits.hidden_multiple),
        "2 * intermediate size": (limits.gate_up_columns, limits.gate_up_multiple),
    }
    texts = {name: f"at most {limit}" if limit else _NO_LIMIT for name, limit in most.items()}
    for name, (bounds, unit) in ranges.items():
        texts[name] = f"{bounds[0]} to {bounds[1]} in steps of {unit}" if bounds else _NO_LIMIT
    return texts


def bytes_text(number: int) -> str:
    """Write bytes exactly, and from 1 MiB on also in MiB."""
    return f"{number:,} B" + (f" ({number / 2**20:,.1f} MiB)" if number >= 2**20 else "")
