"""From a block of a known family to an ExpertParallelMoE that computes the same.

What may go wrong: a block that is configured, or was changed, to compute something that its family
does not say. Whatever of it nobody would read is refused here, before any communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor, nn

from epcomm.config import EPConfig
from epcomm.errors import ConfigError
from epcomm.experts import ExpertParallelExperts
from epcomm.group import EPGroup
from epcomm.integrations.transformers.families import FAMILIES, BlockFamily
from epcomm.moe import BlockLayout, ExpertParallelMoE, find_part
from epcomm.routing import RoutingSpec
from epcomm.weights import Activation, ExpertWeights

# Names of act_fn, a function or a module, that mean the activation; clamped experts have their own.
# torch's SiLU is what transformers' class wraps.
_ACT_FN_NAMES: Mapping[Activation, tuple[str, ...]] = MappingProxyType(
    {
        Activation.SWIGLU: ("SiLUActivation", "SiLU", "silu"),
        Activation.CLAMPED_SWIGLU: ("NoneType",),
        Activation.RELU2: ("ReLUSquaredActivation",),
    }
)


def from_transformers(
    block: nn.Module, group: EPGroup, config: EPConfig | None = None
) -> ExpertParallelMoE:
    """See ExpertParallelMoE.from_transformers."""
    family = _family_of(block)
    layout = _read_layout(block, family)
    parts = _read_parts(block, layout)
    routing = _read_routing(find_part(block, "router", layout.router), family)
    weights = _read_weights(block.get_submodule("experts"), family)
    _check_no_jitter(block)
    names = family.expert_names.by_field()
    experts = ExpertParallelExperts(weights, group, config, top_k=routing.top_k, names=names)
    return ExpertParallelMoE(routing=routing, experts=experts, parts=parts, layout=layout)


def _family_of(block: nn.Module) -> BlockFamily:
    kind = type(block).__name__
    if kind not in FAMILIES:
        raise ConfigError(
            f"from_transformers: block is {kind}, expected one of {sorted(FAMILIES)}; "
            "assemble ExpertParallelMoE from its parts"
        )
    return FAMILIES[kind]


def _read_layout(block: nn.Module, family: BlockFamily) -> BlockLayout:
    """The layout of the family without the optional parts that this block lacks."""
    names = family.layout.names()
    lacking = [field for field in family.optional if getattr(block, names[field], None) is None]
    layout = replace(family.layout, **dict.fromkeys(lacking))
    for field, name in layout.names().items():
        find_part(block, field, name)
    return layout


def _read_parts(block: nn.Module, layout: BlockLayout) -> dict[str, nn.Module | Tensor]:
    """Everything of the block but the experts, by name."""
    parts: dict[str, nn.Module | Tensor] = dict(block.named_children())
    parts |= dict(block.named_parameters(recurse=False)) | dict(block.named_buffers(recurse=False))
    used = {name.partition(".")[0] for name in layout.names().values()}
    _check_names(block, set(parts), used | {"experts"})
    return {name: part for name, part in parts.items() if name != "experts"}


def _read_routing(router: nn.Module | Tensor, family: BlockFamily) -> RoutingSpec:
    attributes = {"top_k": "top_k", **family.routing_attributes}
    for name in attributes.values():
        if not hasattr(router, name):
            raise ConfigError(
                f"from_transformers: {type(router).__name__} has no {name}, expected the router "
                "of transformers 5.23; assemble ExpertParallelMoE from its parts"
            )
    return family.preset(**{key: getattr(router, name) for key, name in attributes.items()})


def _read_weights(experts: nn.Module, family: BlockFamily) -> ExpertWeights:
    names = family.expert_names.by_field()
    _check_names(experts, set(experts.state_dict()), set(names.values()))
    expert_format = family.expert_format(experts)
    _check_activation(experts, expert_format.activation)
    tensors = {field: experts.get_parameter(name) for field, name in names.items()}
    return ExpertWeights(**tensors, format=expert_format)


def _check_names(module: nn.Module, found: set[str], expected: set[str]) -> None:
    """Raise ConfigError for a part that nobody would read, or that is missing."""
    if found != expected:
        raise ConfigError(
            f"from_transformers: {type(module).__name__} consists of {sorted(found)}, expected "
            f"{sorted(expected)}; assemble ExpertParallelMoE from its parts"
        )


def _check_activation(experts: nn.Module, activation: Activation) -> None:
    act_fn = getattr(experts, "act_fn", None)
    found = getattr(act_fn, "__name__", type(act_fn).__name__)
    expected = _ACT_FN_NAMES[activation]
    if found not in expected:
        raise ConfigError(
            f"from_transformers: act_fn of {type(experts).__name__} is {found}, expected "
            f"{expected[0]}; these experts are built with {activation.value} alone"
        )


def _check_no_jitter(block: nn.Module) -> None:
    if getattr(block, "jitter_noise", 0):
        raise ConfigError(
            f"from_transformers: router jitter of {type(block).__name__} is {block.jitter_noise}, "
            "expected 0, because noise on the input is not built; set router_jitter_noise=0"
        )
