"""Training on one rank, which holds its experts of every layer and a copy of everything else."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from comparison import StepResult
from generation import Generated, gather_generated, generate
from plain_model import gradient_norms, next_byte_loss
from report import MoveRecord
from saved_run import load_state, save_state
from text_data import Batch
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM

from epcomm import (
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    ExpertParallelMoE,
    Mode,
    TopKOutput,
    balance,
    idle_step,
)
from epcomm.placement.recorder import LoadRecorder, loads_of_ranks
from epcomm.sharding.shards import replicated_parameters, sharded_parameters
from epcomm.training.checkpoints import gather_state_dict
from epcomm.training.gradients import sum_replica_gradients, sum_replicated_gradients

# A rate three times as large does not train faster. It moves an embedding close to zero, where
# RMSNorm amplifies rounding errors until float32 gradients are inaccurate by 2e-5.
LEARNING_RATE = 1e-3
# Larger gradients, such as those of the first steps, are clipped to this norm.
MAX_GRADIENT_NORM = 1.0


class ExpertParallelTraining:
    """A model whose experts are distributed over the group, and its optimizer."""

    def __init__(
        self, model: Qwen3MoeForCausalLM, group: EPGroup, num_redundant: int | None = None
    ) -> None:
        """Replace every MoE block of `model`, which is equal on all ranks.

        num_redundant: additional copies of experts in each layer, placed by rebalance(); None: no
            expert moves.

        Collective: yes.
        """
        self._group = group
        self._model = model
        # Normal mode for training and prompts; low latency for decode, one token per rank and step.
        config = EPConfig(
            mode=Mode.AUTO,
            max_tokens_per_rank=1,
            redundant_experts=num_redundant,
            record_load=num_redundant is not None,
        )
        self._moe_layers = _spread_experts(model, group, config)
        self._recorder = None
        if num_redundant is not None:
            tables = {str(place): moe.load_table for place, moe in enumerate(self._moe_layers)}
            self._recorder = LoadRecorder(tables)
        self._chosen_experts: list[Tensor] = []
        for moe in self._moe_layers:
            moe.experts.register_forward_pre_hook(self._note_chosen_experts)
        # Make the optimizer after the blocks were replaced, because their parameters are new.
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def compute_gradients(self, batches: Sequence[Batch | None]) -> StepResult:
        """Run forward and backward of this rank's batches, and return the result over all ranks.

        Collective: yes, with equally many entries on every rank; None if a rank has no batch.
        """
        self._optimizer.zero_grad()
        self._chosen_experts.clear()
        num_tokens = torch.tensor(sum(batch.num_tokens for batch in batches if batch is not None))
        dist.all_reduce(num_tokens)
        loss = 0.0
        for batch in batches:
            if batch is None:
                # The experts of this rank still compute the tokens of other ranks.
                idle_step(self._model)
            else:
                own_loss = next_byte_loss(self._model, batch, int(num_tokens))
                own_loss.backward()
                loss += own_loss.item()
        # Sum, not mean: the loss is already divided by the tokens of all ranks. Gradients of
        # experts are complete, because an expert, or all its copies together, computed the tokens
        # of all ranks.
        sum_replica_gradients(self._model)
        sum_replicated_gradients(self._model, self._group)
        return self._sum_result_over_ranks(loss)

    def update(self, gradient_norm: float) -> None:
        """Clip the gradients and take a step. Local."""
        nn.utils.clip_grads_with_norm_(
            self._model.parameters(), MAX_GRADIENT_NORM, torch.tensor(gradient_norm)
        )
        self._optimizer.step()

    def rebalance(self, step: int) -> MoveRecord:
        """Rebalance each layer by the load since the last call. Collective: yes."""
        assert self._recorder is not None, "experts are placed"
        self._recorder.end_window()
        load = self._recorder.gather(self._group.calls)
        self._optimizer.zero_grad()
        num_ranks, shares = self._group.world_size, []
        for place, moe in enumerate(self._moe_layers):
            counts = torch.tensor(load.windows_by_layer[str(place)][-1])
            old = moe.experts.placement
            assert old is not None, "experts are placed"
            new = balance(counts, num_ranks=num_ranks, num_physical_experts=moe.experts.num_experts)
            moe.experts.rebalance(new, self._optimizer)
            by_rank = [
                loads_of_ranks(counts, num_ranks=num_ranks, physical_to_logical=experts)
                for experts in (
                    None,
                    torch.tensor(old.physical_to_logical),
                    torch.tensor(new.physical_to_logical),
                )
            ]
            shares.append([float(ranks.max() / ranks.mean()) for ranks in by_rank])
        in_order, before, after = (max(of_layers) for of_layers in zip(*shares, strict=True))
        return MoveRecord(step=step, in_order=in_order, before=before, after=after)

    def save(self, folder: Path) -> None:
        """Save the state, which any number of ranks may load. Collective: yes."""
        save_state(folder, self._model, self._optimizer)

    def load(self, folder: Path) -> None:
        """Load a state that any number of ranks saved. Collective: yes."""
        load_state(folder, self._model, self._optimizer)

    def continue_text(self, prompt: Tensor, num_bytes: int) -> list[Generated]:
        """Return the text that each rank generates after its own prompt [T]. Collective: yes."""
        return gather_generated(generate(self._model, prompt, num_bytes))

    def explain(self) -> str:
        """Describe the parameters and the path of tokens, which is the same in every layer."""
        num_replicated = _num_elements(replicated_parameters(self._model))
        # The size of an expert parameter is that of all ranks.
        num_experts = _num_elements(sharded_parameters(self._model))
        num_local = num_experts // self._group.world_size
        num_parameters = num_replicated + num_experts
        return (
            f"Qwen3-MoE, {num_parameters / 1e6:.1f} M parameters, "
            f"{(num_replicated + num_local) / 1e6:.1f} M of them on each rank\n"
            f"{self._modes()}"
        )

    def _modes(self) -> str:
        """Return the lines of explain() about each phase and the placement."""
        lines = self._moe_layers[0].explain().splitlines()
        return "\n".join(line for line in lines if line.startswith(("mode ", "placement")))

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the state of the whole model, with all experts. Collective: yes."""
        return gather_state_dict(self._model, self._group)

    def gather_routing(self, tokens_by_rank: Sequence[int]) -> list[Tensor]:
        """Return the experts chosen in the last step on rank 0: [T, layers, K] for each rank.

        Collective: yes.
        """
        num_layers = len(self._moe_layers)
        calls = range(0, len(self._chosen_experts), num_layers)
        chosen = torch.cat(
            [torch.stack(self._chosen_experts[call : call + num_layers], dim=1) for call in calls]
        )
        num_others = self._group.world_size - 1
        recv_splits = tokens_by_rank if self._group.rank == 0 else [0] * len(tokens_by_rank)
        gathered = chosen.new_empty(sum(recv_splits), *chosen.shape[1:])
        dist.all_to_all_single(
            gathered, chosen, list(recv_splits), [len(chosen)] + [0] * num_others
        )
        return list(gathered.split(list(recv_splits)))

    def sent_bytes(self) -> int:
        """Return the bytes that the MoE layers of this rank have sent. Local."""
        # Layers of one shape share a buffer, so one layer has the traffic of all.
        return self._moe_layers[0].stats().traffic.total_bytes

    def _sum_result_over_ranks(self, loss: float) -> StepResult:
        # The norm of an expert parameter covers the experts of all ranks.
        norms = gradient_norms(self._model)
        mean_loss = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(mean_loss)
        return StepResult(loss=mean_loss.item(), gradient_norms=norms)

    def _note_chosen_experts(self, experts: nn.Module, args: tuple[Tensor, TopKOutput]) -> None:
        assert isinstance(experts, ExpertParallelExperts)
        topk_ids, placement = args[1].topk_ids, experts.placement
        if args[1].is_physical and placement is not None:
            # The plain model has only one expert for all copies.
            topk_ids = torch.tensor(placement.physical_to_logical)[topk_ids]
        self._chosen_experts.append(topk_ids)


def _spread_experts(
    model: Qwen3MoeForCausalLM, group: EPGroup, config: EPConfig
) -> list[ExpertParallelMoE]:
    moe_layers = []
    for layer in model.model.layers:
        block = layer.get_submodule("mlp")
        layer.mlp = moe = ExpertParallelMoE.from_transformers(block, group, config)
        moe_layers.append(moe)
    return moe_layers


def _num_elements(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
