"""Dispatchers add checks, autograd and records to the buffers."""

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
