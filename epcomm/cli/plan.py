"""`epcomm plan`: what would serve a layer, at which cost; no group and no GPU needed."""

import json
import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer import Option

from epcomm.cli.model_file import read_model_file
from epcomm.cli.one_line import BadInput
from epcomm.cli.plan_output import record_of, text_of
from epcomm.cli.records import takes_records
from epcomm.config import EPConfig
from epcomm.errors import BackendUnavailable, ConfigError, EPError, PlanRefused, shown
from epcomm.planning.plan import plan
from epcomm.platforms.assumed import DEEP_EP_OF_BACKEND, DEVICES, AssumedMachine
from epcomm.spec import HostLayout, MoESpec
from epcomm.types import MAX_RANKS, MAX_SIZE, UNQUANTIZED_DTYPES, WireDtype, is_size
from epcomm.weights.quantized import QUANTIZED_KINDS
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights

# The exit code if no backend serves a valid layer.
REFUSED = 1

# The dtypes by their names in epcomm, such as bf16, and in torch.
_DTYPES = {
    name: each.torch_dtype
    for each in WireDtype
    if each in UNQUANTIZED_DTYPES
    for name in (each.value, str(each.torch_dtype).removeprefix("torch."))
}
# Elements of a matrix [H, I]: gate and up as float64 are below 2**63 bytes, the limit of torch.
_MAX_ELEMENTS = 2**58


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """The layer; an option takes precedence over the --model file."""

    hidden_size: Annotated[int | None, Option(help="H.")] = None
    num_experts: Annotated[int | None, Option(help="Of the model.")] = None
    top_k: Annotated[int | None, Option(help="Experts of a token.")] = None
    intermediate_size: Annotated[
        int | None, Option(help="Of one expert; without it no runner is chosen.")
    ] = None
    dtype: Annotated[str | None, Option(help="bf16, fp16, fp32 or fp64.")] = None
    experts: Annotated[
        str | None, Option(help=f"{', '.join(QUANTIZED_KINDS)}, or unquantised: what --dtype is.")
    ] = None
    model: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The config.json of a model.")
    ] = None

    def sizes(self) -> dict[str, Any]:
        """Return the options that a model file may have too."""
        return _given(self, "hidden_size", "num_experts", "top_k", "intermediate_size", "dtype")


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The ranks, and the machines that run them."""

    ranks: Annotated[int, Option(min=1, max=MAX_RANKS, help="That share the experts.")] = 8
    hosts: Annotated[
        int | None, Option(min=1, help="Hosts of the ranks, the same number of ranks on each.")
    ] = None
    device: Annotated[
        str | None, typer.Option(help=f"Plan for ranks that are not here: {', '.join(DEVICES)}.")
    ] = None

    def assumed(self, config: EPConfig) -> AssumedMachine | None:
        """Return the machines of --device, with the package that a backend needs if it is named."""
        if self.device is None:
            return None
        if self.device not in DEVICES:
            raise ConfigError(
                f"epcomm plan: --device is {self.device!r}, expected one of {[*DEVICES]}"
            )
        machine = replace(DEVICES[self.device], deep_ep=DEEP_EP_OF_BACKEND.get(config.backend))
        if self.hosts is None:
            return machine
        return replace(machine, ranks_per_host=self._ranks_per_host(self.hosts))

    def layout(self) -> HostLayout | None:
        """Return hosts of machines like this one, one after another; None for one host."""
        if self.hosts is None or self.device is not None:
            return None
        per_host = self._ranks_per_host(self.hosts)
        return HostLayout.of([rank // per_host for rank in range(self.ranks)])

    def _ranks_per_host(self, hosts: int) -> int:
        if self.ranks % hosts:
            raise ConfigError(
                f"epcomm plan: --ranks is {self.ranks}, expected a multiple of --hosts {hosts}; "
                "correct one of them"
            )
        return self.ranks // hosts


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """The fields of EPConfig; an option takes precedence over the --config file."""

    mode: Annotated[str | None, Option(help="standard, normal, low_latency, auto or fuseep.")] = (
        None
    )
    backend: Annotated[
        str | None, Option(help="auto, or one of the backends that `epcomm doctor` lists.")
    ] = None
    runner: Annotated[str | None, Option(help="auto or a registered name.")] = None
    max_tokens_per_rank: Annotated[
        int | None,
        Option(
            "--max-tokens",
            "--max-tokens-per-rank",
            help="Most tokens a rank dispatches in one call.",
        ),
    ] = None
    max_recv_slots: Annotated[
        int | None, Option(help="Most slots a rank receives in one call.")
    ] = None
    sum_groups: Annotated[
        int | None, Option(help="Groups of experts whose results are summed separately.")
    ] = None
    replicated: Annotated[bool | None, Option(help="Every rank passes the same tokens.")] = None
    measurements: Annotated[
        Path | None,
        Option(exists=True, dir_okay=False, help="auto chooses by this file of `epcomm bench`."),
    ] = None
    config: Annotated[
        Path | None,
        Option(exists=True, dir_okay=False, help="EPConfig fields, .toml, .json or .yaml."),
    ] = None

    def read(self) -> EPConfig:
        settings = EPConfig() if self.config is None else EPConfig.from_file(self.config)
        names = [field.name for field in fields(self) if field.name != "config"]
        return replace(settings, **_given(self, *names))


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How a plan is printed."""

    json: Annotated[
        bool, Option("--json", help="Print one object, docs/commands.md has its keys.")
    ] = False


