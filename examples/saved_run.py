"""The files of a run: its state after one step, and its losses."""

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
    """The data that a resumed run needs in addition to the state.

    step: step after which the state was saved.   num_batches: batches per step.
    losses: losses of all steps, in order.
    """

    step: int
    num_batches: int
    losses: Sequence[float]


def save_state(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Save model and optimizer; each rank writes its experts. Collective: yes."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    save(state, checkpoint_id=folder)


def load_state(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load a state of any number of ranks; each rank reads its experts. Collective: yes."""
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
    """Write `facts` to the folder of the state, on one rank. Local."""
    (folder / "run.json").write_text(json.dumps(vars(facts)))


def read_facts(folder: Path) -> RunFacts:
    """Return the facts that write_facts() wrote. Local."""
    return RunFacts(**json.loads((folder / "run.json").read_text()))
