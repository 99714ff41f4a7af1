"""Policies over the buffers: what is checked, how gradients flow, which records come back."""

from epcomm.dispatchers.base import Dispatcher
from epcomm.dispatchers.deepep_low_latency import DeepEPLowLatencyDispatcher
from epcomm.dispatchers.deepep_normal import DeepEPNormalDispatcher
from epcomm.dispatchers.standard import StandardDispatcher

__all__ = [
    "DeepEPLowLatencyDispatcher",
    "DeepEPNormalDispatcher",
    "Dispatcher",
    "StandardDispatcher",
]