@takes_records
def plan_command(
    layer: LayerOptions, ranks: RankOptions, config: ConfigOptions, output: OutputOptions
) -> None:
    """Print the backends that would serve a layer, the others with reasons, bytes and limits.

    An option takes precedence over a file. Exit code 1: no backend serves the layer, or the named
    one does not. 2: bad input. Both errors are reported in one line on stderr.
    """
    assumed: AssumedMachine | None = None
    try:
        in_file = {} if layer.model is None else read_model_file(layer.model, layer.sizes())
        model, weights = _layer_of(layer, in_file)
        settings = config.read()
        # The options and the file have the experts of the model, and a plan has all physical ones.
        spec = replace(model, num_experts=model.num_experts + (settings.redundant_experts or 0))
        assumed = ranks.assumed(settings)
        chosen = plan(
            settings,
            spec,
            world_size=ranks.ranks,
            weights=weights,
            machine=assumed,
            hosts=ranks.layout(),
        )
    except (PlanRefused, BackendUnavailable) as error:
        where = "" if assumed is None else f" (assumed: {assumed.describe(ranks.ranks)[0]})"
        sys.stderr.write(f"{error}{where}\n")
        raise typer.Exit(REFUSED) from None
    except EPError as error:
        raise BadInput(str(error)) from None
    record = record_of(chosen, settings, spec, weights)
    if output.json:
        sys.stdout.write(json.dumps(record, indent=1) + "\n")
    else:
        sys.stdout.write(text_of(chosen, record, in_file.get("model_type")))


def _layer_of(layer: LayerOptions, in_file: dict[str, Any]) -> tuple[MoESpec, ExpertTensors | None]:
    """Return the layer that options and a model file describe, and one expert without memory.

    The expert chooses the runner; None if its size is unknown.
    """
    said = in_file | layer.sizes()
    dtype = said.get("dtype", "bf16").removeprefix("torch.")
    if dtype not in _DTYPES:
        expected = sorted(_DTYPES)
        raise ConfigError(f"epcomm plan: dtype is {shown(dtype)}, expected one of {expected}")
    spec = MoESpec(
        **{name: _required(name, said) for name in ("hidden_size", "num_experts", "top_k")},
        dtype=_DTYPES[dtype],
    )
    spec.check()
    return spec, _weights_of(spec, said.get("intermediate_size"), layer.experts)


def _given(options: LayerOptions | ConfigOptions, *names: str) -> dict[str, Any]:
    found = {name: getattr(options, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _required(name: str, said: dict[str, Any]) -> int:
    if name not in said:
        raise ConfigError(
            f"epcomm plan: {name} is in neither an option nor a --model file; pass "
            f"--{name.replace('_', '-')}"
        )
    return said[name]


def _weights_of(spec: MoESpec, inner_size: int | None, kind: str | None) -> ExpertTensors | None:
    """Return one gated expert on the meta device; None if its size is unknown."""
    if kind is not None and kind not in QUANTIZED_KINDS and _DTYPES.get(kind) is not spec.dtype:
        own = WireDtype.from_torch(spec.dtype).value
        raise ConfigError(
            f"epcomm plan: experts is {shown(kind)}, expected {own}, as the hidden states are, or "
            f"one of {sorted(QUANTIZED_KINDS)}"
        )
    if inner_size is None:
        if kind is not None:
            raise ConfigError(
                f"epcomm plan: experts is {kind}, but their size is in neither an option nor a "
                "--model file; pass --intermediate-size"
            )
        return None
    if not is_size(inner_size):
        raise ConfigError(
            f"epcomm plan: intermediate_size is {shown(inner_size)}, expected 1 to {MAX_SIZE}"
        )
    if spec.hidden_size * inner_size > _MAX_ELEMENTS:
        raise ConfigError(
            f"epcomm plan: an expert of hidden_size {spec.hidden_size} and intermediate_size "
            f"{inner_size} has larger matrices than torch can name; give smaller sizes"
        )
    empty = partial(torch.empty, dtype=spec.dtype, device="meta")
    gate_up = empty(1, 2 * inner_size, spec.hidden_size)
    plain = ExpertWeights(gate_up_proj=gate_up, down_proj=empty(1, spec.hidden_size, inner_size))
    quantized = QUANTIZED_KINDS.get(kind or "")
    return plain if quantized is None else quantized.from_unquantized(plain)
