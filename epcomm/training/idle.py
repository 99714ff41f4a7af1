"""Run steps on a rank without data, so that the other ranks can continue."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from epcomm.errors import ConfigError
from epcomm.layers import ExpertParallelLayer, expert_parallel_layers
from epcomm.routing.gates import named_gates, unobserved


def idle_step(
    model: nn.Module, *, backward: bool | None = None, run_token: Callable[[], object] | None = None
) -> None:
    """Take part in a step of the other ranks, on a rank that has no data.

    It calls every expert-parallel layer in the order of registration, without a token, and in
    training runs backward through the layers in reverse, so that the collectives pair up with the
    collectives of ranks that have data. A transformers model that was loaded with epcomm, or is
    inside FSDP or DDP, runs one token instead, with a loss of 0, because the ranks of such a model
    run the collectives of the whole model.

    Args:
        model: the model that other ranks call in this step.
        backward: the other ranks run backward; None: if grad mode is on here.
        run_token: runs the model on one token and returns its output: a tensor, or a mapping,
            tuple, list or dataclass of tensors and other things, as models of transformers do. It
            is needed for models inside DDP or FSDP that do not take input_ids, and where other
            ranks recompute activations.

    Collective: yes, instead of one forward, and its backward.   Host sync: as the layers.
    Raises:
        ConfigError: the model has no expert-parallel layer; or the model is inside FSDP or DDP and
            does not say that it takes input_ids, raised on this rank alone; or backward is
            requested and run_token returned no tensor that requires grad, though layers returned
            one. The last is raised after backward through these layers, so that other ranks do not
            wait. In a model loaded by transformers other ranks do wait, and only an output without
            any floating-point tensor is refused.
    """
    layers = expert_parallel_layers(model)
    if not layers:
        raise ConfigError(
            f"idle_step: {type(model).__name__} has no expert-parallel layer; build it with "
            "ExpertParallelMoE, or load it with ep_implementation='epcomm'"
        )
    backward = torch.is_grad_enabled() if backward is None else backward
    # The additional token is not part of the routes that are recorded or replayed.
    with torch.set_grad_enabled(backward), unobserved(named_gates(model).values()):
        if run_token is None:
            output, of_layers = _run_idle(model, layers), []
        else:
            with _collecting_results(layers) as of_layers:
                output = run_token()
        if not backward:
            return
        found = list(_float_tensors(output))
        lacks_history = not any(tensor.requires_grad for tensor in found)
        # Backward through the tensors that have a history, with gradients of 0.
        results = of_layers if lacks_history else found
        losses = [each.float().sum() * 0 for each in results if each.requires_grad]
        if losses:
            torch.autograd.backward(losses)
    if lacks_history and (not found or any(y.requires_grad for y in of_layers)):
        raise ConfigError(
            f"idle_step: run_token returned {type(output).__name__} without a tensor that requires "
            "grad, expected the output of the model; return model(one_token), or its logits"
        )


def _run_idle(model: nn.Module, layers: list[ExpertParallelLayer]) -> object:
    wrapper = _wrapper_of(model) if layers[0].idles_alone else "transformers"
    if wrapper is not None:
        # Models of transformers name their first argument in main_input_name.
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
    """Name the wrapper whose ranks run a whole model together; None if the layers alone do."""
    if isinstance(model, DistributedDataParallel):
        return "DDP" if torch.is_grad_enabled() else None
    # A program that uses FSDP has imported its module.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return None
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return "FSDP" if any(isinstance(part, kinds) for part in model.modules()) else None


def _float_tensors(output: object) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a model's output, however deep they are nested."""
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
    """Collect in a list, within the context, the results of the layers that are modules."""
    results: list[Tensor] = []

    def keep(_: nn.Module, __: object, y: Tensor) -> None:
        results.append(y)

    with ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, nn.Module):
                stack.callback(layer.register_forward_hook(keep).remove)
        yield results
