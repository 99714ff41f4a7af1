"""Try from_transformers on a tiny copy of every MoE block of the installed transformers.

    python -m tests.integrations.block_table

writes docs/reference/transformers_blocks.md: blocks that are served, with forward and all gradients
equal to those of the block itself, and blocks that are refused, with the sentence of the refusal.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epcomm import ConfigError, EPGroup, ExpertParallelMoE
from epcomm.blocks import chosen_by_router
from epcomm.integrations.transformers.structure import REMEDY
from epcomm.sharding.shards import cut_share, is_expert_tensor
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error
from epcomm.training.gradients import sum_replicated_gradients
from tests.cases.blocks import GROUPED, HIDDEN, NUM_EXPERTS, SIZES, seeded

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "transformers_blocks.md"
NUM_TOKENS, VOCABULARY = 6, 32
# Every name under which a configuration holds a size of a block; those it lacks are left out.
TINY: Mapping[str, object] = {
    **SIZES,
    **GROUPED,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), NUM_EXPERTS),
    "moe_num_experts": NUM_EXPERTS,
    "expert_ffn_hidden_size": 8,
    "moe_topk": 2,
    "top_k_experts": 2,
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size"), 12),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 12),
    **dict.fromkeys(("moe_hidden_size", "moe_latent_size"), 12),
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "zero_expert_num": 4,
    "enable_moe_block": True,
    "part_features": 4,
    "vocab_size": VOCABULARY,
    # Settings that decide what is computed have values that show in it.
    "norm_topk_prob": True,
    **dict.fromkeys(("router_scaling_factor", "moe_router_scaling_factor"), 1.5),
    **dict.fromkeys(("moe_routed_scaling_factor", "route_scale"), 1.5),
    "moe_router_logit_softcapping": 0.8,
    "swiglu_limit": 0.7,
    "input_jitter_noise": 0.0,
    "router_jitter_noise": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A block class under one configuration; `changes` say how it differs from TINY."""

    block: type[nn.Module]
    changes: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        changes = ", ".join(f"{name}={value}" for name, value in self.changes.items())
        return self.block.__name__ + (f" ({changes})" if changes else "")

    @property
    def model(self) -> str:
        return self.block.__module__.split(".")[-2]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one block.

    routing: the router of a served block.   error: worst relative error of y and all gradients.
    refusal: the message for a block that is not served.
    """

    variant: Variant
    routing: str = ""
    error: float = float("inf")
    refusal: str = ""

    @property
    def is_served(self) -> bool:
        return not self.refusal and self.error <= FP32_TOLERANCE


# Settings beside those of TINY that make a block compute something else.
CHANGES: Mapping[str, tuple[Mapping[str, object], ...]] = {
    "Cohere2MoeSparseMoeBlock": tuple(
        {"shared_expert_combination_strategy": strategy, "expert_selection_fn": function}
        for strategy, function in (("sum", "softmax"), ("average", "sigmoid"))
    ),
    "DeepseekV4SparseMoeBlock": tuple({"mlp_layer_types": [kind]} for kind in ("moe", "hash_moe")),
    "OlmoeSparseMoeBlock": ({}, {"norm_topk_prob": False}),
    "Step3p7SparseMoeBlock": ({"swiglu_limits": None}, {"swiglu_limits": [0.7]}),
    "NemotronHMoE": ({}, {"moe_latent_size": None}),
    "Lfm2MoeSparseMoeBlock": ({}, {"use_expert_bias": False}),
    "Ernie4_5_MoeSparseMoeBlock": ({}, {"moe_num_shared_experts": 0}),
    "Qwen3OmniMoeTalkerTextSparseMoeBlock": ({"shared_expert_intermediate_size": 12},),
    "Ernie4_5_VLMoeSparseMoeBlock": ({"moe_intermediate_size": [8, 8]},),
}


def find_variants() -> list[Variant]:
    """Return all classes of transformers that hold experts, by model."""
    root = Path(inspect.getfile(import_module("transformers"))).parent / "models"
    found = []
    for path in sorted(root.glob("*/modeling_*.py")):
        for name in _block_names(path.read_text(encoding="utf-8")):
            module = import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            changes = CHANGES.get(name, ({},))
            found += [Variant(block=getattr(module, name), changes=each) for each in changes]
    return found


def _block_names(source: str) -> Iterator[str]:
    """Return the classes of a module that keep experts."""
    for text in re.split(r"^(?=class )", source, flags=re.MULTILINE):
        name = re.match(r"class (\w+)", text)
        if name is not None and "self.experts = " in text:
            yield name[1]


def make_block(variant: Variant) -> nn.Module:
    parameters = inspect.signature(variant.block.__init__).parameters
    extra = {"layer_idx": 0, "intermediate_size": 8, "ffn_dim": 8}
    extra = {name: value for name, value in extra.items() if name in parameters}
    failures = []
    for kind in _config_classes(variant.block):
        try:
            return seeded(variant.block(_tiny(kind(), variant.changes), **extra))
        except Exception as error:  # noqa: BLE001  every class of configuration is tried
            failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")
    raise ValueError("; ".join(failures))


def _config_classes(block: type[nn.Module]) -> list[type]:
    """Return the class that the block asks for, else all of its model, those of texts first."""
    wanted = inspect.get_annotations(block.__init__).get("config")
    name = wanted if isinstance(wanted, str) else getattr(wanted, "__name__", "")
    module = import_module(block.__module__.replace("modeling_", "configuration_"))
    classes = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind)
        and kind.__name__.endswith("Config")
        and kind.__module__ == module.__name__
    ]
    return sorted(classes, key=lambda kind: (kind.__name__ != name, "Text" not in kind.__name__))


def _tiny(config: object, changes: Mapping[str, object]) -> object:
    # Configurations may have a list of layer types; here all layers have the same type.
    vars(config)["allow_global_per_layer_attribute_access"] = True
    for name, value in {**TINY, **changes}.items():
        if name in changes or hasattr(config, name):
            setattr(config, name, value)
    return config


def try_block(variant: Variant, group: EPGroup) -> Row:
    """Serve a block on the ranks of a group, and compare y and every gradient. Collective."""
    # Routers that draw experts at random draw different ones for a longer batch, so only one rank
    # compares training.
    is_training = group.world_size == 1
    block, served = (make_block(variant).train(is_training) for _ in range(2))
    try:
        layer = ExpertParallelMoE.from_transformers(served, group)
    except ConfigError as error:
        return Row(variant=variant, refusal=str(error))
    inputs = [_inputs(rank) for rank in range(group.world_size)]
    expected = _run(block, *(torch.cat(each, dim=1) for each in zip(*inputs, strict=True)))
    found = _run(layer, *inputs[group.rank])
    errors = [
        _error(found[name], each.chunk(group.world_size)[group.rank])
        for name, each in expected.items()
    ]
    sum_replicated_gradients(layer, group)
    parameters = dict(layer.named_parameters())
    assert parameters.keys() == dict(block.named_parameters()).keys(), variant.name
    for name, each in block.named_parameters():
        ours, wanted = parameters[name], each.grad
        if is_expert_tensor(ours) and wanted is not None:
            wanted = cut_share(wanted, ours.held)
        errors.append(_error(_local(ours.grad), wanted))
    is_own = layer.routing.custom_function is chosen_by_router
    routing = "its router" if is_own else "RoutingSpec"
    return Row(variant=variant, routing=routing, error=max(errors))


def _inputs(rank: int) -> tuple[Tensor, Tensor]:
    """Tokens [1, T, H] and their ids, of a rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(1, NUM_TOKENS, HIDDEN, generator=generator)
    return x, torch.randint(0, VOCABULARY, (1, NUM_TOKENS), generator=generator)


