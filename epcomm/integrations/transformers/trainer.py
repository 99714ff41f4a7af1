"""Train models whose blocks are ExpertParallelMoEs with transformers' Trainer.

Trainer would wrap such a model in DDP, which refuses experts; only the first rank would save, and
the optimizer of that rank would be saved for all. So the model takes Trainer's path for models that
transformers has cut itself: Trainer takes the mean of the gradients of parameters that every rank
holds, and saves on all ranks. On that path Trainer does not resume, so a callback loads the
optimizer, and the model too, because Trainer does not find experts in checkpoints that have a
tensor for each expert.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from epcomm.errors import ConfigError
from epcomm.layers import expert_parallel_layers
from epcomm.training.gradients import scale_expert_gradients, sum_replica_gradients

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

# Name of the folder of our state, inside the folder of a checkpoint.
STATE_FOLDER = "expert_parallel_state"


def prepare_trainer(trainer: Trainer) -> None:
    """Prepare a Trainer to train, save and resume a model with ExpertParallelMoE blocks.

    Call it once, on all ranks, after construction and before train(). Gradients are the mean over
    the ranks, as in data parallelism, and copies of an expert stay equal. Each checkpoint gets a
    folder in which every rank writes its part of model and optimizer.
    train(resume_from_checkpoint=...) reads that folder, on any number of ranks that divides the
    experts, and with any copies.

    Args:
        trainer: a Trainer on the ranks of the model's group. Its args.save_only_model becomes True,
            because Trainer would save the optimizer of one rank.

    Local; saving and resuming are collective.
    Raises:
        ConfigError: the model has no expert-parallel layer; from_pretrained has divided the model,
            which then needs no preparation; FSDP or DeepSpeed is enabled; or other ranks hold
            copies of the experts.
    """
    model = _model_of(trainer)
    problem = _problem_of(trainer, model)
    if problem is not None:
        rank = f"rank {trainer.args.process_index} of {trainer.args.world_size}"
        raise ConfigError(f"prepare_trainer: {problem[0]} ({rank}); {problem[1]}")
    scale_expert_gradients(model, 1 / trainer.args.world_size)
    trainer.is_distributed_loading_by_transformers = True
    trainer.args.save_only_model = True
    trainer.add_callback(_state_callback(trainer))
    _sum_replicas_after_backward(trainer)


def _sum_replicas_after_backward(trainer: Trainer) -> None:
    """Add the gradients of copies at the end of the last backward of a step.

    Trainer's own callbacks run after it has clipped, by norms that count one copy of each expert.
    """
    compute_gradients = trainer.training_step

    def training_step(*args: object, **kwargs: object) -> Tensor:
        loss = compute_gradients(*args, **kwargs)  # type: ignore[arg-type]
        if trainer.accelerator.sync_gradients:
            sum_replica_gradients(_model_of(trainer))
        return loss

    trainer.training_step = training_step


def _problem_of(trainer: Trainer, model: nn.Module) -> tuple[str, str] | None:
    """Return what keeps a Trainer from training a model, and the remedy; None if nothing does."""
    layers, num_ranks = expert_parallel_layers(model), trainer.args.world_size
    if not layers:
        return (
            f"{type(model).__name__} has no expert-parallel layer",
            "replace its blocks by ExpertParallelMoE.from_transformers before the Trainer is made",
        )
    if trainer.is_distributed_loading_by_transformers:
        return (
            f"{type(model).__name__} was spread by from_pretrained, or the Trainer prepared before",
            "leave the call out",
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return (
            "FSDP or DeepSpeed is enabled, which cannot cut experts",
            "leave it out of the TrainingArguments, or load the model with "
            "ep_implementation='epcomm', see register_expert_parallel",
        )
    sizes = {layer.group.world_size for layer in layers}
    if sizes != {num_ranks}:
        return (
            f"experts are spread over {sorted(sizes)} ranks, expected all {num_ranks}, because "
            "Trainer does not add up gradients of copies",
            "pass from_transformers a group of all ranks",
        )
    return None


def _state_callback(trainer: Trainer) -> TrainerCallback:
    from transformers import TrainerCallback

    class ExpertParallelState(TrainerCallback):
        def on_save(self, *_: object, **__: object) -> None:
            folder = _checkpoint_folder(trainer)
            # Trainer itself reads these files when it resumes.
            trainer._save_rng_state(str(folder))
            trainer._save_scaler(str(folder))
            save(_state_of(trainer), checkpoint_id=folder / STATE_FOLDER)

        def on_train_begin(self, *_: object, **__: object) -> None:
            if trainer.state.global_step:
                _resume(trainer, _checkpoint_folder(trainer) / STATE_FOLDER)

    return ExpertParallelState()


def _checkpoint_folder(trainer: Trainer) -> Path:
    return Path(str(trainer.args.output_dir)) / f"checkpoint-{trainer.state.global_step}"


def _state_of(trainer: Trainer) -> dict[str, Any]:
    model, optimizer = get_state_dict(_model_of(trainer), _optimizer_of(trainer))
    return {"model": model, "optimizer": optimizer, "scheduler": trainer.lr_scheduler}


def _resume(trainer: Trainer, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"prepare_trainer: {folder} is missing, from which step {trainer.state.global_step} "
            f"resumes (rank {trainer.args.process_index} of {trainer.args.world_size}); set "
            "output_dir to the folder of the checkpoint, and save with a prepared Trainer"
        )
    state = _state_of(trainer)
    load(state, checkpoint_id=folder)
    set_state_dict(
        _model_of(trainer),
        _optimizer_of(trainer),
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def _model_of(trainer: Trainer) -> nn.Module:
    model = trainer.model
    assert isinstance(model, nn.Module), "a Trainer has a model"
    return model


def _optimizer_of(trainer: Trainer) -> Optimizer:
    """Return the optimizer inside the wrapper that accelerate puts around it."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert isinstance(optimizer, Optimizer), "train() has made one"
    return optimizer
