"""`epcomm plan`: what would serve a layer, at which cost; no group and no GPU needed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epcomm.cli.model_file import read_model_file
from epcomm.cli.numbers import bytes_text
from epcomm.cli.one_line import BadInput
from epcomm.cli.plan_fused import fused_table
from epcomm.cli.plan_json import as_json
from epcomm.cli.plan_rebalance import Rebalance, rebalance_table
from epcomm.config import EPConfig, Mode
from epcomm.errors import BackendUnavailable, ConfigError, EPError, PlanRefused, shown
from epcomm.planning.plan import plan
from epcomm.planning.plans import EPPlan, PhasePlan
from epcomm.platforms.assumed import DEVICES, AssumedMachine, deep_ep_of
from epcomm.spec import HostLayout, MoESpec
from epcomm.types import MAX_RANKS, MAX_SIZE, WireDtype, is_size
from epcomm.weights.quantized import Fp8BlockWeights, Int8ChannelWeights
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights

T = TypeVar("T")

# The exit code where nothing serves a layer that could be.
REFUSED = 1

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}
# Of a matrix [H, I]: two such as float64, gate and up, have less than the 2**63 bytes of torch.
_MAX_ELEMENTS = 2**58
_QUANTIZED = {"fp8": Fp8BlockWeights, "int8": Int8ChannelWeights}


def plan_command(
    hidden_size: Annotated[int | None, typer.Option(help="H.")] = None,
    num_experts: Annotated[int | None, typer.Option(help="Of the model.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts of a token.")] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Of one expert; without it no runner is chosen.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or fp64.")] = None,
    experts: Annotated[
        str | None, typer.Option(help="fp8, int8, or unquantised: what --dtype is.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="That share the experts.")] = 8,
    hosts: Annotated[
        int | None,
        typer.Option(min=1, help="Hosts of the ranks, the same number of ranks on each."),
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="standard, normal, low_latency, auto or fuseep.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="auto, or one of the backends that `epcomm doctor` lists.")
    ] = None,
    runner: Annotated[str | None, typer.Option(help="auto or a registered name.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "--max-tokens-per-rank",
            help="Most tokens a rank dispatches in one call.",
        ),
    ] = None,
    max_recv_slots: Annotated[
        int | None, typer.Option(help="Most slots a rank receives in one call.")
    ] = None,
    replicated: Annotated[
        bool | None, typer.Option(help="Every rank passes the same tokens.")
    ] = None,
    measurements: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="auto chooses by this file of `epcomm bench`."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help=f"Plan for ranks that are not here: {', '.join(DEVICES)}."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="EPConfig fields, .toml, .json or .yaml."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The config.json of a model."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one object, docs/commands.md has its keys.")
    ] = False,
) -> None:
    """Print what would serve a layer, what would not and why, bytes and limits.

    An option wins over the file that says the same. Exit code 1: nothing serves the layer, or what
    was named does not. 2: bad input. Both in one line on stderr.
    """
    sizes = {
        "hidden_size": hidden_size,
        "num_experts": num_experts,
        "top_k": top_k,
        "intermediate_size": intermediate_size,
        "dtype": dtype,
    }
    fields = {
        "mode": mode,
        "backend": backend,
        "runner": runner,
        "max_tokens_per_rank": max_tokens,
        "max_recv_slots": max_recv_slots,
        "replicated": replicated,
        "measurements": measurements,
    }
    assumed: AssumedMachine | None = None
    try:
        layer = _layer_of(_given(sizes), experts, model)
        settings = EPConfig() if config is None else EPConfig.from_file(config)
        settings = replace(settings, **_given(fields))
        # The options and the file have the experts of the model, and a plan has all physical ones.
        num_physical = layer.spec.num_experts + (settings.redundant_experts or 0)
        spec = replace(layer.spec, num_experts=num_physical)
        assumed = _assumed(device, settings, hosts, ranks)
        layout = _layout(hosts, ranks) if assumed is None else None
        chosen = plan(
            settings, spec, world_size=ranks, weights=layer.weights, machine=assumed, hosts=layout
        )
        rebalance = Rebalance.of(settings, spec, ranks, layer.weights)
    except (PlanRefused, BackendUnavailable) as error:
        where = "" if assumed is None else f" (assumed: {assumed.describe(ranks)[0]})"
        sys.stderr.write(f"{error}{where}\n")
        raise typer.Exit(REFUSED) from None
    except EPError as error:
        raise BadInput(str(error)) from None
    if json:
        sys.stdout.write(as_json(chosen, spec, ranks, rebalance))
        return
    console = Console()
    _print_plan(console, chosen, spec, ranks, layer.model_type)
    if rebalance is not None:
        console.print(rebalance_table(rebalance))


@dataclass(frozen=True, kw_only=True)
class _LayerOptions:
    """The layer that options and a model file describe.

    weights: one expert without memory, to choose a runner by; None where its size is unknown.
    model_type: of the file; None without one.
    """

    spec: MoESpec
    weights: ExpertTensors | None
    model_type: str | None


def _layer_of(sizes: dict[str, Any], experts: str | None, model: Path | None) -> _LayerOptions:
    """Return the layer; `sizes` are those of the options, which win over the file."""
    shape = None if model is None else read_model_file(model, sizes)
    said = {} if shape is None else {name: value for name, value in vars(shape).items() if value}
    said |= sizes
    spec = MoESpec(
        **{name: _required(name, said) for name in ("hidden_size", "num_experts", "top_k")},
        dtype=_torch_dtype(said.get("dtype", "bf16")),
    )
    spec.check()
    return _LayerOptions(
        spec=spec,
        weights=_weights_of(spec, said.get("intermediate_size"), experts),
        model_type=None if shape is None else shape.model_type,
    )


def _given(fields: dict[str, T | None]) -> dict[str, T]:
    return {name: value for name, value in fields.items() if value is not None}


def _required(name: str, said: dict[str, Any]) -> int:
    if name not in said:
        raise ConfigError(
            f"epcomm plan: {name} is in neither an option nor a --model file; pass "
            f"--{name.replace('_', '-')}"
        )
    return said[name]


def _torch_dtype(name: str) -> torch.dtype:
    short = name.removeprefix("torch.")
    if short not in _DTYPES:
        raise ConfigError(f"epcomm plan: dtype is {shown(name)}, expected one of {sorted(_DTYPES)}")
    return _DTYPES[short]


def _layout(hosts: int | None, ranks: int) -> HostLayout | None:
    """Return `hosts` with as many ranks each, one host after another; None for one host."""
    if hosts is None:
        return None
    return HostLayout.of([rank // _ranks_per_host(hosts, ranks) for rank in range(ranks)])


def _assumed(
    device: str | None, config: EPConfig, hosts: int | None, ranks: int
) -> AssumedMachine | None:
    """Return the machines of a device, with the package that a backend needs if it is named."""
    if device is None:
        return None
    if device not in DEVICES:
        raise ConfigError(f"epcomm plan: --device is {device!r}, expected one of {[*DEVICES]}")
    machine = replace(DEVICES[device], deep_ep=deep_ep_of(config.backend))
    if hosts is None:
        return machine
    return replace(machine, ranks_per_host=_ranks_per_host(hosts, ranks))


def _ranks_per_host(hosts: int, ranks: int) -> int:
    if ranks % hosts:
        raise ConfigError(
            f"epcomm plan: --ranks is {ranks}, expected a multiple of --hosts {hosts}; correct one "
            "of them"
        )
    return ranks // hosts


def _weights_of(
    spec: MoESpec, intermediate_size: int | None, kind: str | None
) -> ExpertTensors | None:
    """Make one gated expert without memory, to choose a runner by; None if its size is unknown."""
    _check_kind(spec, kind)
    if intermediate_size is None:
        if kind is not None:
            raise ConfigError(
                f"epcomm plan: experts is {kind}, but their size is in neither an option nor a "
                "--model file; pass --intermediate-size"
            )
        return None
    if not is_size(intermediate_size):
        raise ConfigError(
            f"epcomm plan: intermediate_size is {shown(intermediate_size)}, expected 1 to "
            f"{MAX_SIZE}"
        )
    if spec.hidden_size * intermediate_size > _MAX_ELEMENTS:
        raise ConfigError(
            f"epcomm plan: an expert of hidden_size {spec.hidden_size} and intermediate_size "
            f"{intermediate_size} has larger matrices than torch can name; give smaller sizes"
        )
    gate_up = torch.empty(
        1, 2 * intermediate_size, spec.hidden_size, dtype=spec.dtype, device="meta"
    )
    down = torch.empty(1, spec.hidden_size, intermediate_size, dtype=spec.dtype, device="meta")
    plain = ExpertWeights(gate_up_proj=gate_up, down_proj=down)
    return _QUANTIZED[kind].from_unquantized(plain) if kind in _QUANTIZED else plain


def _check_kind(spec: MoESpec, kind: str | None) -> None:
    if kind is None or kind in _QUANTIZED or _DTYPES.get(kind) is spec.dtype:
        return
    own = WireDtype.from_torch(spec.dtype).value
    raise ConfigError(
        f"epcomm plan: experts is {shown(kind)}, expected {own}, as the hidden states are, or one "
        f"of {sorted(_QUANTIZED)}"
    )


def _print_plan(
    console: Console, chosen: EPPlan, spec: MoESpec, ranks: int, model_type: str | None
) -> None:
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
        console.print(fused_table(chosen.prefill))
    for name, phase in chosen.phases().items():
        console.print(_memory_table(name, phase))


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
        most = "no limit" if region.max_bytes is None else bytes_text(region.max_bytes)
        if region.bytes_per_token is None:
            table.add_row(region.name, "fixed", most)
        else:
            table.add_row(region.name, bytes_text(region.bytes_per_token), most)
    return table
