"""Say what a run leaves in a folder: its state at one step, and the losses that it went on to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Hold what a run on other ranks needs to know besides the state.

    step: after which the state was saved.   num_batches: of each step.
    losses: of all steps, the first one first.
    """

    step: int
    num_batches: int
    losses: Sequence[float]


def save_state(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write the state of model and optimizer; each rank writes its experts. Collective: yes."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    save(state, checkpoint_id=folder)


def load_state(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Read what any number of ranks wrote; each rank reads its experts. Collective: yes."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def write_facts(folder: Path, facts: RunFacts) -> None:
    """Write them beside the state; one rank does. Local."""
    (folder / "run.json").write_text(json.dumps(vars(facts)))


def read_facts(folder: Path) -> RunFacts:
    """Read what write_facts() wrote. Local."""
    return RunFacts(**json.loads((folder / "run.json").read_text()))
