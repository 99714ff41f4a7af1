"""Find the expert-parallel layers of a model, and set their phase.

A module is such a layer, or has one as an attribute, as transformers' experts do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from epcomm.group import EPGroup
from epcomm.stats import EPStats

_ATTRIBUTE = "epcomm_layer"


@runtime_checkable
class ExpertParallelLayer(Protocol):
    """The methods of a layer that functions over a whole model use.

    is_decoding: whether calls without an explicit phase decode.
    idles_alone: whether a rank without data may call the layer alone; else it runs the whole model.
    """

    is_decoding: bool
    idles_alone: bool

    @property
    def group(self) -> EPGroup:
        """The ranks that share the experts."""
        ...

    def stats(self) -> EPStats:
        """Return counts since construction. Local; no host sync until counts by expert are read."""
        ...

    def idle(self, carry: Tensor) -> Tensor:
        """Take part in a call without a token; `carry` is a float32 scalar, and so is the result.

        The result depends on the layer's y, and that on carry, so that layers chained by it run
        backward in reverse order.

        Collective: yes, instead of the layer's call, and so is its backward.
        """
        ...


def put_in_front(module: nn.Module, layer: ExpertParallelLayer) -> None:
    """Attach `layer`, which is not a module, to `module`, so that the functions here find it."""
    setattr(module, _ATTRIBUTE, layer)


def expert_parallel_layers(model: nn.Module) -> list[ExpertParallelLayer]:
    """Return the layers of a model, in the order in which they are registered."""
    return list(named_expert_parallel_layers(model).values())


def named_expert_parallel_layers(model: nn.Module) -> dict[str, ExpertParallelLayer]:
    """Return the layers of a model by the names of their modules, in the order of registration."""
    found = {
        name: module
        if isinstance(module, ExpertParallelLayer)
        else getattr(module, _ATTRIBUTE, None)
        for name, module in model.named_modules()
    }
    return {name: layer for name, layer in found.items() if layer is not None}


@contextmanager
def decode_phase(model: nn.Module) -> Iterator[None]:
    """Make decode the default phase of every expert-parallel layer of `model`.

    It is for models whose code calls its blocks without a phase. Local; all ranks enter it alike.
    """
    layers = expert_parallel_layers(model)
    before = [layer.is_decoding for layer in layers]
    try:
        for layer in layers:
            layer.is_decoding = True
        yield
    finally:
        for layer, was_decoding in zip(layers, before, strict=True):
            layer.is_decoding = was_decoding
