from collections.abc import Iterator
from dataclasses import replace

import pytest

import epcomm.platforms.ascend.limits
from epcomm.fuseep.ascend import DispatchFFNCombine, FusedDeepMoE, MegaMoE
from fakes.ascend import limits, registry
from fakes.deep_ep import install


@pytest.fixture(autouse=True)
def operators() -> None:
    registry.register()


@pytest.fixture
def a3() -> Iterator[None]:
    """Imitate an A3 with all of its limits."""
    with limits.soc("A3"), install("ascend"):
        yield


@pytest.fixture
def small_a3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imitate an A3 that takes any H and I, and lift the limits of epcomm for it."""
    for operator in (FusedDeepMoE, DispatchFFNCombine, MegaMoE):
        sizes = replace(operator.limits, hidden=None, gate_up_columns=None)
        if operator is not FusedDeepMoE:
            sizes = replace(sizes, hidden_multiple=1, gate_up_multiple=2)
        monkeypatch.setattr(operator, "limits", sizes)
    low_latency = epcomm.platforms.ascend.limits._LOW_LATENCY
    monkeypatch.setattr(
        epcomm.platforms.ascend.limits, "_LOW_LATENCY", replace(low_latency, hidden=(32, 8192))
    )
    with limits.soc("A3", size_limits=False), install("ascend"):
        yield
