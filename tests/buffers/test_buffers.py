"""Every buffer that runs on a CPU passes the whole buffer suite, on 1 to 8 ranks."""

import pytest
import torch.distributed as dist

from epcomm import EPGroup, Mode
from epcomm.testing import buffer_suite

BUFFERS = {"collective": Mode.NORMAL, "all_gather": Mode.STANDARD}


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.parametrize("backend", BUFFERS)
@pytest.mark.parametrize("scenario", buffer_suite.SCENARIOS)
def test_buffer_keeps_its_contract(scenario: str, backend: str) -> None:
    with EPGroup(dist.group.WORLD) as group:
        env = buffer_suite.BufferEnv(group=group, backend=backend, mode=BUFFERS[backend])
        buffer_suite.run_scenario(scenario, env)
