"""Run decoder layers of Qwen3-MoE and DeepSeek-V3 on two micro-batches in turn.

    scripts/launch_multi_rank.sh 2 examples/two_micro_batches.py

While the rows of one micro-batch are sent, the other one computes, forward and backward. Results
and gradients are compared with those of one micro-batch after the other. The models are small and
random, and each rank has its own tokens.
"""

import os
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

# Nothing is loaded from the Hub.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModel

from epcomm import EPConfig, EPGroup, ExpertParallelMoE, interleave

# A module of transformers, which does not declare the types of its parts.
Part: TypeAlias = Any

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
}
MODELS: Mapping[str, Mapping[str, object]] = {
    "qwen3_moe": {"num_experts": 8, "head_dim": 8},
    # The first layer is dense, and each other one has a shared expert.
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
# The sequences of a micro-batch, and their tokens.
NUM_SEQUENCES, LENGTH = 2, 16


# --8<-- [start:layers]
def run_layer(
    layer: Part, x: Tensor, positions: tuple[Tensor, Tensor], **attention: object
) -> Generator[None, None, Tensor]:
    """Compute a decoder layer of either model, and yield while its tokens are sent."""
    options = {"attention_mask": None, "position_embeddings": positions, **attention}
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(x), **options)
    x = x + attended
    tokens = layer.post_attention_layernorm(x)
    if isinstance(layer.mlp, ExpertParallelMoE):
        y = yield from layer.mlp.steps(tokens)
    else:
        y = layer.mlp(tokens)
    return x + y


def run_layers(model: Part, x: Tensor) -> Generator[None, None, Tensor]:
    """Compute all decoder layers."""
    positions = positions_of(model, x)
    for layer in model.layers:
        x = yield from run_layer(layer, x, positions)
    return x


# --8<-- [end:layers]


def positions_of(model: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rotary embeddings of the positions of x [sequences, positions, H]."""
    return model.rotary_emb(x, position_ids=torch.arange(x.shape[1], device=x.device)[None])


def make_model(
    name: str,
    group: EPGroup,
    config: EPConfig,
    sizes: Mapping[str, object] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Part:
    """Make a model whose MoE blocks are replaced, equal on all ranks. Collective: yes.

    sizes: those that differ from SIZES and MODELS.
    """
    torch.manual_seed(0)
    made = {**SIZES, **MODELS[name], **(sizes or {})}
    model = AutoModel.from_config(AutoConfig.for_model(name, **made)).to(dtype)
    for layer in model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp = ExpertParallelMoE.from_transformers(layer.mlp, group, config)
    return model


def gradients(model: Part, batches: list[Tensor]) -> dict[str, Tensor]:
    """Return the gradients of parameters and micro-batches, and reset them."""
    named = {**dict(model.named_parameters()), **{f"x {n}": x for n, x in enumerate(batches)}}
    found = {name: each.grad for name, each in named.items() if each.grad is not None}
    for each in named.values():
        each.grad = None
    return found


def compare(model: Part, batches: list[Tensor]) -> tuple[bool, bool]:
    """Return whether results, and whether gradients, have the bits of the layers' own forward.

    Collective: yes.
    """
    expected = []
    for x in batches:
        y = x
        for layer in model.layers:
            y = layer(y, position_embeddings=positions_of(model, x))
        y.square().mean().backward()
        expected.append(y.detach())
    expected_gradients = gradients(model, batches)

    # --8<-- [start:turns]
    with torch.no_grad():
        ys = interleave(*(run_layers(model, x) for x in batches))

    trained = interleave(*(run_layers(model, x) for x in batches))
    # One backward pass of both: autograd runs their nodes in turn too.
    torch.stack([y.square().mean() for y in trained]).sum().backward()
    # --8<-- [end:turns]

    found = gradients(model, batches)
    assert found.keys() == expected_gradients.keys()
    same_ys = all(map(torch.equal, [*ys, *trained], [*expected, *expected]))
    return same_ys, all(torch.equal(found[name], each) for name, each in expected_gradients.items())


def main() -> None:
    """Compare both models."""
    dist.init_process_group("gloo")
    config = EPConfig(mode="normal", max_tokens_per_rank=NUM_SEQUENCES * LENGTH)
    with EPGroup() as group:
        for name in MODELS:
            model = make_model(name, group, config)
            torch.manual_seed(1 + group.rank)
            batches = [
                torch.randn(NUM_SEQUENCES, LENGTH, SIZES["hidden_size"]).requires_grad_()
                for _ in range(2)
            ]
            ys, grads = compare(model, batches)
            print(f"{name}, rank {group.rank}: equal results {ys}, gradients {grads}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
