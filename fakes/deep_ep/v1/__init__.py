"""Imitate deep_ep V1: its Buffer over ranks that are processes on CPUs, through gloo.

Read buffer.py for the calls, normal.py and low_latency.py for what they do.
Source: deepseek-ai/DeepEP, deep_ep/buffers/legacy.py, signatures and documented behaviour, and a
recording of the real package; the code is ours.
"""

from __future__ import annotations

import torch

from fakes.deep_ep.v1.buffer import Buffer
from fakes.deep_ep.v1.config import Config
from fakes.deep_ep.v1.event import EventOverlap

topk_idx_t = torch.int64
# Tells whoever probes a deep_ep that this one needs no GPU.
CPU_RANKS = True

__all__ = ["CPU_RANKS", "Buffer", "Config", "EventOverlap", "topk_idx_t"]
