"""The kinds of MoE block: where each keeps its router, experts and shared experts.

Source: the blocks of transformers 5.23; the tests compare against every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from torch import Tensor, nn

from epcomm.errors import ConfigError
from epcomm.moe import BlockLayout
from epcomm.routing import RoutingSpec, presets
from epcomm.weights import Activation, ExpertFormat


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Parameter names of the experts, by field of ExpertWeights; None: there is no such tensor."""

    gate_up_proj: str = "gate_up_proj"
    down_proj: str = "down_proj"
    gate_up_bias: str | None = None
    down_bias: str | None = None

    def by_field(self) -> dict[str, str]:
        """Field to name, of the tensors that are there."""
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        return {key: name for key, name in named.items() if name is not None}


def swiglu(experts: nn.Module) -> ExpertFormat:
    """The format of nearly all experts."""
    return ExpertFormat()


@dataclass(frozen=True, kw_only=True)
class BlockFamily:
    """How to read one kind of block.

    preset: makes the RoutingSpec from top_k and what routing_attributes name.
    routing_attributes: keyword of the preset to attribute of the router.
    layout: which part of the block does what.
    optional: fields of the layout that some blocks of the family leave empty.
    expert_names: what the experts call their parameters.
    expert_format: from the experts to how they compute.
    """

    preset: Callable[..., RoutingSpec]
    routing_attributes: Mapping[str, str] = field(default_factory=dict)
    layout: BlockLayout = field(default_factory=BlockLayout)
    optional: frozenset[str] = frozenset()
    expert_names: ExpertNames = ExpertNames()
    expert_format: Callable[[nn.Module], ExpertFormat] = swiglu


def call_with_bias(
    router: nn.Module, tokens: Tensor, correction_bias: Tensor | None
) -> tuple[Tensor, ...]:
    """For routers whose correction bias belongs to the block; None where it has none."""
    return router(tokens, correction_bias)


def call_with_batch_and_bias(
    router: nn.Module, tokens: Tensor, correction_bias: Tensor | None
) -> tuple[Tensor, ...]:
    """The same for a router that insists on [batch, sequence, H]."""
    return router(tokens.unsqueeze(0), correction_bias)


def _clamped_swiglu(experts: nn.Module) -> ExpertFormat:
    return ExpertFormat(
        activation=Activation.CLAMPED_SWIGLU,
        is_transposed=True,
        is_interleaved=True,
        alpha=experts.alpha,  # type: ignore[arg-type]
        limit=experts.limit,  # type: ignore[arg-type]
    )


def _relu2(experts: nn.Module) -> ExpertFormat:
    return ExpertFormat(activation=Activation.RELU2)


def _deepseek_v2(
    *, top_k: int, routed_scaling_factor: float, method: str, num_groups: int, topk_groups: int
) -> RoutingSpec:
    """Its groups count only under one of its methods, and may be None under the other."""
    groups = {"num_groups": num_groups, "topk_groups": topk_groups}
    of_method = {"greedy": {}, "group_limited_greedy": groups}
    if method not in of_method:
        raise ConfigError(
            f"from_transformers: topk_method of DeepseekV2Moe is {method!r}, expected one of "
            f"{sorted(of_method)}; others are not built"
        )
    return presets.deepseek_v2(
        top_k=top_k, routed_scaling_factor=routed_scaling_factor, **of_method[method]
    )


_RENORMALIZE = {"renormalize": "norm_topk_prob"}
_SCALE = {"routed_scaling_factor": "routed_scaling_factor"}
_GROUPS = {"num_groups": "num_group", "topk_groups": "topk_group"}

_GATED_SHARED_EXPERT = BlockLayout(
    shared_experts="shared_expert", shared_experts_gate="shared_expert_gate"
)

FAMILIES: Mapping[str, BlockFamily] = MappingProxyType(
    {
        "MixtralSparseMoeBlock": BlockFamily(preset=presets.mixtral),
        "Qwen2MoeSparseMoeBlock": BlockFamily(
            preset=presets.qwen2_moe,
            routing_attributes=_RENORMALIZE,
            layout=_GATED_SHARED_EXPERT,
        ),
        "Qwen3MoeSparseMoeBlock": BlockFamily(
            preset=presets.qwen3_moe, routing_attributes=_RENORMALIZE
        ),
        "Qwen3_5MoeSparseMoeBlock": BlockFamily(
            preset=presets.qwen3_5_moe, layout=_GATED_SHARED_EXPERT
        ),
        "DeepseekV2Moe": BlockFamily(
            preset=_deepseek_v2,
            routing_attributes=_GROUPS | _SCALE | {"method": "topk_method"},
            layout=BlockLayout(shared_experts="shared_experts"),
        ),
        "DeepseekV3MoE": BlockFamily(
            preset=presets.deepseek_v3,
            routing_attributes=_GROUPS | _SCALE | _RENORMALIZE,
            layout=BlockLayout(
                correction_bias="gate.e_score_correction_bias", shared_experts="shared_experts"
            ),
        ),
        "AfmoeSparseMoeBlock": BlockFamily(
            preset=presets.afmoe,
            routing_attributes={"routed_scaling_factor": "route_scale"},
            layout=BlockLayout(
                router="router",
                call_router=call_with_batch_and_bias,
                correction_bias="expert_bias",
                shared_experts="shared_experts",
            ),
        ),
        "MiniMaxM2SparseMoeBlock": BlockFamily(
            preset=presets.minimax_m2,
            layout=BlockLayout(
                call_router=call_with_bias, correction_bias="e_score_correction_bias"
            ),
        ),
        "GptOssMLP": BlockFamily(
            preset=presets.gpt_oss,
            layout=BlockLayout(router="router", returns_scores=True),
            expert_names=ExpertNames(gate_up_bias="gate_up_proj_bias", down_bias="down_proj_bias"),
            expert_format=_clamped_swiglu,
        ),
        "Ernie4_5_MoeSparseMoeBlock": BlockFamily(
            preset=presets.ernie4_5_moe,
            routing_attributes={"epsilon": "norm_min"},
            layout=BlockLayout(
                correction_bias="gate.moe_statics.e_score_correction_bias",
                shared_experts="shared_experts",
            ),
            optional=frozenset({"shared_experts"}),
        ),
        "Lfm2MoeSparseMoeBlock": BlockFamily(
            preset=presets.lfm2_moe,
            routing_attributes=_RENORMALIZE | _SCALE | {"use_correction_bias": "use_expert_bias"},
            layout=BlockLayout(call_router=call_with_bias, correction_bias="expert_bias"),
            optional=frozenset({"correction_bias"}),
        ),
        "NemotronHMoE": BlockFamily(
            preset=presets.nemotron_h,
            routing_attributes=_GROUPS | _SCALE | _RENORMALIZE,
            layout=BlockLayout(
                correction_bias="gate.e_score_correction_bias",
                shared_experts="shared_experts",
                latent_in="fc1_latent_proj",
                latent_out="fc2_latent_proj",
            ),
            expert_names=ExpertNames(gate_up_proj="up_proj"),
            expert_format=_relu2,
        ),
    }
)
