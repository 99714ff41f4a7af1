import inspect
import sys
from enum import Enum
from importlib import import_module
from typing import Any

import pytest

from epcomm.platforms.deep_ep import DeepEPKind, find_deep_ep
from fakes.ascend.deep_ep import Buffer
from fakes.ascend.deep_ep.config import LowLatencyStrategy, NormalStrategy, strategies
from fakes.ascend.deep_ep_flags import buffer as newer
from fakes.deep_ep import install
from tests.fakes.ascend.recorded import golden

RECORDED = golden("deep_ep_ascend_signatures")
SIGNATURES = [
    *((Buffer, name, entry) for name, entry in sorted(RECORDED["methods"].items())),
    *(
        (newer.Buffer, name, entry)
        for name, entry in sorted(RECORDED["changed"]["methods"].items())
    ),
]


def default_of(parameter: inspect.Parameter) -> str | None:
    if parameter.default is parameter.empty:
        return None
    if isinstance(parameter.default, Enum):
        return f"{type(parameter.default).__name__}.{parameter.default.name}"
    return repr(parameter.default)


@pytest.mark.parametrize(
    ("buffer", "name", "expected"),
    SIGNATURES,
    ids=[f"{buffer.__module__.split('.')[2]} {name}" for buffer, name, _ in SIGNATURES],
)
def test_signatures_equal_the_real_ones(buffer: type, name: str, expected: dict[str, Any]) -> None:
    parameters = inspect.signature(getattr(buffer, name)).parameters.values()
    found = [(parameter.name, default_of(parameter)) for parameter in parameters]
    assert found == [(entry["name"], entry.get("default")) for entry in expected["parameters"]]
    assert isinstance(inspect.getattr_static(buffer, name), staticmethod) is expected["static"]


def test_installed_as_deep_ep_and_removed() -> None:
    with install("ascend") as module:
        assert import_module("deep_ep") is module
        assert module.Buffer is Buffer
        assert module.CPU_RANKS is True
        assert not hasattr(module, "FuseMode")
        assert [int(mode) for mode in import_module("deep_ep.buffer").FuseMode] == [1, 2]
        installed = find_deep_ep()
        assert installed.kind is DeepEPKind.ASCEND
    assert not [name for name in sys.modules if name.split(".")[0] == "deep_ep"]


def test_modes_come_from_arguments_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = NormalStrategy.DEFAULT, LowLatencyStrategy.DEFAULT
    assert strategies(*plain) == plain
    monkeypatch.setenv("DEEP_USE_MODE", "ops")
    assert strategies(*plain)[1] is LowLatencyStrategy.OPS
    monkeypatch.setenv("DEEP_USE_MODE", "alltoall")
    assert strategies("default", "ops") == (NormalStrategy.ALLTOALL, LowLatencyStrategy.OPS)
    monkeypatch.setenv("DEEP_USE_MODE", "fast")
    with pytest.raises(ValueError, match="DEEP_USE_MODE is 'fast', expected one of default"):
        strategies(*plain)
