"""Describe the parts of a MoE block."""

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, nn

from epcomm.errors import ConfigError
from epcomm.records import TopKOutput

# Fields of BlockLayout that name a part.
_PARTS = (
    *("router", "correction_bias", "shared_experts", "shared_experts_gate"),
    *("latent_in", "latent_out", "output_norm"),
)


class RouterInput(StrEnum):
    """An input of the call of a router.

    TOKENS: the tokens, [T, H].   BATCH: the same as a batch of one, [1, T, H].
    CORRECTION_BIAS: the tensor that BlockLayout.correction_bias names, [E], or None.
    INPUT_IDS: ids of the tokens in the vocabulary, [T].
    """

    TOKENS = "tokens"
    BATCH = "batch"
    CORRECTION_BIAS = "correction_bias"
    INPUT_IDS = "input_ids"


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The parts of a block by function: dotted names below the block; None for a missing part.

    router: returns logits [T, E], or a tuple that begins with them; with the routing
        chosen_by_router, (logits, topk_weights [T, K], topk_ids [T, K], ...).
    router_inputs: its arguments, in order.
    correction_bias: E values in any shape, which the routing adds to scores.
    shared_experts: [..., H] to [..., H], computed on every rank's own tokens.
    shared_experts_gate: [..., H] to [..., 1]; its sigmoid multiplies the result of the shared
    experts.
    averages_shared_experts: y is the mean of routed and shared experts instead of their sum.
    latent_in, latent_out: [T, H] to [T, H'] before dispatch, and back after combine; H' is the
        hidden size of the routed experts.
    routed_scale: multiplies the result of the routed experts, after latent_out.
    output_norm: [..., H] to [..., H], applied to y last.
    returns_scores: the block returns (y, topk_weights [T, K] in the dtype of the logits), not y.
    """

    router: str = "gate"
    router_inputs: tuple[RouterInput, ...] = (RouterInput.TOKENS,)
    correction_bias: str | None = None
    shared_experts: str | None = None
    shared_experts_gate: str | None = None
    averages_shared_experts: bool = False
    latent_in: str | None = None
    latent_out: str | None = None
    routed_scale: float = 1.0
    output_norm: str | None = None
    returns_scores: bool = False

    def names(self) -> dict[str, str]:
        """Map the field of each existing part to the name of the part."""
        named = {field: getattr(self, field) for field in _PARTS}
        return {field: name for field, name in named.items() if name is not None}


def chosen_by_router(
    logits: Tensor, *, top_k: int, correction_bias: Tensor | None, hidden_states: Tensor | None
) -> TopKOutput:
    """Mark the routing of a router module that returns weights and ids with its logits.

    With `RoutingSpec(top_k=K, custom_function=chosen_by_router)`, ExpertParallelMoE uses the ids
    and weights that the router module returns.

    Raises:
        ConfigError: always, because the choice does not follow from logits.
    """
    raise ConfigError(
        "chosen_by_router: called with logits, expected to be taken from the router's own output; "
        "use it in the RoutingSpec of an ExpertParallelMoE, not with route()"
    )


def find_part(block: nn.Module, field: str, name: str) -> nn.Module | Tensor:
    """Return the part of a block that its layout calls `field`, by its dotted name.

    Raises:
        ConfigError: the block has no such module, or no such tensor for a correction bias.
    """
    part: object = block
    for step in name.split("."):
        part = getattr(part, step, None)
    if not isinstance(part, Tensor if field == "correction_bias" else nn.Module):
        raise ConfigError(
            f"{type(block).__name__}: {name} is {type(part).__name__}, expected its "
            f"{field}; pass a BlockLayout that names it"
        )
    return part


def correction_bias_of(block: nn.Module, layout: BlockLayout) -> Tensor | None:
    """Return the tensor of a block that its layout calls correction_bias; None: there is none."""
    if layout.correction_bias is None:
        return None
    bias = find_part(block, "correction_bias", layout.correction_bias)
    assert isinstance(bias, Tensor), "find_part() checks it"
    return bias
