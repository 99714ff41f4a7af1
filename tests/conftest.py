import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# Set the number of threads as the launcher does for its ranks: on a busy machine, several threads
# of one small operation mostly wait for one another (seen: 0.4 s instead of 2 ms for a backward).
# This must run before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A suite starts more than a hundred processes, ranks above all. Without bytecode, which container
# images like to forbid, each would compile the package and its tests again: 1 to 3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# transformers must not access the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402  (after its number of threads was chosen)

# Without a GPU the kernels run under Triton's interpreter. It must be chosen before triton is
# imported (also by transformers), since the import binds Triton's own functions to one mode.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    if find_spec("triton") is not None:
        from tests.interpreter import make_faster

        make_faster()

    from tests.kernels.nvlink.host_cuda import install

    install()

from epcomm import EPGroup  # noqa: E402  (it may import triton)

pytest_plugins = ["tests.multi_rank", "tests.defaults"]


# Modules for CPU ranks; hosts of GPUs do not read what other ranks report.
ON_CPU = {"test_v1_on_cpu.py", "test_v1_bad_calls.py"}
# The MULTI_RANK_BACKEND on whose devices the test_real.py of each folder runs.
DEVICES_OF = {"ascend": "hccl", "deep_ep": "nccl"}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Deselect tests of devices where there are none, and tests of CPUs where there are devices."""
    backend = os.environ.get("MULTI_RANK_BACKEND")
    if collection_path.name in ON_CPU:
        return True if backend else None
    if collection_path.name != "test_real.py":
        return None
    is_here = backend == DEVICES_OF[collection_path.parent.name]
    return None if is_here else True


@pytest.fixture
def group(ep_ranks: object) -> Iterator[EPGroup]:
    """Yield a group of all ranks of the test."""
    with EPGroup(ep_ranks) as group:
        yield group


@pytest.fixture
def npu_operators() -> Iterator[None]:
    """Imitate the operators of an A3 with all of its limits."""
    from fakes.ascend import limits, registry

    registry.register()
    with limits.soc("A3"):
        yield
