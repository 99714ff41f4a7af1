"""Imitate the deep_ep of Ascend as of September 2026: flags name the format of rows, not a string.

Everything else is fakes.ascend.deep_ep.
Source: sgl-project/sgl-kernel-npu, python/deep_ep; signatures, not checked on an NPU.
"""

from fakes.ascend.deep_ep import CPU_RANKS, Config, EventOverlap, cpu_device_name
from fakes.ascend.deep_ep_flags.buffer import Buffer

__all__ = ["CPU_RANKS", "Buffer", "Config", "EventOverlap", "cpu_device_name"]
