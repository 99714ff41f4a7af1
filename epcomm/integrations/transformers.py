"""Which parts of a transformers MoE block are router, experts and shared experts.

Blocks are recognised by class name and read by attributes, so transformers itself is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from epcomm.config import EPConfig
from epcomm.errors import ConfigError
from epcomm.experts import ExpertParallelExperts
from epcomm.group import EPGroup
from epcomm.moe import ExpertParallelMoE
from epcomm.routing import RoutingSpec, presets
from epcomm.weights import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class BlockFamily:
    """How to read one kind of block.

    routing: from the block's router to its RoutingSpec.
    router_name: the child that computes logits.
    activation: class name of the experts' act_fn, which ExpertFormat means.
    """

    routing: Callable[[nn.Module], RoutingSpec]
    router_name: str = "gate"
    activation: str = "SiLUActivation"


FAMILIES: Mapping[str, BlockFamily] = MappingProxyType(
    {
        "MixtralSparseMoeBlock": BlockFamily(
            routing=lambda router: presets.mixtral(top_k=router.top_k),  # type: ignore[arg-type]
        ),
        "Qwen3MoeSparseMoeBlock": BlockFamily(
            routing=lambda router: presets.qwen3_moe(
                top_k=router.top_k,  # type: ignore[arg-type]
                renormalize=router.norm_topk_prob,  # type: ignore[arg-type]
            ),
        ),
    }
)


def from_transformers(
    block: nn.Module, group: EPGroup, config: EPConfig | None = None
) -> ExpertParallelMoE:
    """See ExpertParallelMoE.from_transformers."""
    kind = type(block).__name__
    if kind not in FAMILIES:
        raise ConfigError(
            f"from_transformers: block is {kind}, expected one of {sorted(FAMILIES)}; "
            "assemble ExpertParallelMoE from its parts"
        )
    family = FAMILIES[kind]
    _check_computes_alike(block, family)
    router = block.get_submodule(family.router_name)
    routing = family.routing(router)
    source = block.get_submodule("experts")
    weights = ExpertWeights(
        gate_up_proj=source.get_parameter("gate_up_proj"),
        down_proj=source.get_parameter("down_proj"),
    )
    experts = ExpertParallelExperts(weights, group, config, top_k=routing.top_k)
    return ExpertParallelMoE(
        router=router, routing=routing, experts=experts, router_name=family.router_name
    )


def _check_computes_alike(block: nn.Module, family: BlockFamily) -> None:
    """Raise ConfigError where a block is configured to compute what epcomm does not."""
    activation = type(getattr(block.get_submodule("experts"), "act_fn", None)).__name__
    # torch's own SiLU is what transformers' class wraps.
    if activation not in (family.activation, family.activation.removesuffix("Activation")):
        raise ConfigError(
            f"from_transformers: act_fn of {type(block).__name__} is {activation}, expected "
            f"{family.activation}; gelu and others are not built, use hidden_act='silu'"
        )
    if getattr(block, "jitter_noise", 0):
        raise ConfigError(
            f"from_transformers: router jitter of {type(block).__name__} is {block.jitter_noise}, "
            "expected 0, because noise on the input is not built; set router_jitter_noise=0"
        )
