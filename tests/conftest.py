import os
import sys
from pathlib import Path

# As the launcher does for its ranks: on a busy machine, several threads of one small operation
# mostly wait for one another (seen: 0.4 s instead of 2 ms for a backward). Before torch is there.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A suite starts more than a hundred processes, ranks above all. Without bytecode, which container
# images like to forbid, each would compile the package and its tests anew: 1 to 3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import pytest  # noqa: E402
import torch  # noqa: E402  (after its number of threads was chosen)

# Without a GPU the kernels run under Triton's interpreter, which must be chosen before triton is
# imported: its own functions are made ready for one or the other then. transformers imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["tests.multi_rank"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what runs on the devices of MULTI_RANK_BACKEND alone, unless that is set."""
    is_of_devices = collection_path.name.startswith("test_real_")
    return True if is_of_devices and "MULTI_RANK_BACKEND" not in os.environ else None
