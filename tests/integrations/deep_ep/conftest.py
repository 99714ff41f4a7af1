from collections.abc import Iterator

import pytest

from epcomm.integrations.deep_ep import ElasticBuffer
from epcomm.integrations.deep_ep.ranks import Ranks
from tests.integrations.deep_ep.v2_ranks import BufferMaker, buffers_of


@pytest.fixture
def make_buffer() -> Iterator[BufferMaker]:
    with buffers_of(ElasticBuffer) as make:
        yield make


@pytest.fixture
def buffer(make_buffer: BufferMaker) -> ElasticBuffer:
    return make_buffer()


@pytest.fixture
def compares_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare shapes only where buffers open, as over NVLink."""
    monkeypatch.setattr(Ranks, "is_over_nvlink", lambda self, service: service in self._classes)
