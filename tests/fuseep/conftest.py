"""torch.ops.npu on a CPU, so that weights are cast as on a device."""

from __future__ import annotations

import pytest

from epcomm.testing.ascend import registry


@pytest.fixture(autouse=True)
def operators() -> None:
    registry.register()
