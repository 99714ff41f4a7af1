"""The drop-in for deep_ep V2, held to what the real package refuses and leaves undefined.

epcomm.integrations.deep_ep moves the rows. This package adds the limits of the real package, poison
where it leaves memory unwritten, and varying orders of rows where it defines none.
Source: values recorded from the real package on GPUs.
"""

from epcomm.integrations.deep_ep import EPHandle, EventHandle, EventOverlap, topk_idx_t
from fakes.deep_ep.strict_v2.buffer import ElasticBuffer

# Callers read from this attribute that tensors and ranks are on CPUs; the real package needs GPUs.
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
