from dataclasses import replace

import pytest

from epcomm.registry import buffer_class
from epcomm.spec import HostLayout
from tests.cases.specs import buffer_spec

SPEC = buffer_spec(256, 2, 2)


@pytest.mark.parametrize(
    ("backend", "hosts", "reason"),
    [
        ("DeepEPV1Buffer", [0] * 8 + [1] * 8, None),
        ("DeepEPV1Buffer", [0, 1] * 8, "hosts of 8 neighbouring ranks each, not 2 hosts of ranks"),
        ("DeepEPV1Buffer", [0] * 4 + [1] * 4, "hosts of 8 neighbouring ranks each"),
        ("DeepEPV1Buffer", [0] * 8 + [1] * 4, "hosts of 8 neighbouring ranks each"),
        ("DeepEPV1StaticBuffer", [0] * 4 + [1] * 4, "ranks of one host, not of 2"),
        ("DeepEPV2Buffer", [rank // 2 for rank in range(64)], None),
        ("DeepEPV2Buffer", [rank // 2 for rank in range(66)], "33 hosts, at most 32"),
    ],
)
def test_hosts_that_a_package_does_not_join_are_refused(
    backend: str, hosts: list[int], reason: str | None
) -> None:
    kind = buffer_class(backend)
    assert kind.lacks_between(SPEC) == (), "one host"
    found = kind.lacks_between(replace(SPEC, hosts=HostLayout.of(hosts)))
    assert len(found) == (reason is not None)
    assert all(reason is not None and reason in each for each in found)
