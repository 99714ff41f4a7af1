"""V2 over the kernels of NVLink, which are interpreted on CPU ranks: the recording, and handles."""

import pytest

pytest.importorskip("triton")
from epcomm.integrations.deep_ep.ranks import Ranks, Service
from epcomm.registry import buffer_class
from tests.integrations.deep_ep import test_v2
from tests.integrations.deep_ep.devices import on_gpus
from tests.integrations.deep_ep.v2_ranks import CASES, BufferMaker, run_recorded_case

pytestmark = [pytest.mark.ranks(4), pytest.mark.slow]

CLASSES = {Service.NORMAL: "NVLinkBuffer", Service.STATIC: "NVLinkStaticBuffer"}


@pytest.fixture(autouse=True)
def over_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open the buffers of GPUs on CPU ranks, where an interpreter runs their kernels."""
    if not on_gpus():
        monkeypatch.setattr(Ranks, "_choose", lambda self, service: buffer_class(CLASSES[service]))


@pytest.mark.parametrize("name", [name for name in CASES if "align16" not in name])
def test_recorded_case(name: str, make_buffer: BufferMaker) -> None:
    run_recorded_case(name, make_buffer)


def test_weights_travel_along_an_expanded_handle(make_buffer: BufferMaker) -> None:
    test_v2.test_weights_travel_along_an_expanded_handle_and_back(True, False, make_buffer)


def test_combine_takes_named_rows(make_buffer: BufferMaker) -> None:
    test_v2.test_combine_takes_the_rows_that_recv_src_metadata_names(True, True, make_buffer)
