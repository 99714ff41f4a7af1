"""Policies over the buffers: what is checked, how gradients flow, which records come back."""

from epcomm.dispatchers.base import Dispatcher
from epcomm.dispatchers.dispatcher import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    StandardDispatcher,
)

__all__ = [
    "DeepEPLowLatencyDispatcher",
    "DeepEPNormalDispatcher",
    "Dispatcher",
    "StandardDispatcher",
]
