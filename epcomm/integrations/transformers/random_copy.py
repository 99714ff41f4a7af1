"""Copy modules with random float32 values on the CPU, and measure how far two results differ."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def on_cpu() -> Iterator[None]:
    """Compute in float32 with gradients on the CPU, whatever the caller's contexts ask for."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
    ):
        yield


def copy_with(block: nn.Module, large: Mapping[str, nn.Module]) -> nn.Module:
    """Copy the block with other modules of these names, and with new tensors."""
    memo: dict[int, object] = {id(config): config for config in configs_in(block)}
    memo |= {id(block.get_submodule(name)): module for name, module in large.items()}
    for name, module in block.named_modules():
        if name.partition(".")[0] in large:
            continue
        for tensor in module.parameters(recurse=False):
            values = torch.zeros(tensor.shape, dtype=torch.float32)
            memo[id(tensor)] = nn.Parameter(values, requires_grad=tensor.requires_grad)
        for tensor in module.buffers(recurse=False):
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            memo[id(tensor)] = torch.zeros(tensor.shape, dtype=dtype)
    return copy.deepcopy(block, memo)


def configs_in(module: nn.Module) -> list[object]:
    """Return the configurations in a module, which need no copy."""
    found = (vars(each).get("config") for each in module.modules())
    return [config for config in found if config is not None]


def fill(block: nn.Module, generator: torch.Generator, num_experts: int) -> None:
    """Fill in random values; rows of matrices sum to about -1, so that ones give that logit."""
    for tensor in (*block.parameters(), *block.buffers()):
        if is_table(tensor):
            rows = torch.rand(
                tensor.shape[0], num_experts, generator=generator, dtype=torch.float32
            ).argsort(dim=1)
            tensor.copy_(rows[:, : tensor.shape[1]])
        elif tensor.is_floating_point():
            values = torch.randn(tensor.shape, generator=generator, dtype=torch.float32) / 10
            if tensor.dim() == 2 and tensor.shape[1] > 1:
                values = values / tensor.shape[1] ** 0.5 - 1 / tensor.shape[1]
            tensor.copy_(values)


def is_table(tensor: Tensor) -> bool:
    """Return whether a tensor of a router holds the experts of each token id."""
    return tensor.dim() == 2 and not tensor.is_floating_point()


def row_error(found: Tensor | None, wanted: Tensor | None) -> float:
    """Return the largest difference relative to its row's largest value; inf if one is None."""
    if found is None or wanted is None:
        return 0.0 if found is wanted else float("inf")
    if found.shape != wanted.shape:
        return float("inf")
    rows = [
        each.detach().reshape(-1, each.shape[-1] if each.dim() else 1) for each in (found, wanted)
    ]
    scale = rows[1].abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((rows[0] - rows[1]).abs().amax(dim=1) / scale).max())
