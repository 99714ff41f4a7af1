"""A tiny model with routed experts, over ranks and in one process, without transformers."""

import torch
from torch import Tensor, nn

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, ExpertWeights, TopKOutput
from epcomm.sharding.expert_tensor import ExpertTensor
from epcomm.weights.unquantized import ExpertTensors

NUM_EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 16, 8, 2


def expert_weights(device: torch.device | str = "cpu") -> ExpertWeights:
    """Return all experts as plain tensors, equal on every rank."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) / 4
    second = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / 4
    return ExpertWeights(gate_up_proj=first.to(device), down_proj=second.to(device))


def tokens(number: int) -> Tensor:
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(100 + number))


def chosen_experts(num_tokens: int) -> Tensor:
    """Return fixed ids [T, K] that use every expert."""
    return (torch.arange(num_tokens * TOP_K) * 3 % NUM_EXPERTS).view(num_tokens, TOP_K)


class OverRanks(nn.Module):
    """A linear layer and experts of a group; forward returns a loss."""

    def __init__(
        self, group: EPGroup, weights: ExpertTensors | None = None, config: EPConfig | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        weights = weights or expert_weights()
        self.experts = ExpertParallelExperts(weights, group, config, top_k=TOP_K)

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss, the mean over tokens, for x [T, H]."""
        ids = chosen_experts(x.shape[0])
        topk = TopKOutput(topk_ids=ids, topk_weights=torch.full(ids.shape, 0.5))
        return self.experts(self.linear(x), topk).square().mean()


def some_parameter(group: EPGroup, name: str = "down_proj") -> ExpertTensor:
    parameter = OverRanks(group).experts.get_parameter(name)
    assert isinstance(parameter, ExpertTensor)
    return parameter


class InOneProcess(nn.Module):
    """The same model as a loop over tokens, with the same parameter names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.experts = nn.ParameterDict(
            {name: nn.Parameter(tensor) for name, tensor in expert_weights().tensors().items()}
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss, the mean over tokens, for x [T, H]."""
        ys = []
        for token, ids in zip(self.linear(x), chosen_experts(x.shape[0]), strict=True):
            gates_ups = [self.experts["gate_up_proj"][expert] @ token for expert in ids]
            inner = [nn.functional.silu(a[:INTERMEDIATE]) * a[INTERMEDIATE:] for a in gates_ups]
            outs = [
                self.experts["down_proj"][expert] @ row
                for expert, row in zip(ids, inner, strict=True)
            ]
            ys.append(torch.stack(outs).sum(0) / 2)
        return torch.stack(ys).square().mean()
