"""Imitate deep_ep V2: ElasticBuffer's dispatch and combine between processes on CPUs.

It follows values recorded from the package on GPUs. What the package leaves undefined is poison
here, and what it leaves unordered is shuffled, so that code which relies on either fails.

One host, one NVLink domain: no hybrid mode, and none of the experimental calls.
"""

from fakes.deep_ep.v2.buffer import ElasticBuffer
from fakes.deep_ep.v2.events import EventHandle, EventOverlap
from fakes.deep_ep.v2.handle import EPHandle, topk_idx_t

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
