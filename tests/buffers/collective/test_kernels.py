"""The buffers over collectives with kernels in place of plain torch, interpreted between CPU ranks.

Plain torch is what the other tests of these buffers run; the contract is the same.
"""

from __future__ import annotations

import pytest

from epcomm import EPGroup, Mode
from epcomm.ops import select
from epcomm.testing import buffer_suite

pytest.importorskip("triton")

# Of the suite, what the kernels could get wrong and their own tests cannot see.
SCENARIOS = ("plain", "uneven", "holes", "all_empty", "aligned_holes", "stand_alone", "faults")
BUFFERS = {
    "CollectiveBuffer": Mode.NORMAL,
    "AllGatherBuffer": Mode.STANDARD,
    "StaticCollectiveBuffer": Mode.LOW_LATENCY,
}


@pytest.fixture(autouse=True)
def kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPU tensors have the kernels that CUDA tensors have."""
    monkeypatch.setitem(select._LOADERS, "cpu", select._LOADERS["cuda"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scenario", buffer_suite.SCENARIOS)
def test_normal_mode_keeps_its_contract(scenario: str) -> None:
    with EPGroup() as group:
        env = buffer_suite.BufferEnv(group=group, backend="CollectiveBuffer", mode=Mode.NORMAL)
        buffer_suite.run_scenario(scenario, env)
