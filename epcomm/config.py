"""Define the choices of a user; this module alone reads the environment."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from epcomm.errors import ConfigError, describe_kind, shown
from epcomm.types import (
    GRADIENT_DTYPES,
    MAX_SIZE,
    ROW_DTYPES,
    SUM_DTYPES,
    Int8Profile,
    ScaleDtype,
    WireDtype,
    enum_member,
    is_size,
)


class Mode(StrEnum):
    """The mode in which tokens are sent."""

    STANDARD = "standard"
    NORMAL = "normal"
    LOW_LATENCY = "low_latency"
    AUTO = "auto"
    FUSEEP = "fuseep"


class Router(StrEnum):
    """The function that turns router logits into experts and weights, in a layer that routes."""

    AUTO = "auto"
    REFERENCE = "reference"
    ASCEND = "ascend"
    TRITON = "triton"


_OPTIONAL_ENUMS: Mapping[str, type[StrEnum]] = MappingProxyType(
    {
        "mode": Mode,
        "router": Router,
        "dispatch_dtype": WireDtype,
        "combine_dtype": WireDtype,
        "backward_dtype": WireDtype,
        "dispatch_scales": ScaleDtype,
        "int8_profile": Int8Profile,
    }
)
ModeName = Literal["standard", "normal", "low_latency", "auto", "fuseep"]
RouterName = Literal["auto", "reference", "ascend", "triton"]
ScaleDtypeName = Literal["float32", "power_of_two"]
Int8ProfileName = Literal["rint127", "rint127eps", "div", "divtrunc16", "triton"]

ENVIRONMENT_PREFIX = "EPCOMM_"


def environment() -> Mapping[str, str]:
    """Return a frozen snapshot of the environment, for backends on vendor packages."""
    return MappingProxyType(dict(os.environ))


@dataclass(frozen=True, kw_only=True)
class EPConfig:
    """Every choice of one expert-parallel layer; equal on all ranks.

    mode: how tokens are sent; `auto` takes normal, or low latency if the caller passes decode=True
        (with exact sizes on CPU ranks); in `fuseep` one operator also computes the experts.
    backend: `collective`, `shared_memory`, `hierarchical`, `nvlink`, `deep_ep_v1`, `deep_ep_v2`,
        `deep_ep` for whichever of the two is installed, `ascend`, or `auto`; it serves every phase
        of the mode. In mode fuseep, a fused operator, or `auto`.
    measurements: a file written by `epcomm bench --output FILE`: `auto` takes the backend that was
        fastest in the mode of the phase, at the T nearest to max_tokens_per_rank, or at the largest
        T without such a limit. Its path may differ between ranks; its contents are compared. None:
        `auto` takes the first backend that serves, in the order of the registry.
    runner: a runner of the registry, or `auto`.
    router: `reference` is epcomm.routing.route; `ascend` is the gating operator of torch_npu, or
        the reference if it does not support the routing or gradients are needed; `triton` is a
        single kernel, or the reference if it does not support the routing; `auto` is ascend on NPUs
        that have the operator, and triton on GPUs. Only ExpertParallelMoE reads it; otherwise the
        caller routes.
    dispatch_dtype: format of rows in dispatch (docs/formats.md); None: that which the expert
        weights need. If it is not quantised, rows of combine and backward have it too.
    combine_dtype: format in which ranks return sums, or hosts between hosts; the source rank adds
        them in float32: fp8_e4m3, mxfp8 or nvfp4, or logfmt10, which only deep_ep_v1 has, in low
        latency; None: the format of unquantised rows. Forward only.
    combine_dtype_with_gradients: permit combine_dtype where gradients are needed: they ignore the
        quantisation, and are sent as backward_dtype says.
    backward_dtype: format in which gradients are sent, those of y to the experts and those of rows
        back: fp8_e4m3 or mxfp8; None: the format of unquantised rows. In mode auto it applies to
        training, not to decode.
    dispatch_scales: scales of FP8 rows in dispatch; None: those that the expert weights need.
    int8_profile: arithmetic of INT8, before the experts and between their products; None: rint127.
        It is refused if nothing is INT8.
    max_tokens_per_rank: M, the limit of the tokens of a rank in one call; None: no limit, which
        only buffers of exact size allow.
    max_recv_slots: limit of the slots of a rank in one call of normal mode; None: exact sizes.
    replicated: every rank passes the same tokens and the same gradients; standard mode only.
    num_sms: limit of the SMs of each kernel of normal mode over NVLink that waits for other ranks,
        so that other kernels run at the same time; copies of received rows may take all SMs. None:
        the choice of the buffer. Other buffers ignore it.
    product_sms: limit of the SMs of a GPU that the products of the experts take, forward and
        backward, so that kernels that send rows find SMs free; kernels between products may take
        all. A runner that cannot obey it is refused, and mode fuseep. None: no limit. Runners of
        CPU ranks ignore it.
    redundant_experts: physical experts of all ranks in addition to the E of the model: copies of
        loaded experts, placed by ExpertParallelExperts.rebalance(). 0: experts can be placed, with
        one copy each. None: experts are in the order of their ids and do not move.
    batches_in_flight: dispatches without gradients that may be in flight, which costs memory; None:
        the choice of the buffer, see explain(). If rows are copied there is no limit; a backend
        that does not support this number is refused.
    timeout_s: longest wait for another rank, in seconds; a group uses the largest value of its
        layers. NCCL and HCCL have the timeout of the process group instead.
    check_calls: raise faults in the call in which they occur, at the cost of host syncs: static
        buffers run check() in each combine; if the host does not wait in collectives (NCCL), and
        with vendor kernels, the ranks compare their calls in a small exchange.
    deterministic: refuse backends whose sums depend on arrival order.
    sum_groups: G, the number of groups of consecutive logical experts whose results are summed
        separately and then added in ascending order, so that y has the same bits on any number of
        ranks that divides G (docs/same_bits.md). None: each rank sums the results of its experts.
    block_tokens: ExpertParallelMoE computes its router, shared experts and other parts on blocks of
        this many tokens, so that the bits of a token do not depend on the batch; other layers do
        not read it. None: on all tokens at once, which such a layer refuses with sum_groups.
    chunks: the number of parts in which a layer sends and computes its tokens, except in decode, so
        that one part is sent while another is computed, where calls are begun (docs/graphs.md);
        other layers do not read it. Each part is a call, which max_tokens_per_rank and
        max_recv_slots limit, and two are in flight. 1: gradients of experts are computed while
        those of rows are returned. None: as 1 on CPU ranks; on GPUs a layer waits for transfers.
    record_load: ExpertParallelMoE, and layers of a model that transformers loads, count the tokens
        that chose each expert, for LoadRecorder; no other layer reads it.
    """

    mode: Mode | ModeName = Mode.AUTO
    backend: str = "auto"
    runner: str = "auto"
    router: Router | RouterName = Router.AUTO
    measurements: str | Path | None = None
    dispatch_dtype: WireDtype | None = None
    combine_dtype: WireDtype | None = None
    combine_dtype_with_gradients: bool = False
    backward_dtype: WireDtype | None = None
    dispatch_scales: ScaleDtype | ScaleDtypeName | None = None
    int8_profile: Int8Profile | Int8ProfileName | None = None
    max_tokens_per_rank: int | None = None
    max_recv_slots: int | None = None
    replicated: bool = False
    num_sms: int | None = None
    product_sms: int | None = None
    batches_in_flight: int | None = None
    redundant_experts: int | None = None
    # 100 s: a first call may compile kernels on one rank while the others wait.
    timeout_s: float = 100.0
    check_calls: bool = False
    deterministic: bool = False
    sum_groups: int | None = None
    block_tokens: int | None = None
    chunks: int | None = None
    record_load: bool = False

    def __post_init__(self) -> None:
        # Plain strings are welcome (files, command lines); the fields hold the enums.
        object.__setattr__(self, "mode", enum_member("EPConfig: mode", Mode, self.mode))
        object.__setattr__(self, "router", enum_member("EPConfig: router", Router, self.router))
        for name, dtypes in (
            ("dispatch_dtype", ROW_DTYPES),
            ("combine_dtype", SUM_DTYPES | {WireDtype.LOGFMT10}),
            ("backward_dtype", GRADIENT_DTYPES),
        ):
            value, known = getattr(self, name), sorted(dtype.value for dtype in dtypes)
            _expect(name, value, value in (None, *known), f"one of {known}, or None")
        for name, kind in _OPTIONAL_ENUMS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, enum_member(f"EPConfig: {name}", kind, value))
        for name in _OPTIONAL_SIZES:
            value = getattr(self, name)
            _expect(name, value, value is None or is_size(value), f"1 to {MAX_SIZE}, or None")
        redundant = self.redundant_experts
        is_count = redundant in (None, 0) or is_size(redundant)
        is_count = is_count and not isinstance(redundant, bool)
        _expect("redundant_experts", redundant, is_count, f"0 to {MAX_SIZE}, or None")
        is_number = isinstance(self.timeout_s, int | float) and not isinstance(self.timeout_s, bool)
        # NaN fails the comparison; text would raise a TypeError, so the type is checked first.
        is_time = is_number and 0 < self.timeout_s <= MAX_SIZE
        _expect("timeout_s", self.timeout_s, is_time, f"seconds > 0, at most {MAX_SIZE}")
        for name in ("backend", "runner"):
            value = getattr(self, name)
            _expect(name, value, isinstance(value, str), "auto or a registered name")
        is_path = self.measurements is None or isinstance(self.measurements, str | Path)
        _expect("measurements", self.measurements, is_path, "the path of a file, or None")
        for name in _SWITCHES:
            value = getattr(self, name)
            _expect(name, value, isinstance(value, bool), "true or false")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], *, source: str = "mapping") -> EPConfig:
        """Build from field names and plain values.

        Raises:
            ConfigError: an unknown field (the message lists the known ones) or a bad value.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(map(str, values)) - known)
        if unknown:
            raise ConfigError(
                f"EPConfig: {source} has unknown fields {unknown}; known are {sorted(known)}"
            )
        for name, value in values.items():
            # Showing a nested value could also take unbounded time.
            if isinstance(value, list | dict):
                raise ConfigError(
                    f"EPConfig: {source} gives {name} as {describe_kind(value)}, expected one value"
                )
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def from_file(cls, path: str | Path) -> EPConfig:
        """Read a .toml, .json, .yaml or .yml file whose top level holds the fields.

        YAML needs the package PyYAML, which the extra `yaml` brings.

        Raises:
            ConfigError: another ending, a file that cannot be read or does not parse, unknown
                fields, or a package that is missing.
        """
        path = Path(path)
        if path.suffix not in _READERS:
            endings = ", ".join(_READERS)
            raise ConfigError(
                f"EPConfig.from_file: {path.name} does not end in one of {endings}; rename or "
                "convert it"
            )
        return cls.from_mapping(_read_values(path), source=path.name)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> EPConfig:
        """Read fields from EPCOMM_<FIELD> variables; only ever called by the user.

        Raises:
            ConfigError: an EPCOMM_ variable that names no field, or a bad value.
        """
        env = environment() if env is None else env
        found = {
            name.removeprefix(ENVIRONMENT_PREFIX).lower(): text
            for name, text in env.items()
            if name.startswith(ENVIRONMENT_PREFIX)
        }
        parsed = {name: _parse(name, text) for name, text in found.items()}
        return cls.from_mapping(parsed, source="the environment")


