"""Let ranks of tests share GPUs, which users cannot do, because it is slow.

A kernel that waits for a rank of its own GPU waits for that rank's slice of time.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def let_ranks_share_gpus(device: torch.device) -> None:
    """Make EPGroup() use `device` beside gloo, and report all GPUs as connected by NVLink."""
    from epcomm import EPGroup
    from epcomm.buffers.hierarchical import buffer
    from epcomm.planning import candidates
    from epcomm.platforms.nvlink import PeerReach

    # Otherwise torch maps no memory between two ranks of one GPU.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    defaults = EPGroup.__init__.__kwdefaults__
    assert defaults is not None, "device is given by its name alone"
    defaults["device"] = device
    joined = tuple(map(str, range(int(os.environ["WORLD_SIZE"]))))

    def reach_of(_: torch.device) -> PeerReach:
        return PeerReach(device=os.environ["RANK"], reached=joined)

    candidates.reach_of = buffer.reach_of = reach_of