def _run(module: nn.Module, x: Tensor, input_ids: Tensor) -> dict[str, Tensor]:
    """Return outputs and dx by name, a row a token; other gradients are in the parameters."""
    x.requires_grad_()
    takes_ids = "input_ids" in inspect.signature(type(module).forward).parameters
    torch.manual_seed(2)
    # The block gets a copy, because some blocks change their input.
    result = module(x.clone(), **({"input_ids": input_ids} if takes_ids else {}))
    outputs = result if isinstance(result, tuple) else (result,)
    torch.stack([output.square().sum() for output in outputs]).sum().backward()
    named = {f"output {place}": each.flatten(0, -2) for place, each in enumerate(outputs)}
    return named | {"dx": x.grad[0]}


def _local(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient  # type: ignore[union-attr]


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        # The gradient of an expert without tokens is zero here and None in the reference, or both
        # are None.
        there = expected if found is None else found
        return 0.0 if there is None else float(there.abs().max())
    return float(relative_error(found, expected))


def table(group: EPGroup) -> list[Row]:
    return [try_block(variant, group) for variant in find_variants()]


def render(rows: list[Row]) -> str:
    version = import_module("transformers").__version__
    served = [row for row in rows if row.is_served]
    refused = [row for row in rows if not row.is_served]
    lines = [
        "# MoE blocks of transformers, read by structure",
        "",
        f"Made by `python -m tests.integrations.block_table` with transformers {version}: every "
        "class that keeps experts, tiny, through `ExpertParallelMoE.from_transformers`. "
        f"{len(served)} are served, forward and all gradients equal to the block's own to "
        f"{FP32_TOLERANCE:g} of the largest value; {len(refused)} are refused, with the sentence "
        "that a user sees. `register_expert_parallel` serves whole models with any of them whose "
        "experts carry transformers' `@use_experts_implementation`.",
        "",
        "## Served",
        "",
        "RoutingSpec: a preset was confirmed by the router. Its router: no preset describes what "
        "the block's own router computes, so the router itself chooses.",
        "",
        "| model | block | routing |",
        "|---|---|---|",
    ]
    lines += [f"| {row.variant.model} | {row.variant.name} | {row.routing} |" for row in served]
    lines += ["", "## Refused", "", "| model | block | why |", "|---|---|---|"]
    for row in refused:
        why = row.refusal or f"off by {row.error:.1g}: a fault of epcomm"
        why = re.sub(r"\s+", " ", why).replace("|", "\\|").removeprefix("from_transformers: ")
        why = why.removesuffix(f"; {REMEDY}")
        lines.append(f"| {row.variant.model} | {row.variant.name} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the document, and fail if a block was served wrongly."""
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            with EPGroup() as group:
                rows = table(group)
        finally:
            dist.destroy_process_group()
    DOCUMENT.write_text(render(rows), encoding="utf-8")
    served = [row for row in rows if row.is_served]
    print(f"{len(served)} served, {len(rows) - len(served)} refused: {DOCUMENT}")
    wrong = [row.variant.name for row in rows if not row.is_served and not row.refusal]
    if wrong:
        raise SystemExit(f"served, and not equal: {wrong}")


if __name__ == "__main__":
    main()
