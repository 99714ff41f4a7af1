"""Steps of a rank without data, with which the others go on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from epcomm.errors import ConfigError
from epcomm.layers import ExpertParallelLayer, expert_parallel_layers


def idle_step(
    model: nn.Module,
    *,
    backward: bool | None = None,
    run_token: Callable[[], object] | None = None,
) -> None:
    """Take part in a step of the other ranks without data of one's own.

    Calls every expert-parallel layer in the order in which they are registered, without a token,
    and in training runs backward through them in reverse, so that the collectives pair up with
    those of ranks that have data. A transformers model that was loaded with epcomm, or is inside
    FSDP or DDP, runs one token instead, and its loss counts nothing: these want the collectives of
    the whole model.

    Args:
        model: as it is called elsewhere.
        backward: the other ranks run backward; None: as grad mode says here.
        run_token: runs the model on one token and returns its output: a tensor, or a mapping,
            tuple, list or dataclass of tensors and other things, as models of transformers do; for
            other models inside DDP or FSDP, and where other ranks recompute activations.

    Collective: yes, in place of one forward, and of its backward.   Host sync: as the layers.
    Raises:
        ConfigError: the model has no expert-parallel layer; or it is inside FSDP or DDP, and
            nothing says what it takes, on this rank alone; or backward is wanted and run_token
            returned no tensor that requires grad, though its layers did: after backward through
            these, so that other ranks need not wait. In a model loaded by transformers they do, and
            only what holds no tensor of floats is refused.
    """
    layers = expert_parallel_layers(model)
    if not layers:
        raise ConfigError(
            f"idle_step: {type(model).__name__} has no expert-parallel layer; build it with "
            "ExpertParallelMoE, or load it with ep_implementation='epcomm'"
        )
    backward = torch.is_grad_enabled() if backward is None else backward
    with torch.set_grad_enabled(backward):
        if run_token is None:
            output, of_layers = _run_idle(model, layers), []
        else:
            with _collecting_results(layers) as of_layers:
                output = run_token()
        if not backward:
            return
        found = list(_float_tensors(output))
        lacks_history = not any(tensor.requires_grad for tensor in found)
        _backward_of_nothing(of_layers if lacks_history else found)
    if lacks_history and (not found or any(y.requires_grad for y in of_layers)):
        raise ConfigError(
            f"idle_step: run_token returned {type(output).__name__} without a tensor that requires "
            "grad, expected the output of the model; return model(one_token), or its logits"
        )


def _run_idle(model: nn.Module, layers: list[ExpertParallelLayer]) -> object:
    result = layers[0].idle_model(model)
    if result is not None:
        return result
    wrapper = _wrapper_of(model)
    if wrapper is not None:
        # As models of transformers say it.
        takes = getattr(getattr(model, "module", model), "main_input_name", None)
        group = layers[0].group
        if takes == "input_ids":
            return model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=group.device))
        raise ConfigError(
            f"idle_step: {type(model).__name__} is inside {wrapper}, whose ranks run the whole "
            f"model together ({group.where}); pass run_token=lambda: model(one_token)"
        )
    carry = next(model.parameters()).new_zeros((), dtype=torch.float32)
    for layer in layers:
        carry = layer.idle(carry)
    return carry


def _wrapper_of(model: nn.Module) -> str | None:
    """What makes its ranks run a whole model together; None if the layers alone will do."""
    if isinstance(model, DistributedDataParallel):
        return "DDP" if torch.is_grad_enabled() else None
    # Who uses FSDP has imported it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return None
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return "FSDP" if any(isinstance(part, kinds) for part in model.modules()) else None


def _backward_of_nothing(results: list[Tensor]) -> None:
    """Run backward through what has a history; all gradients are 0."""
    losses = [result.float().sum() * 0 for result in results if result.requires_grad]
    if losses:
        torch.autograd.backward(losses)


def _float_tensors(output: object) -> Iterator[Tensor]:
    """The tensors in what a model returns that may have gradients, whatever it wraps them in."""
    parts: Iterable[object] = ()
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, tuple | list):
        parts = output
    elif is_dataclass(output) and not isinstance(output, type):
        parts = [getattr(output, field.name) for field in fields(output)]
    for part in parts:
        yield from _float_tensors(part)


@contextmanager
def _collecting_results(layers: list[ExpertParallelLayer]) -> Iterator[list[Tensor]]:
    """Within it, what the layers that are modules return is added to the list."""
    results: list[Tensor] = []

    def keep(_: nn.Module, __: object, y: Tensor) -> None:
        results.append(y)

    with ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, nn.Module):
                stack.callback(layer.register_forward_hook(keep).remove)
        yield results
