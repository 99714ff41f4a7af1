"""Packed experts beside those of the checkpoint, packed anew whenever these have changed."""

from __future__ import annotations

from typing import Generic

import torch
from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.fuseep.base import FusedBackend, PackedT
from epcomm.quantized_weights import Int8ChannelWeights

# Where a tensor lies, and how often it was written.
_State = tuple[int, int]


class PackedExperts(Generic[PackedT]):
    """One layer's experts as its operator reads them.

    The originals stay, for state_dict and for reloading; both take memory.
    """

    def __init__(self, operator: FusedBackend[PackedT]) -> None:
        self._operator = operator
        self._states: dict[str, _State] = {}
        # What was packed, so that nothing else comes to lie where it lay.
        self._originals: list[Tensor] = []
        self._packed: PackedT | None = None

    def of(self, weights: Int8ChannelWeights) -> PackedT:
        """What pack() makes of the weights as they are now.

        A write through `.data` leaves the version of its tensor as it was; then comes forget().

        Local.   Host sync: none.
        Raises:
            ConfigError: tensors that were made in inference mode, which do not tell when they are
                written.
        """
        states = {name: _state_of(name, tensor) for name, tensor in weights.tensors().items()}
        packed = self._packed if states == self._states else None
        if packed is None:
            # The old ones are freed first: two copies beside the originals might not fit.
            self._packed, self._originals = None, []
            with torch.no_grad():
                packed = self._packed = self._operator.pack(weights)
            self._states = states
            self._originals = [tensor.detach() for tensor in weights.tensors().values()]
        return packed

    def forget(self) -> None:
        """Pack at the next call, whatever the tensors tell."""
        self._states, self._packed = {}, None


def _state_of(name: str, tensor: Tensor) -> _State:
    if tensor.is_inference():
        raise ConfigError(
            f"fuseep: {name} was made in inference mode, where tensors do not tell when they are "
            "written; load the experts outside of it, under torch.no_grad()"
        )
    return tensor.data_ptr(), tensor._version
