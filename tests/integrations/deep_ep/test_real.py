"""V2 on GPUs: the recorded cases, on as many GPUs as they were recorded on.

    MULTI_RANK_BACKEND=nccl scripts/launch_multi_rank.sh 4 tests/integrations/deep_ep/test_real.py

runs them on the GPUs of this machine; without MULTI_RANK_BACKEND there are no such tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from epcomm.integrations.deep_ep import ElasticBuffer
from tests.integrations.deep_ep.golden_v2 import CASES
from tests.integrations.deep_ep.v2_ranks import BufferMaker, buffers_of, run_recorded_case


@pytest.fixture
def make_buffer() -> Iterator[BufferMaker]:
    with buffers_of(ElasticBuffer) as make:
        yield make


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", CASES)
def test_recorded_case(name: str, make_buffer: BufferMaker) -> None:
    run_recorded_case(name, make_buffer, "cuda")
