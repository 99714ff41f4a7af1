"""The drop-in for deep_ep V2, held to what the real package refuses and leaves undefined.

What moves rows is epcomm.integrations.deep_ep. Here the limits of the real package come on top,
poison where it leaves memory unwritten, and other orders of rows where it leaves them open.
Source: values recorded from the real package on GPUs.
"""

from __future__ import annotations

from epcomm.integrations.deep_ep import EPHandle, EventHandle, EventOverlap, topk_idx_t
from fakes.deep_ep.strict_v2.buffer import ElasticBuffer

# Tells a caller that tensors and ranks are on CPUs, where the package would want GPUs.
CPU_RANKS = True

__version__ = "2.1.0"

__all__ = [
    "CPU_RANKS",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "topk_idx_t",
]
