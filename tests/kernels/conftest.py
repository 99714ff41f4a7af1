import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device that the kernels run on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
