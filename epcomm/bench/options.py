"""The options of a run of `epcomm bench`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch

from epcomm.config import EPConfig, Mode
from epcomm.errors import ConfigError, shown
from epcomm.registry import BUFFERS, backend_names
from epcomm.spec import MoESpec
from epcomm.testing.data import BatchSpec, RankBatch, make_batch, random_ids
from epcomm.types import MAX_SIZE, SUM_DTYPES, WireDtype, is_size

_DTYPES = {
    each.value: each.torch_dtype for each in (WireDtype.BF16, WireDtype.FP16, WireDtype.FP32)
}
# The format of experts in eight bits.
FP8 = "fp8"
# H, I, E and K by model, as the config.json of its repository on Hugging Face has them:
# hidden_size, moe_intermediate_size (intermediate_size of gpt-oss), num_experts_per_tok, and the
# experts as n_routed_experts (DeepSeek-V3, Kimi-K2-Instruct), num_experts (Qwen3-30B-A3B) or
# num_local_experts (gpt-oss-120b). Without a name, a layer that a laptop runs.
SHAPES: Mapping[str, Mapping[str, int]] = {
    "": {"hidden": 1024, "intermediate": 1024, "experts": 32, "top_k": 8},
    "deepseek_v3": {"hidden": 7168, "intermediate": 2048, "experts": 256, "top_k": 8},
    "qwen3_30b": {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
    "gpt_oss_120b": {"hidden": 2880, "intermediate": 2880, "experts": 128, "top_k": 4},
    "kimi_k2": {"hidden": 7168, "intermediate": 2048, "experts": 384, "top_k": 8},
}
# Seeds of ranks and experts are slightly larger, and a generator takes 64 bits.
_MAX_SEED = 2**63 - 1
# The modes whose dispatch and combine can be timed separately.
MODES = (Mode.NORMAL, Mode.LOW_LATENCY, Mode.STANDARD)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The sizes and contenders of a run, equal on all ranks.

    tokens: T, on each rank, one after another.   hidden: H.   experts: of all ranks.   top_k: K.
    modes, backends: of epcomm; the plain torch contenders are always measured.
    dtype: of the hidden states.   wire: of rows towards the experts of epcomm, None for dtype.
    intermediate: I of whole layers, which are timed instead of their dispatch and combine alone;
        None for those.
    weights: formats of the experts of whole layers: that of dtype, or fp8.
    shape: the name of the shape from which sizes come, for the report.
    iterations, warm_up: timed and untimed calls of each contender at each T.
    seed: of tokens, routing and experts.   command: by which the run was started.
    trace: the file for the trace of whole layers; empty: they are not traced.
    chunks: numbers of EPConfig.chunks of whole layers, besides none; a trace has the largest, or 4.
    micro_batches: the number of batches of whole layers that run in turn, besides one.
    backward: whole layers are timed forward and backward too, where they train.
    num_sms, product_sms: fields of EPConfig.
    """

    tokens: tuple[int, ...]
    hidden: int
    experts: int
    top_k: int
    modes: tuple[Mode, ...] = (Mode.NORMAL, Mode.LOW_LATENCY)
    backends: tuple[str, ...] = tuple(BUFFERS)
    dtype: str = "bf16"
    wire: WireDtype | None = None
    combine: tuple[WireDtype, ...] = ()
    intermediate: int | None = None
    weights: tuple[str, ...] = ()
    shape: str = ""
    iterations: int = 30
    warm_up: int = 5
    seed: int = 0
    command: str = ""
    trace: str = ""
    chunks: tuple[int, ...] = ()
    micro_batches: int | None = None
    backward: bool = False
    num_sms: int | None = None
    product_sms: int | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("epcomm bench: --tokens is empty, expected such as 1,128,1024")
        sizes = ("tokens", "hidden", "experts", "top_k", "intermediate", "iterations", "chunks")
        for name in (*sizes, "num_sms", "product_sms"):
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(number is None or is_size(number) for number in numbers):
                _refuse(name, ",".join(map(shown, numbers)), f"1 to {MAX_SIZE}")
        if self.micro_batches is not None and not 1 < self.micro_batches <= MAX_SIZE:
            _refuse("micro_batches", shown(self.micro_batches), f"2 to {MAX_SIZE}")
        for name, most in (("warm_up", MAX_SIZE), ("seed", _MAX_SEED)):
            value = getattr(self, name)
            if not 0 <= value <= most:
                _refuse(name, shown(value), f"0 to {most}")
        if self.top_k > self.experts:
            most = f"at most the {self.experts} experts; give fewer, or more --experts"
            _refuse("top_k", str(self.top_k), most)
        dtype_of(self.dtype)
        formats = [self.dtype, FP8]
        has_none = self.intermediate is not None and not self.weights
        if has_none or not set(formats).issuperset(self.weights):
            _refuse("weights", repr(",".join(self.weights)), f"some of {formats}")
        if self.combine and self.intermediate is not None:
            _refuse("combine", "given with --layer, which does not time sums", "one of the two")
        if self.wire is not None and self.intermediate is not None:
            _refuse("wire", f"{self.wire} with --layer, whose experts decide it", "one of the two")
        trains = set(self.weights) - {FP8} and set(self.modes) - {Mode.LOW_LATENCY}
        if self.backward and not trains:
            _refuse("backward", "given", f"{self.dtype} in --weights, normal in --modes, to train")

    def check_ranks(self, world_size: int) -> None:
        """Raise ConfigError if the experts are not a multiple of the ranks. Local."""
        if self.experts % world_size:
            _refuse("experts", str(self.experts), f"a multiple of the {world_size} ranks")

    def moe_spec(self) -> MoESpec:
        """Return the MoESpec of the measured layer."""
        return MoESpec(
            hidden_size=self.hidden,
            num_experts=self.experts,
            top_k=self.top_k,
            dtype=dtype_of(self.dtype),
        )

    def config(
        self, mode: Mode, tokens: int, backend: str = "auto", combine_dtype: WireDtype | None = None
    ) -> EPConfig:
        """Return the configuration of one contender at T = `tokens`."""
        return EPConfig(
            mode=mode,
            backend=backend,
            max_tokens_per_rank=tokens,
            dispatch_dtype=self.wire,
            combine_dtype=combine_dtype,
            num_sms=self.num_sms,
            product_sms=self.product_sms,
        )

    def make_batches(self, tokens: int, world_size: int, device: torch.device) -> list[RankBatch]:
        spec = BatchSpec(
            hidden_size=self.hidden,
            num_local_experts=self.experts // world_size,
            top_k=self.top_k,
            dtype=dtype_of(self.dtype),
            seed=self.seed,
            tokens_of_rank=lambda rank, world_size: tokens,
            choose_ids=random_ids,
        )
        return [make_batch(spec, rank, world_size).to(device) for rank in range(world_size)]


