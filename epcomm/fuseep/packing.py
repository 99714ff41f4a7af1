"""Packed experts beside those of the checkpoint, packed anew whenever these have changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic

import torch
from torch import Tensor

from epcomm.fuseep.base import FusedBackend, PackedT
from epcomm.weights.quantized import Int8ChannelWeights
from epcomm.weights.written import WriteState


class PackedExperts(Generic[PackedT]):
    """One layer's experts as its operator reads them.

    The originals stay, for state_dict and for reloading; both take memory.
    """

    def __init__(self, operator: FusedBackend[PackedT]) -> None:
        self._operator = operator
        self._states: dict[str, WriteState] = {}
        self._packed: PackedT | None = None

    def of(self, weights: Int8ChannelWeights) -> PackedT:
        """What pack() makes of the weights as they are now.

        A write through `.data` leaves the version of its tensor as it was; then comes forget().

        Local.   Host sync: none.
        Raises:
            ConfigError: tensors that were made in inference mode, which do not tell when they are
                written.
        """
        tensors = weights.tensors()
        states = {name: WriteState.of(name, each, "fuseep") for name, each in tensors.items()}
        if self._packed is None or not self._is_of(tensors):
            # The old ones are freed first: two copies beside the originals might not fit.
            self._packed, self._states = None, {}
            with torch.no_grad():
                self._packed = self._operator.pack(weights)
            self._states = states
        return self._packed

    def _is_of(self, tensors: Mapping[str, Tensor]) -> bool:
        return all(self._states[name].is_of(tensor) for name, tensor in tensors.items())

    def forget(self) -> None:
        """Pack at the next call, whatever the tensors tell."""
        self._states, self._packed = {}, None
