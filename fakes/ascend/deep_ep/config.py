"""Read the settings of callers: strategies, which have no effect, and the environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum

from epcomm.config import environment
from fakes.ascend.limits import Soc, current_machine, require, require_modelled

_NAME = "deep_ep.Buffer"
# The first of these variables that is set is used.
WINDOW_VARIABLES = ("DEEPEP_HCCL_BUFFSIZE", "HCCL_BUFFSIZE")
# Tokens of one round of normal mode, and of all rounds together.
TOKENS_PER_ROUND = 8192
MAX_TOKENS = 131072


class Config:
    """Chunk sizes for GPUs; they are not read."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes


class FuseMode(IntEnum):
    """The operator that fused_deep_moe() calls."""

    FUSED_DEEP_MOE = 1
    DISPATCH_FFN_COMBINE = 2


class NormalStrategy(Enum):
    """The strategy by which normal mode communicates."""

    DEFAULT = "default"
    ALLTOALL = "alltoall"


class LowLatencyStrategy(Enum):
    """The strategy by which low latency communicates."""

    DEFAULT = "default"
    OPS = "ops"


# The strategies of each DEEP_USE_MODE for default arguments.
_MODES: Mapping[str, tuple[NormalStrategy, LowLatencyStrategy]] = {
    "default": (NormalStrategy.DEFAULT, LowLatencyStrategy.DEFAULT),
    "alltoall": (NormalStrategy.ALLTOALL, LowLatencyStrategy.DEFAULT),
    "ops": (NormalStrategy.DEFAULT, LowLatencyStrategy.OPS),
}


def strategies(
    normal: str | NormalStrategy, low_latency: str | LowLatencyStrategy
) -> tuple[NormalStrategy, LowLatencyStrategy]:
    """Return the strategies of the arguments, or of DEEP_USE_MODE for default arguments.

    Raises:
        ValueError: an unknown name.
    """
    mode = environment().get("DEEP_USE_MODE", "default")
    if mode not in _MODES:
        raise ValueError(f"DEEP_USE_MODE is {mode!r}, expected one of {', '.join(_MODES)}")
    chosen = NormalStrategy(normal), LowLatencyStrategy(low_latency)
    from_mode = _MODES[mode]
    return (
        from_mode[0] if chosen[0] is NormalStrategy.DEFAULT else chosen[0],
        from_mode[1] if chosen[1] is LowLatencyStrategy.DEFAULT else chosen[1],
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings in the environment at the time of a call.

    normal_int8: normal mode quantises if its caller passes no quant_mode.
    counts_are_sums: rows per expert are inclusive sums instead of counts.
    allows_none: low latency takes -1 as an id without an expert.
    num_rounds, tokens_per_round: limits of the rounds that normal mode cuts long batches into.
    combine_tokens: most tokens of a combine in normal mode, which has one round by default.
    """

    normal_int8: bool
    counts_are_sums: bool
    allows_none: bool
    num_rounds: int
    tokens_per_round: int
    combine_tokens: int


def settings() -> Settings:
    """Read the environment, as the real package does in each call.

    Raises:
        RuntimeError: values that it or the chip refuses.
        NotImplementedError: ranks for shared experts, or communication in layers.
    """
    variables = environment()
    nums_type = variables.get("MOE_EXPERT_TOKEN_NUMS_TYPE", "1")
    require(_NAME, nums_type in ("0", "1"), f"MOE_EXPERT_TOKEN_NUMS_TYPE is {nums_type!r}")
    shared = variables.get("MOE_SHARED_EXPERT_RANK_NUM", "0")
    require_modelled(_NAME, int(shared) == 0, f"MOE_SHARED_EXPERT_RANK_NUM={shared}")
    if current_machine().soc is Soc.A2:
        rule = "HCCL_OP_EXPANSION_MODE is not set on A2"
        require(_NAME, "HCCL_OP_EXPANSION_MODE" not in variables, rule)
        pcie = variables.get("HCCL_INTRA_PCIE_ENABLE"), variables.get("HCCL_INTRA_ROCE_ENABLE")
        require_modelled(_NAME, pcie != ("1", "0"), "communication in layers (PCIe)")
    num_rounds, tokens_per_round = _rounds(variables)
    has_rounds = variables.get("DEEPEP_NORMAL_COMBINE_ENABLE_LONG_SEQ", "0") == "1"
    return Settings(
        normal_int8=variables.get("DEEP_NORMAL_MODE_USE_INT8_QUANT") == "1",
        counts_are_sums=nums_type == "0",
        allows_none=variables.get("MOE_ENABLE_TOPK_NEG_ONE") == "1",
        num_rounds=num_rounds,
        tokens_per_round=tokens_per_round,
        combine_tokens=num_rounds * tokens_per_round if has_rounds else TOKENS_PER_ROUND,
    )


def _rounds(variables: Mapping[str, str]) -> tuple[int, int]:
    names = ("DEEPEP_NORMAL_LONG_SEQ_ROUND", "DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS")
    texts = [variables[name] for name in names if name in variables]
    require(_NAME, len(texts) != 1, f"{names[0]} and {names[1]} are set together")
    if not texts:
        return 1, TOKENS_PER_ROUND
    num_rounds, tokens = int(texts[0]), int(texts[1])
    require(_NAME, 1 <= num_rounds <= 256, f"{names[0]} is 1 to 256, got {num_rounds}")
    require(_NAME, 32 <= tokens <= 8192, f"{names[1]} is 32 to 8192, got {tokens}")
    fits = num_rounds * tokens <= MAX_TOKENS
    require(_NAME, fits, f"{names[0]} * {names[1]} is at most {MAX_TOKENS}")
    return num_rounds, tokens
