"""Dispatchers add checks, autograd and records to the buffers."""

from epcomm.dispatchers.dispatcher import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    Dispatcher,
    StandardDispatcher,
)

__all__ = ["Dispatcher", "StandardDispatcher"]
__all__ += ["DeepEPLowLatencyDispatcher", "DeepEPNormalDispatcher"]
