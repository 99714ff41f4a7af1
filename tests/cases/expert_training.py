"""Training of the model of expert_models.py over ranks, with checkpoints by torch."""

from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from epcomm import EPConfig, EPGroup, ExpertPlacement, balance
from epcomm.training.gradients import (
    sum_expert_gradients,
    sum_replica_gradients,
    sum_replicated_gradients,
)
from tests.cases.expert_models import NUM_EXPERTS, OverRanks, tokens
from tests.cases.meshes import mesh_of

# Relative difference of losses after a checkpoint was loaded on other ranks, as the library
# documents it.
LOSS_TOLERANCE = 1e-5


def loads(seed: int) -> list[float]:
    numbers = torch.rand(NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    return (numbers**4).tolist()


class Training:
    """Experts over `ep_size` ranks, with copies on the others, and an optimizer.

    num_redundant: copies on the same ranks; None: experts are not placed.
    """

    def __init__(
        self,
        ep_size: int,
        num_redundant: int | None = None,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        mesh = mesh_of((dist.get_world_size() // ep_size, ep_size), ("dp", "ep"))
        self.group, self.copies, self.all = EPGroup(mesh["ep"]), EPGroup(mesh["dp"]), EPGroup()
        self.model = OverRanks(self.group, config=EPConfig(redundant_experts=num_redundant))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.01, foreach=foreach, fused=fused
        )

    def close(self) -> None:
        for group in (self.group, self.copies, self.all):
            group.close()

    def place(self, seed: int) -> ExpertPlacement:
        return balance(
            loads(seed),
            num_ranks=self.group.world_size,
            num_physical_experts=self.model.experts.num_experts,
        )

    def backward(self, number: int) -> Tensor:
        self.optimizer.zero_grad()
        num_ranks = dist.get_world_size()
        loss = self.model(tokens(number * num_ranks + dist.get_rank())) / num_ranks
        loss.backward()
        sum_replica_gradients(self.model)
        sum_expert_gradients(self.model, self.copies)
        sum_replicated_gradients(self.model, self.all)
        return loss.detach()

    def step(self, number: int) -> float:
        """Take a step; the mean of the losses of all ranks, which is the same for any ep_size."""
        total = self.backward(number)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total)

    def save(self, folder: Path) -> None:
        writing = async_save(self._state(), checkpoint_id=folder)
        assert isinstance(writing, Future)
        writing.result()

    def load(self, folder: Path) -> None:
        state = self._state()
        load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}
