"""Imitate the deep_ep of Ascend: its Buffer over ranks that are processes on CPUs.

buffer.py has the calls; normal.py, low_latency.py and fused.py implement them; `soc()` of
fakes.ascend.limits selects the chip. Calls that fail silently on the device are refused if that can
be detected, and otherwise have undefined results.
Source: sgl-project/sgl-kernel-npu, python/deep_ep, signatures and documented behaviour, not checked
on an NPU; the code is ours.
"""

from fakes.ascend.deep_ep.buffer import Buffer
from fakes.ascend.deep_ep.config import Config
from fakes.ascend.deep_ep.event import EventOverlap
from fakes.ascend.limits import device_name as cpu_device_name

# Probes of deep_ep read CPU_RANKS, which means that no NPU is needed, and cpu_device_name(), the
# imitated chip.
CPU_RANKS = True

# FuseMode is only in deep_ep.buffer, as in the real package.
__all__ = ["CPU_RANKS", "Buffer", "Config", "EventOverlap", "cpu_device_name"]
