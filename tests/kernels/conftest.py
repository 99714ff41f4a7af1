import pytest
import torch

from tests.kernels.boolean_masks import boolean_masks

__all__ = ["boolean_masks", "device"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
