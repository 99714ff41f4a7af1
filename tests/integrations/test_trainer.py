"""Training with other libraries: transformers' Trainer over accelerate, and FSDP.

A model with its experts over ranks trains, is saved, and resumes from its checkpoint like the whole
model in one process.
"""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from epcomm import ConfigError, EPConfig, EPGroup, ExpertParallelExperts, ExpertParallelMoE
from epcomm.integrations.transformers import prepare_trainer
from epcomm.training.checkpoints import gather_state_dict
from tests.cases.blocks import TOP_K
from tests.cases.shared_folder import shared_folder
from tests.integrations.test_saving_and_lora import qwen3_moe, spread
from tests.placement.layers import any_placement, expect_copies_of

NUM_RANKS, NUM_STEPS, SAVED_STEP, NUM_MICRO_BATCHES = 2, 4, 2, 2
pytestmark = pytest.mark.ranks(NUM_RANKS)
STEP_BATCH = NUM_RANKS * NUM_MICRO_BATCHES
LEARNING_RATE, MAX_NORM = 0.01, 0.1
# Relative difference of losses, as the library documents it.
LOSS_TOLERANCE = 1e-5


def dense_model() -> PreTrainedModel:
    return qwen3_moe(num_layers=2)


def spread_model(group: EPGroup, config: EPConfig | None = None) -> PreTrainedModel:
    return spread(dense_model(), group, config)


class MoveExperts(TrainerCallback):
    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        **_: object,
    ) -> None:
        for place, layer in enumerate(expert_layers(model)):
            placement = any_placement(layer, seed=10 * state.global_step + place)
            layer.rebalance(placement, optimizer)


def expert_layers(model: nn.Module) -> list[ExpertParallelExperts]:
    return [part for part in model.modules() if isinstance(part, ExpertParallelExperts)]


def samples() -> list[dict[str, Tensor]]:
    """Return one sample per rank and micro-batch, in the order in which they are used."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 32, (NUM_STEPS * STEP_BATCH, 9), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def losses_in_one_process() -> list[float]:
    """Train by a plain loop over the mean of the losses of ranks and micro-batches."""
    model = dense_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / NUM_STEPS)
        batch = samples()[step * STEP_BATCH : (step + 1) * STEP_BATCH]
        ids = torch.stack([sample["input_ids"] for sample in batch])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trainer_of(model: nn.Module, folder: Path) -> Trainer:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": MAX_NORM,
        "train_sampling_strategy": "sequential",
        "save_steps": SAVED_STEP,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return Trainer(model, TrainingArguments(**values), train_dataset=samples())


def expect_losses(
    expected: list[float], trainer: Trainer, folder: Path, resumes_at: int | None = None
) -> None:
    """Train, from the beginning or from a checkpoint, and compare the losses of all steps."""
    prepare_trainer(trainer)
    checkpoint = None if resumes_at is None else str(folder / f"checkpoint-{resumes_at}")
    trainer.train(resume_from_checkpoint=checkpoint)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(expected, rel=LOSS_TOLERANCE)


def test_trainer_trains_saves_and_resumes_like_one_process(group: EPGroup) -> None:
    expected = losses_in_one_process()
    with shared_folder() as folder:
        expect_losses(expected, trainer_of(spread_model(group), folder), folder)
        model = spread_model(group)
        expect_losses(expected, trainer_of(model, folder), folder, SAVED_STEP)
        # The file that Trainer itself has written holds the whole model.
        saved = Qwen3MoeForCausalLM.from_pretrained(folder / f"checkpoint-{NUM_STEPS}").state_dict()
        for name, tensor in gather_state_dict(model, group).items():
            assert torch.equal(saved[name], tensor), name


@pytest.mark.slow
def test_trainer_trains_copies_of_experts_that_move_like_one_process(group: EPGroup) -> None:
    expected = losses_in_one_process()
    placed = EPConfig(redundant_experts=4, record_load=True)
    with shared_folder() as folder:
        model = spread_model(group, placed)
        trainer = trainer_of(model, folder)
        trainer.add_callback(MoveExperts())
        expect_losses(expected, trainer, folder)
        whole = gather_state_dict(model, group)
        for place, layer in enumerate(expert_layers(model)):
            prefix = f"model.layers.{place}.mlp.experts."
            expect_copies_of(layer, {n: whole[prefix + n] for n in layer.expert_parameters()})
            block = model.get_submodule(f"model.layers.{place}.mlp")
            assert isinstance(block, ExpertParallelMoE)
            num_tokens = NUM_STEPS * NUM_MICRO_BATCHES * samples()[0]["input_ids"].numel()
            assert int(block.load_table.sum()) == num_tokens * TOP_K
        saved = Qwen3MoeForCausalLM.from_pretrained(folder / f"checkpoint-{NUM_STEPS}").state_dict()
        for name, tensor in whole.items():
            assert torch.equal(saved[name], tensor), name
        # Load without copies of experts, and with different copies.
        for config in (None, EPConfig(redundant_experts=8)):
            resumed = trainer_of(spread_model(group, config), folder)
            expect_losses(expected, resumed, folder, SAVED_STEP)


def test_trainer_that_cannot_be_prepared_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(dense_model(), Path(folder))
        with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM has no expert-parallel layer"):
            prepare_trainer(trainer)
        alone = [dist.new_group([rank]) for rank in range(NUM_RANKS)]
        with EPGroup(alone[dist.get_rank()]) as group:
            trainer = trainer_of(spread_model(group), Path(folder))
            with pytest.raises(ConfigError, match=r"spread over \[1\] ranks, expected all 2"):
                prepare_trainer(trainer)
            trainer.is_fsdp_enabled = True
            with pytest.raises(ConfigError, match="FSDP or DeepSpeed is enabled"):
                prepare_trainer(trainer)
            trainer.is_distributed_loading_by_transformers = True
            with pytest.raises(ConfigError, match=r"spread by from_pretrained, or .* leave the"):
                prepare_trainer(trainer)
