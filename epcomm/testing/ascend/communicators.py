"""Groups by the names under which operators get them.

On the device the name is that of an HCCL communicator, which the backend of a process group tells:
`group._get_backend(torch.device("npu")).get_hccl_comm_name(rank)`. Here it is comm_name(group).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from epcomm.testing.ascend.limits import require

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

# So that the name of a process group, which HCCL does not know, is not taken for one.
_PREFIX = "hccl_on_cpu:"
# HCCL's own limit, in characters.
MAX_NAME = 127


def comm_name(group: dist.ProcessGroup) -> str:
    """What an operator takes as `group_ep`."""
    return f"{_PREFIX}{group.group_name}"


def group_of(operator: str, name: str) -> dist.ProcessGroup:
    """The group of this name.

    Raises:
        RuntimeError: there is none, or it is gone.
    """
    require(operator, 0 < len(name) <= MAX_NAME, f"group_ep has 1 to {MAX_NAME} characters")
    rule = f"group_ep is the name of a communicator, got {name!r}; take comm_name(group)"
    require(operator, name.startswith(_PREFIX), rule)
    return _resolve_process_group(cast("GroupName", name.removeprefix(_PREFIX)))
