from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from epcomm.kernels.launch import DeviceLimits, device_limits

KB = 1024


@pytest.mark.parametrize(
    ("limits", "stage_kb", "most", "stages"),
    [
        (DeviceLimits(), 48, 4, 4),
        (DeviceLimits(), 40, 3, 3),
        # Two in shared memory and one in registers.
        (DeviceLimits(shared_bytes=99 * KB, major=12), 48, 4, 3),
        (DeviceLimits(shared_bytes=99 * KB, major=12), 40, 3, 3),
        (DeviceLimits(shared_bytes=163 * KB, major=8), 48, 4, 4),
        (DeviceLimits(shared_bytes=99 * KB, major=9), 48, 4, 2),
        (DeviceLimits(shared_bytes=KB, major=9), 48, 4, 1),
    ],
)
def test_as_many_stages_as_fit(limits: DeviceLimits, stage_kb: int, most: int, stages: int) -> None:
    assert limits.stages(stage_kb * KB, most=most) == stages


def test_device_is_asked_for_its_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(major=12, minor=0, shared_memory_per_block_optin=99 * KB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    device_limits.cache_clear()
    assert device_limits(torch.device("cuda", 0)) == DeviceLimits(shared_bytes=99 * KB, major=12)
    del found.shared_memory_per_block_optin
    assert device_limits(torch.device("cuda", 1)) == DeviceLimits(shared_bytes=227 * KB, major=12)
    device_limits.cache_clear()
    assert device_limits(torch.device("cpu")) == DeviceLimits()
