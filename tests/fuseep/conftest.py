"""torch.ops.npu on a CPU, so that weights are cast as on a device, and chips for whole layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

import epcomm.fuseep.ascend
import epcomm.platforms.ascend.limits
from epcomm.fuseep.limits import (
    DISPATCH_FFN_COMBINE_LIMITS,
    FUSED_DEEP_MOE_LIMITS,
    MEGA_MOE_LIMITS,
    dispatch_ffn_combine_reasons,
    fused_deep_moe_reasons,
    mega_moe_reasons,
)
from fakes.ascend import limits, registry
from fakes.deep_ep import install

LIFTED = {
    fused_deep_moe_reasons: FUSED_DEEP_MOE_LIMITS,
    dispatch_ffn_combine_reasons: DISPATCH_FFN_COMBINE_LIMITS,
    mega_moe_reasons: MEGA_MOE_LIMITS,
}


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
    """Imitate an A3 that takes any H and I, by itself and by what epcomm knows of it."""
    for reasons, limits_of in LIFTED.items():
        sizes = replace(limits_of, hidden=None, gate_up_columns=None)
        if limits_of is not FUSED_DEEP_MOE_LIMITS:
            sizes = replace(sizes, hidden_multiple=1, gate_up_multiple=2)
        lifted = partial(reasons, limits=sizes)
        monkeypatch.setattr(epcomm.fuseep.ascend, reasons.__name__, lifted)
    low_latency = epcomm.platforms.ascend.limits._LOW_LATENCY
    monkeypatch.setattr(
        epcomm.platforms.ascend.limits, "_LOW_LATENCY", replace(low_latency, hidden=(32, 8192))
    )
    with limits.soc("A3", size_limits=False), install("ascend"):
        yield
