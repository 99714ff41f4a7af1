"""The variables that the Ascend deep_ep reads, and the values that epcomm supports.

The package reads most of them in each call, and they change numbers or layouts.
DEEP_USE_MODE=alltoall and ops select other operators with other results. Negative ids are never
sent, so MOE_ENABLE_TOPK_NEG_ONE may have any value.
Source: sgl-kernel-npu, deep_ep; not run on an NPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from epcomm.config import environment
from epcomm.platforms.ascend.chip import Soc
from epcomm.types import WireDtype, WireFormat

# Size of the window in MiB; the first variable that is set is used.
_WINDOW = ("DEEPEP_HCCL_BUFFSIZE", "HCCL_BUFFSIZE")
_DEFAULT_WINDOW_MIB = 200
_NUM_ROUNDS = "DEEPEP_NORMAL_LONG_SEQ_ROUND"
_ROUND_TOKENS = "DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS"
_COMBINE_ROUNDS = "DEEPEP_NORMAL_COMBINE_ENABLE_LONG_SEQ"
# Tokens of one round of normal mode, and of all rounds together.
_MAX_ROUND_TOKENS, _MAX_TOKENS = 8192, 131072
_INT8 = "DEEP_NORMAL_MODE_USE_INT8_QUANT"
_CCU = "MOE_ENABLE_CCU"
_EXPANSION = "HCCL_OP_EXPANSION_MODE"
# With these values A2 communicates in layers, and only the kernels can read its handles.
_LAYERS = (("HCCL_INTRA_PCIE_ENABLE", "1"), ("HCCL_INTRA_ROCE_ENABLE", "0"))
# Supported values; others change results or layouts.
_REQUIRED: Mapping[str, str] = {
    "DEEP_USE_MODE": "default",
    "MOE_EXPERT_TOKEN_NUMS_TYPE": "1",
    "MOE_SHARED_EXPERT_RANK_NUM": "0",
}


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The rounds into which normal mode splits long batches; equal on all ranks.

    num_rounds, tokens_per_round: rounds of a dispatch.
    in_combine: combine has the same rounds; otherwise a single one of at most 8192 tokens.
    """

    num_rounds: int = 1
    tokens_per_round: int = _MAX_ROUND_TOKENS
    in_combine: bool = False

    @property
    def max_tokens(self) -> int:
        """The tokens that a rank may dispatch and combine."""
        most = self.num_rounds * self.tokens_per_round
        return most if self.in_combine else min(most, _MAX_ROUND_TOKENS)

    def window_tokens(self, max_tokens: int | None) -> int:
        """Return the tokens that the window must hold for calls of at most `max_tokens`."""
        most = self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens)
        return min(most, self.tokens_per_round) if self.in_combine else most


def window_reasons(needed: int, variables: Mapping[str, str]) -> list[str]:
    """List why the HCCL window is smaller than `needed` bytes, with the setting to change."""
    reasons: list[str] = []
    name = next((name for name in _WINDOW if name in variables), _WINDOW[1])
    # The limit of HCCL is unknown; no window has 2**31 MiB.
    found = _integer(variables, name, range(1, 2**31), _DEFAULT_WINDOW_MIB, reasons)
    mib = -(-needed // 2**20)
    if not reasons and mib > found:
        reasons.append(
            f"needs a window of {mib} MiB, but {name} is {found}; set it to {mib} on all ranks"
        )
    return reasons


def rounds_of(variables: Mapping[str, str]) -> Rounds:
    """Return the rounds set by the variables; the default if rounds_reasons() refuses them."""
    rounds, reasons = _read_rounds(variables)
    return Rounds() if reasons else rounds


def current_rounds() -> Rounds:
    """Return the rounds of this process."""
    return rounds_of(environment())


def rounds_reasons(variables: Mapping[str, str]) -> list[str]:
    """Return why the package does not support the rounds; empty if it does."""
    return _read_rounds(variables)[1]


def _read_rounds(variables: Mapping[str, str]) -> tuple[Rounds, list[str]]:
    reasons: list[str] = []
    rounds = Rounds(
        num_rounds=_integer(variables, _NUM_ROUNDS, range(1, 257), 1, reasons),
        tokens_per_round=_integer(
            variables, _ROUND_TOKENS, range(32, _MAX_ROUND_TOKENS + 1), _MAX_ROUND_TOKENS, reasons
        ),
        in_combine=_integer(variables, _COMBINE_ROUNDS, range(2), 0, reasons) == 1,
    )
    for name, other in ((_NUM_ROUNDS, _ROUND_TOKENS), (_ROUND_TOKENS, _NUM_ROUNDS)):
        if name in variables and other not in variables:
            reasons.append(f"{name} is set and {other} is not; set both or neither")
    product = rounds.num_rounds * rounds.tokens_per_round
    if not reasons and product > _MAX_TOKENS:
        reasons.append(
            f"{_NUM_ROUNDS} * {_ROUND_TOKENS} is {product}, at most {_MAX_TOKENS}; lower one of "
            "them"
        )
    return rounds, reasons


def int8_reasons(wire: WireFormat, variables: Mapping[str, str]) -> list[str]:
    """Return why the variable that quantises rows contradicts the wire format.

    Releases from September 2026 on also read it in low latency.
    """
    if variables.get(_INT8, "0") == "1" and wire.dtype is not WireDtype.INT8:
        return [f"{_INT8} is 1, but the wire format is {wire}; unset it"]
    return []


def variable_reasons(variables: Mapping[str, str], soc: Soc | None) -> list[str]:
    """Return why variables of both modes are refused; an unknown chip adds no reasons."""
    reasons = [
        f"{name} is {variables[name]}, expected {wanted}; unset it"
        for name, wanted in _REQUIRED.items()
        if variables.get(name, wanted) != wanted
    ]
    ccu = variables.get(_CCU, "0")
    if soc in (Soc.A2, Soc.A3) and ccu != "0":
        reasons.append(f"{_CCU} is {ccu}, but only A5 has it and this is {soc}; unset it")
    if soc is not Soc.A2:
        return reasons
    if _EXPANSION in variables:
        found = variables[_EXPANSION]
        reasons.append(f"{_EXPANSION} is {found}, which A2 does not support; unset it")
    if all(variables.get(name) == value for name, value in _LAYERS):
        given = " and ".join(f"{name} is {value}" for name, value in _LAYERS)
        reasons.append(
            f"{given}, so that A2 communicates in layers, which is not supported; unset both"
        )
    return reasons


def _integer(
    variables: Mapping[str, str], name: str, allowed: range, default: int, reasons: list[str]
) -> int:
    """Return the value of a variable; for an invalid one the default, and add the reason."""
    text = variables.get(name, str(default))
    if text.isascii() and text.isdecimal() and int(text) in allowed:
        return int(text)
    reasons.append(
        f"{name} is {text!r}, expected {allowed[0]} to {allowed[-1]}; correct it or unset it"
    )
    return default
