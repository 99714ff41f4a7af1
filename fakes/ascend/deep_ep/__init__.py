"""Imitate the deep_ep of Ascend: its Buffer over ranks that are processes on CPUs.

Read buffer.py for the calls, normal.py, low_latency.py and fused.py for what they do; `soc()` of
fakes.ascend.limits says which chip it is. What fails silently on the device is refused
where it can be seen, and undefined where it cannot.
Source: sgl-project/sgl-kernel-npu, python/deep_ep, signatures and documented behaviour, not checked
on an NPU; the code is ours.
"""

from __future__ import annotations

from fakes.ascend.deep_ep.buffer import Buffer
from fakes.ascend.deep_ep.config import Config
from fakes.ascend.deep_ep.event import EventOverlap
from fakes.ascend.limits import device_name as cpu_device_name

# CPU_RANKS tells whoever probes a deep_ep that this one needs no NPU, and cpu_device_name() what
# chip it stands for.
CPU_RANKS = True

# FuseMode is in deep_ep.buffer alone, as in the real package.
__all__ = ["CPU_RANKS", "Buffer", "Config", "EventOverlap", "cpu_device_name"]