def _read_values(path: Path) -> Mapping[str, object]:
    try:
        values = _READERS[path.suffix](path.read_text("utf-8"))
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror}); name another file"
    except ImportError:
        problem = (
            f"{path.name} needs PyYAML, which is not installed; run pip install pyyaml, or write "
            "TOML or JSON"
        )
    except ValueError as error:
        # Some parsers describe the position in several lines.
        problem = f"{path.name} does not parse: {' '.join(str(error).split())}"
    except RecursionError:
        problem = f"{path.name} does not parse: it is nested too deeply"
    else:
        if isinstance(values, Mapping):
            return values
        problem = (
            f"{path.name} holds {describe_kind(values)}, expected fields and their values at the "
            "top level"
        )
    raise ConfigError(f"EPConfig.from_file: {problem}")


def _parse_yaml(text: str) -> object:
    import yaml

    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, LookupError, AttributeError, ArithmeticError) as error:
        # The other errors come from tags on values of another type, such as `!!int ""`.
        raise ValueError(str(error)) from None
    # An empty file has no fields, as in TOML.
    return {} if values is None else values


_READERS: Mapping[str, Callable[[str], object]] = MappingProxyType(
    {".toml": tomllib.loads, ".json": json.loads, ".yaml": _parse_yaml, ".yml": _parse_yaml}
)


def _expect(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ConfigError(f"EPConfig: {name} is {shown(value)}, expected {expected}")


_OPTIONAL_SIZES = (
    *("max_tokens_per_rank", "max_recv_slots", "num_sms", "product_sms", "batches_in_flight"),
    *("sum_groups", "block_tokens", "chunks"),
)
_PARSERS = {**dict.fromkeys(_OPTIONAL_SIZES, int), "redundant_experts": int, "timeout_s": float}
_SWITCHES = (
    *("check_calls", "combine_dtype_with_gradients", "deterministic"),
    *("record_load", "replicated"),
)
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}


def _parse(name: str, text: str) -> object:
    try:
        return _BOOLEANS[text.lower()] if name in _SWITCHES else _PARSERS.get(name, str)(text)
    except (KeyError, ValueError):
        raise ConfigError(
            f"EPConfig.from_env: {ENVIRONMENT_PREFIX}{name.upper()} is {shown(text)}, which does "
            "not parse; give a number, or true or false"
        ) from None