def described(options: BenchOptions) -> dict[str, str | int]:
    """Return the options as a report writes them, without those that are None."""
    return {
        name: ",".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in asdict(options).items()
        if name != "command" and value not in (None, (), "")
    }


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name; ConfigError unless it is bf16, fp16 or fp32."""
    if name not in _DTYPES:
        _refuse("dtype", repr(name), f"one of {sorted(_DTYPES)}")
    return _DTYPES[name]


def sizes_of(shape: str) -> Mapping[str, int]:
    """Return the sizes of a shape of SHAPES, by field of BenchOptions; ConfigError if unknown."""
    if shape not in SHAPES:
        _refuse("shape", repr(shape), f"one of {sorted(filter(None, SHAPES))}")
    return SHAPES[shape]


def read_numbers(text: str, name: str = "tokens") -> tuple[int, ...]:
    """Read a list such as `1,128,1024` of an option; raise ConfigError if it is invalid."""
    try:
        return tuple(dict.fromkeys(map(int, read_names(text))))
    except ValueError:
        _refuse(name, shown(text), "numbers such as 1,128,1024")


def read_modes(text: str) -> tuple[Mode, ...]:
    """Read `normal,low_latency`; ConfigError for a mode that cannot be measured here."""
    names, found = [mode.value for mode in MODES], read_names(text)
    if not found or not set(names).issuperset(found):
        _refuse("modes", repr(text), f"some of {names}")
    return tuple(map(Mode, found))


def read_wire(text: str | None) -> WireDtype | None:
    """Read `fp8_e4m3` or `int8`, else ConfigError; None: rows have the dtype of hidden states."""
    names = [each.value for each in WireDtype if each.is_quantized]
    if text is not None and text not in names:
        _refuse("wire", repr(text), f"one of {names}")
    return None if text is None else WireDtype(text)


def read_sums(text: str) -> tuple[WireDtype, ...]:
    """Read formats of sums, such as `fp8_e4m3,mxfp8`, else ConfigError."""
    names = sorted(each.value for each in SUM_DTYPES)
    if not set(names).issuperset(read_names(text)):
        _refuse("combine", repr(text), f"some of {names}")
    return tuple(map(WireDtype, read_names(text)))


def read_backends(text: str) -> tuple[str, ...]:
    """Read `auto`, which is every backend, or names; ConfigError for an unknown one."""
    found = [name for part in read_names(text) for name in backend_names(part, Mode.AUTO)]
    if not found:
        raise ConfigError("epcomm bench: --backend is empty, expected auto or names of backends")
    return tuple(dict.fromkeys(found))


def read_names(text: str) -> tuple[str, ...]:
    """Return what is between the commas, without blanks and repetitions."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _refuse(name: str, found: str, expected: str) -> NoReturn:
    """Raise the error of an option, which has the name of a field."""
    option = name.replace("_", "-")
    raise ConfigError(f"epcomm bench: --{option} is {found}, expected {expected}") from None
