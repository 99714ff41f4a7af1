"""The tables of `epcomm plan`."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epcomm.cli.plan_rebalance import Rebalance
from epcomm.config import Mode
from epcomm.fuseep.ascend import AscendFused
from epcomm.planning.plans import EPPlan, PhasePlan
from epcomm.platforms.ascend.limits import Limits
from epcomm.registry import FUSED, class_names, fused_class
from epcomm.spec import MoESpec
from epcomm.types import WireDtype

_NO_LIMIT = "no limit"


def print_plan(
    chosen: EPPlan,
    spec: MoESpec,
    ranks: int,
    *,
    model_type: str | None,
    rebalance: Rebalance | None,
) -> None:
    """Print a plan. spec: of the physical experts.   model_type: of the --model file."""
    console = Console()
    lines = [
        f"{spec.num_experts} experts on {ranks} {'rank' if ranks == 1 else 'ranks'}, "
        f"{spec.num_experts // ranks} each; hidden size {spec.hidden_size}, top {spec.top_k}, "
        f"{WireDtype.from_torch(spec.dtype).value}"
    ]
    if model_type is not None:
        lines.append(f"model: {model_type}")
    lines += [f"assumed: {fact}" for fact in chosen.assumed]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    console.print(_choice_table(chosen))
    lines = [] if chosen.decode_lacks is None else [f"no decode: {chosen.decode_lacks}"]
    lines.append(_who_computes(chosen))
    console.print("\n".join(lines), markup=False, highlight=False)
    console.print(_rejection_table(chosen))
    if chosen.prefill.mode is Mode.FUSEEP:
        console.print(_fused_table(chosen.prefill))
    for name, phase in chosen.phases().items():
        console.print(_memory_table(name, phase))
    if rebalance is not None:
        console.print(_rebalance_table(rebalance))


def _who_computes(chosen: EPPlan) -> str:
    if chosen.prefill.mode is Mode.FUSEEP:
        return f"no runner: {chosen.prefill.backend} computes the experts itself"
    if chosen.runner is None:
        return "no runner chosen: the size of the experts is unknown; pass --intermediate-size"
    return f"runner: {chosen.runner}"


def _choice_table(chosen: EPPlan) -> Table:
    table = Table("chosen", *(name or "all phases" for name in chosen.phases()))
    rows = [_choice(phase) for phase in chosen.phases().values()]
    for label in dict.fromkeys(label for row in rows for label in row):
        table.add_row(label, *(row.get(label, "") for row in rows))
    return table


def _choice(phase: PhasePlan) -> dict[str, str]:
    spec, caps, per_token = phase.buffer_spec, phase.caps, phase.max_bytes_per_token()
    row = {
        "mode": phase.mode.value,
        "backend": phase.backend,
        "chosen by": phase.chosen_by,
        "buffer": phase.buffer,
        "wire format of dispatch": str(spec.dispatch_format),
        **phase.unusual(),
        "wire format of combine and backward": str(spec.hidden_format),
        "router weights by": phase.weights_applied_by.value,
        "gradients": "yes" if caps.trainable else "no",
        "graph capture": "yes" if phase.is_capturable else "no",
        "host syncs a dispatch": str(caps.host_syncs),
        "bytes a token, dispatch": bytes_text(per_token["dispatch"]),
        "bytes a token, combine": bytes_text(per_token["combine"]),
        "headers a dispatch": bytes_text(phase.header_bytes()),
    }
    between = phase.max_bytes_between_hosts()
    if between is not None:
        row["bytes a token, between hosts"] = bytes_text(between)
    if caps.trainable:
        backward = phase.max_bytes_per_token(backward=True)
        row["backward a token, dispatch"] = bytes_text(backward["dispatch"])
        row["backward a token, combine"] = bytes_text(backward["combine"])
    return {**row, **{f"limit: {name}": limit for name, limit in phase.limits().items()}}


def _rejection_table(chosen: EPPlan) -> Table:
    table = Table("rejected", "for", "why")
    for name, phase in chosen.phases().items():
        for rejection in phase.rejected:
            reasons = escape("\n".join(rejection.reasons))
            table.add_row(rejection.name, name or "all phases", reasons)
    for rejection in chosen.rejected_runners:
        table.add_row(rejection.name, "runner", escape("\n".join(rejection.reasons)))
    return table


def _memory_table(name: str, phase: PhasePlan) -> Table:
    table = Table()
    table.add_column("memory of a call" + (name and f", {name}"), no_wrap=True)
    table.add_column("a token, all ranks", justify="right")
    table.add_column("a rank, at most", justify="right")
    for region in phase.regions():
        most = _NO_LIMIT if region.max_bytes is None else bytes_text(region.max_bytes)
        if region.bytes_per_token is None:
            table.add_row(region.name, "fixed", most)
        else:
            table.add_row(region.name, bytes_text(region.bytes_per_token), most)
    return table


def _rebalance_table(rebalance: Rebalance) -> Table:
    """Return the memory of a rank in addition to the experts of the model."""
    table = Table()
    table.add_column("memory of placed experts", no_wrap=True)
    table.add_column("a rank, at most", justify="right")
    rows = {
        "redundant experts": rebalance.redundant_bytes,
        "a rebalance, on the device": rebalance.device_bytes,
        "a rebalance, on the host": rebalance.host_bytes,
    }
    for name, number in rows.items():
        table.add_row(name, "pass --intermediate-size" if number is None else bytes_text(number))
    return table


def _fused_table(phase: PhasePlan) -> Table:
    """Return a column for every operator, also if it was rejected: many plan on another machine.

    The HCCL window and the packed experts, which do not replace those of the checkpoint, are of one
    rank.
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
        "chip": f"{operator.soc.value}{', deprecated' if operator.deprecated else ''}",
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


def bytes_text(number: int) -> str:
    """Write bytes exactly, and from 1 MiB on also in MiB."""
    return f"{number:,} B" + (f" ({number / 2**20:,.1f} MiB)" if number >= 2**20 else "")
