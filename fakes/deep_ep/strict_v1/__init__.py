"""The drop-in for deep_ep V1, held to what the real package refuses and leaves undefined.

epcomm.integrations.deep_ep moves the rows. This package adds the limits of the real package, NaN
where it leaves memory unwritten, and an order of rows that differs between calls.
Source: deepseek-ai/DeepEP, deep_ep/buffers/legacy.py, and a recording of the real package.
"""

from epcomm.integrations.deep_ep import Config, EventOverlap, topk_idx_t
from fakes.deep_ep.strict_v1.buffer import Buffer

# Programs that probe deep_ep read from this attribute that the fake needs no GPU.
CPU_RANKS = True

__all__ = ["CPU_RANKS", "Buffer", "Config", "EventOverlap", "topk_idx_t"]
