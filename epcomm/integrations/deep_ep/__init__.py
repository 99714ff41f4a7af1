"""The drop-in for deep_ep: programs written for DeepEP run on epcomm's buffers.

`install()` installs it as `deep_ep`, and `python -m epcomm.integrations.deep_ep PROGRAM`
runs a program with it. The names here are those of the package; docs/migrating_from_deepep.md
describes the differences, and the equivalent calls of epcomm's own API.
"""

import torch

from epcomm.integrations.deep_ep.events import EventHandle, EventOverlap
from epcomm.integrations.deep_ep.installing import install
from epcomm.integrations.deep_ep.v1.buffer import Buffer
from epcomm.integrations.deep_ep.v1.config import Config
from epcomm.integrations.deep_ep.v2.buffer import ElasticBuffer
from epcomm.integrations.deep_ep.v2.handle import EPHandle

topk_idx_t = torch.int64

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]
__all__ += ["install", "topk_idx_t"]
