import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
