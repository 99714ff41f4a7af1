"""The plain model of transformers, and its loss and gradient norms."""

import os
from dataclasses import dataclass

import torch
from text_data import Batch
from torch import Tensor, nn

# The model is constructed by code, so transformers needs no network.
os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

NUM_BYTE_VALUES = 256
NUM_EXPERTS_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Options of the model; 4 layers of 32 experts have 3.4 million parameters.

    skew: initial ratio of the logits of the first expert to those of the last.
    """

    num_layers: int
    num_experts: int
    skew: float = 1.0


def build_model(size: ModelSize, *, seed: int) -> Qwen3MoeForCausalLM:
    """Return a byte-level Qwen3-MoE model in float32, equal on all ranks with the same seed."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=NUM_BYTE_VALUES,
        hidden_size=128,
        num_hidden_layers=size.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=64,
        num_experts=size.num_experts,
        num_experts_per_tok=NUM_EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config)
    # A loop over experts, so that it uses other operations than the runner under test.
    model.set_experts_implementation("eager")
    # Experts with logits of larger magnitude are chosen more often.
    scale = torch.logspace(1, 0, size.num_experts, base=size.skew).unsqueeze(1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.get_parameter("mlp.gate.weight").mul_(scale)
    return model


def next_byte_loss(model: Qwen3MoeForCausalLM, batch: Batch, num_tokens: int) -> Tensor:
    """Return the cross entropy summed over `batch`, divided by the tokens of all ranks.

    The sum over ranks is then the mean loss, even if ranks have different numbers of tokens.
    """
    logits = model(input_ids=batch.inputs).logits
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), reduction="none"
    )
    # Sum in float64 to keep differences that a float32 sum would round away.
    return losses.double().sum() / num_tokens


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """Return the gradient norms by name of the parameter; 0 if this rank has no gradient."""
    return {
        # Sum in float64, so that the comparison does not measure the rounding of this sum.
        name: 0.0 if parameter.grad is None else float(parameter.grad.double().norm())
        for name, parameter in model.named_parameters()
    }
