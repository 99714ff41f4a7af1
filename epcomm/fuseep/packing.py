"""Keep packed experts beside the experts of the checkpoint, and pack them anew after a change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic

import torch
from torch import Tensor

from epcomm.fuseep.base import FusedBackend, PackedT
from epcomm.weights.quantized import Int8ChannelWeights
from epcomm.weights.written import WriteState


class PackedExperts(Generic[PackedT]):
    """The experts of one layer in the form that its operator reads.

    The experts of the checkpoint stay, for state_dict and for reloading; both take memory.
    """

    def __init__(self, operator: FusedBackend[PackedT]) -> None:
        self._operator = operator
        self._states: dict[str, WriteState] = {}
        self._packed: PackedT | None = None

    def of(self, weights: Int8ChannelWeights) -> PackedT:
        """Return the packed form of the current weights, packing them if they have changed.

        A write through `.data` does not change the version of a tensor; call forget() after it.

        Local.   Host sync: none.
        Raises:
            ConfigError: a tensor was made in inference mode, where torch counts no writes.
        """
        tensors = weights.tensors()
        states = {name: WriteState.of(name, each, "fuseep") for name, each in tensors.items()}
        if self._packed is None or not self._is_of(tensors):
            # The old copy is freed first: two copies beside the checkpoint's might not fit.
            self._packed, self._states = None, {}
            with torch.no_grad():
                self._packed = self._operator.pack(weights)
            self._states = states
        return self._packed

    def _is_of(self, tensors: Mapping[str, Tensor]) -> bool:
        return all(self._states[name].is_of(tensor) for name, tensor in tensors.items())

    def forget(self) -> None:
        """Drop the packed experts, so that the next call packs them anew."""
        self._states, self._packed = {}, None
