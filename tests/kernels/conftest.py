import os
import sys

import pytest
import torch

# Without a GPU the kernels run under Triton's interpreter, which must be chosen before triton is
# imported: its own functions are made ready for one or the other then.
if not torch.cuda.is_available():
    if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
        raise pytest.UsageError("triton was imported before tests/kernels chose its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
