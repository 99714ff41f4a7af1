import pytest
import torch

from epcomm.platforms.ascend.operators import has_kernel
from fakes.ascend import registry


@pytest.mark.parametrize(
    ("name", "device", "is_there"),
    [
        ("npu_moe_gating_top_k", "cpu", True),
        # Devices without kernels.
        ("npu_moe_gating_top_k", "cuda", False),
        ("npu_moe_gating_top_k", "meta", False),
        # Operators with a schema but without a kernel, and without a schema.
        ("npu_moe_init_routing", "cpu", False),
        ("npu_of_no_version", "cpu", False),
    ],
)
def test_what_is_registered_is_there(name: str, device: str, is_there: bool) -> None:
    registry.register()
    assert has_kernel(name, torch.device(device)) is is_there
