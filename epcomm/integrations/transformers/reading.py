"""Build an ExpertParallelMoE that computes the same as a transformers MoE block.

A block is read by structure, whatever its class is called: structure.py defines the meanings of the
names of parts, tensors and attributes, and refuses unknown names; routings.py lists the presets
that may describe its router; probing.py runs the block itself, on a few random tokens. If no preset
agrees with the router, the router continues to choose experts by its own code. All of this is local
and reads no weight, so a block may be on the meta device.

A block that computes something other than its names suggest is refused before its experts are
copied, on all ranks.
"""

from torch import nn

from epcomm.blocks import BlockLayout
from epcomm.config import EPConfig
from epcomm.errors import ConfigError
from epcomm.experts import ExpertParallelExperts
from epcomm.group import EPGroup
from epcomm.integrations.transformers import structure
from epcomm.integrations.transformers.probing import BlockProbe, experts_disagreement
from epcomm.integrations.transformers.routings import routing_candidates
from epcomm.moe import ExpertParallelMoE
from epcomm.planning.candidates import refuse_plan
from epcomm.routing import RoutingSpec
from epcomm.weights.unquantized import ExpertWeights


def from_transformers(
    block: nn.Module, group: EPGroup, config: EPConfig | None = None
) -> ExpertParallelMoE:
    """Build the layer of a block; see ExpertParallelMoE.from_transformers."""
    try:
        weights, names, layout, routing = read_block(block)
    except ConfigError as error:
        refuse_plan(group, error)
    experts = ExpertParallelExperts(weights, group, config, top_k=routing.top_k, names=names)
    parts = structure.parts_of(block)
    return ExpertParallelMoE(routing=routing, experts=experts, parts=parts, layout=layout)


def read_block(
    block: nn.Module,
) -> tuple[ExpertWeights, dict[str, str], BlockLayout, RoutingSpec]:
    """Read a block by its structure, and confirm the reading by running the block.

    Returns: all experts, the names of their parameters by field of ExpertWeights, the role of each
        other part, and how logits become experts and weights.

    Local; reads no weight.
    Raises:
        ConfigError: a part, a tensor or an attribute that structure.py does not list, or a block
            that computes something other than its names suggest.
    """
    kind = type(block).__name__
    structure.read_layout(block)
    structure.check_num_experts(block)
    weights, names = structure.read_experts(block.get_submodule("experts"))
    problem = experts_disagreement(block.get_submodule("experts"), weights)
    if problem is not None:
        raise structure.refusal(
            f"the experts of {kind} compute something else than {weights.format}: {problem}",
            "what their names and attributes say",
        )
    return weights, names, *read_routing(block, weights.num_experts)


def read_routing(block: nn.Module, num_experts: int) -> tuple[BlockLayout, RoutingSpec]:
    """Return the layout that a run of the block confirms, and the first routing that agrees.

    num_experts: E; a block that transformers has loaded on several ranks holds a share of them.

    Local; reads no weight.
    Raises:
        ConfigError: see read_block().
    """
    layout = structure.read_layout(block)
    probe = BlockProbe(block, layout, num_experts)
    layout, top_k = probe.trace()
    router = block.get_submodule(layout.router)
    problem = None
    has_bias = layout.correction_bias is not None
    for routing in routing_candidates(router, top_k=top_k, has_bias=has_bias):
        problem = probe.disagreement(layout, routing)
        if problem is None:
            return layout, routing
    named = ", ".join(f"{name} as {field}" for field, name in layout.names().items())
    raise structure.refusal(
        f"{type(block).__name__} computes something else than its parts say ({named}): {problem}",
        "a block that is the sum of these parts",
    )
