from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")
from epcomm.buffers.collective.all_to_all import CollectiveBuffer
from epcomm.buffers.hierarchical import buffer
from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.calls.order import Calls
from epcomm.platforms.nvlink import PeerReach
from epcomm.spec import HostLayout
from tests.cases.specs import buffer_spec

SPEC = buffer_spec(128, 2, 2)


def chosen(monkeypatch: pytest.MonkeyPatch, reached: list[str], process_group: object) -> type[Any]:
    """Return the inner buffer of four GPUs on two hosts; `reach` is the reach of the first."""
    found = [{"reach": PeerReach(device=each, reached=("a", "b")).as_text()} for each in "abab"]
    found[0]["reach"] = PeerReach(device="a", reached=tuple(reached)).as_text()
    whole = SimpleNamespace(
        collectives=SimpleNamespace(device=torch.device("cuda", 0)),
        gather_records=lambda *_, **__: found,
    )
    monkeypatch.setattr(buffer, "reach_of", lambda _: PeerReach(device="a"))
    return buffer.inner_buffer_class(
        cast(Calls, whole),
        cast(Calls, SimpleNamespace(collectives=SimpleNamespace(process_group=process_group))),
        HostLayout.of([0, 0, 1, 1]),
        SPEC,
    )


def test_nvlink_needs_joined_gpus_and_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, ["b"], object()) is NVLinkBuffer
    assert chosen(monkeypatch, [], object()) is CollectiveBuffer
    # Use gloo, whose parts are not torch process groups.
    assert chosen(monkeypatch, ["b"], None) is CollectiveBuffer
