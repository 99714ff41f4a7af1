import tempfile
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from epcomm import EPConfig, EPGroup, ExpertParallelMoE, ShapeError
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error
from epcomm.training.checkpoints import gather_state_dict
from epcomm.training.gradients import sum_replicated_gradients
from tests.cases.blocks import MODEL_SIZES

NUM_RANKS = 2
pytestmark = pytest.mark.ranks(NUM_RANKS)


def qwen3_moe(num_layers: int = 1) -> PreTrainedModel:
    """Make a model that is equal on all ranks; its checkpoints have a tensor for each expert."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**MODEL_SIZES, "num_hidden_layers": num_layers}
    config = Qwen3MoeConfig(**sizes, moe_intermediate_size=8, num_experts=8)
    return Qwen3MoeForCausalLM(config)


def gpt_oss() -> PreTrainedModel:
    """Make a model whose checkpoints have all experts in one tensor."""
    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(**MODEL_SIZES, num_hidden_layers=1, num_local_experts=8))


def spread(
    model: PreTrainedModel, group: EPGroup, config: EPConfig | None = None
) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.mlp = ExpertParallelMoE.from_transformers(layer.mlp, group, config)
    return model


def assert_whole(folder: str, source: PreTrainedModel) -> None:
    saved = type(source).from_pretrained(folder).state_dict()
    for name, tensor in source.state_dict().items():
        assert torch.equal(saved[name], tensor), name


def test_save_pretrained_of_experts_in_one_tensor_wants_a_gathered_state(group: EPGroup) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = spread(gpt_oss(), group)
        if group.rank == 0:
            with pytest.raises(ShapeError, match=r"write whole tensors, .* state_dict=gather_s"):
                model.save_pretrained(folder)
        model.save_pretrained(folder, state_dict=gather_state_dict(model, group))
        if group.rank == 0:
            assert_whole(folder, gpt_oss())


def with_adapters(model: PreTrainedModel) -> nn.Module:
    """Add adapters of the experts and of a replicated layer, filled from a seed."""
    config = LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(adapted.named_parameters()):
            if "lora" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return adapted


def test_adapters_of_experts_train_as_in_one_process() -> None:
    def loss_of(model: nn.Module, rank: int) -> Tensor:
        ids = torch.arange(6).view(1, 6) + rank
        return model(input_ids=ids, labels=ids).loss / NUM_RANKS

    alone = with_adapters(qwen3_moe())
    losses = [loss_of(alone, rank) for rank in range(NUM_RANKS)]
    torch.stack(losses).sum().backward()
    with EPGroup() as group:
        model = with_adapters(spread(qwen3_moe(), group))
        loss = loss_of(model, group.rank)
        assert relative_error(loss, losses[group.rank]) <= FP32_TOLERANCE
        loss.backward()
        # Each rank has the gradients of its own experts' adapters.
        sum_replicated_gradients(model, group)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert relative_error(gradient, wanted[name]) <= FP32_TOLERANCE, name
