"""Re-export epcomm.integrations.deep_ep as `deep_ep`."""

from torch.distributed import ProcessGroup

from epcomm.integrations.deep_ep import *  # noqa: F403

# `import deep_ep` makes its modules attributes, as in DeepEP.
from .buffers import elastic, legacy  # noqa: F401
from .utils import event  # noqa: F401

# The version is also in the metadata of this folder and in packages/deep_ep/pyproject.toml.
__version__ = "2.1.0+epcomm"


def is_epcomm_drop_in() -> bool:
    """Return True: the name of this function in these sources identifies epcomm's deep_ep."""
    return True


def get_physical_domain_size(group: ProcessGroup) -> tuple[int, int]:
    """Return the numbers of hosts and of ranks of a host: all ranks are on one host."""
    return 1, group.size()


def get_logical_domain_size(group: ProcessGroup, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return the numbers of scale-out and scale-up ranks; all ranks are scale-up ranks."""
    del allow_hybrid_mode
    return 1, group.size()
