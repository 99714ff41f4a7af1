"""The stand-in of Ascend's deep_ep looks like the real one: signatures, installation, variables."""

from __future__ import annotations

import inspect
import sys
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from epcomm.platforms.deep_ep import DeepEPKind, deep_ep_kind
from fakes.ascend.deep_ep import Buffer
from fakes.ascend.deep_ep.config import (
    LowLatencyStrategy,
    NormalStrategy,
    settings,
    strategies,
)
from fakes.ascend.deep_ep.quant_mode import checked, low_latency_mode
from fakes.ascend.deep_ep_flags import buffer as newer
from fakes.ascend.limits import soc
from fakes.ascend.windows import low_latency_bytes, normal_bytes, window_bytes
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
ROUNDS = ("DEEPEP_NORMAL_LONG_SEQ_ROUND", "DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS")


def default_of(parameter: inspect.Parameter) -> str | None:
    """Return a parameter's default in the form of the recording."""
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
        spec = find_spec("deep_ep")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        assert deep_ep_kind(Path(spec.submodule_search_locations[0])) is DeepEPKind.ASCEND
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


def test_variables_are_read_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with soc("A3"):
        assert not settings().counts_are_sums
        monkeypatch.setenv("MOE_EXPERT_TOKEN_NUMS_TYPE", "0")
        monkeypatch.setenv("MOE_ENABLE_TOPK_NEG_ONE", "1")
        monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AIV")
        assert settings().counts_are_sums
        assert settings().allows_none
    with soc("A2"), pytest.raises(RuntimeError, match="HCCL_OP_EXPANSION_MODE"):
        settings()
    monkeypatch.setenv("MOE_SHARED_EXPERT_RANK_NUM", "1")
    with soc("A3"), pytest.raises(NotImplementedError, match="MOE_SHARED_EXPERT_RANK_NUM=1"):
        settings()


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (("2", None), "set together"),
        (("0", "64"), "1 to 256"),
        (("2", "16"), "32 to 8192"),
        (("256", "8192"), "at most 131072"),
    ],
)
def test_wrong_rounds_are_refused(
    values: tuple[str, str | None], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(ROUNDS, values, strict=True):
        if value is not None:
            monkeypatch.setenv(name, value)
    with soc("A3"), pytest.raises(RuntimeError, match=match):
        settings()


def test_flags_of_low_latency() -> None:
    def mode(
        quant_mode: str | None = None,
        *,
        use_fp8: bool = True,
        use_ue8m0: bool = False,
        use_mxfp4: bool = False,
    ) -> str:
        return low_latency_mode(
            quant_mode, use_fp8=use_fp8, use_ue8m0=use_ue8m0, use_mxfp4=use_mxfp4
        )

    assert mode() == "int8"
    assert mode(use_fp8=False) == "bf16"
    assert mode(use_ue8m0=True) == "mx_fp8_e4m3"
    assert mode(use_fp8=False, use_ue8m0=True) == "bf16"
    assert mode(use_mxfp4=True) == "mx_fp4_e2m1"
    assert mode("bf16") == "bf16"


def test_formats_of_ascend_950_run_there_alone() -> None:
    with soc("A3"), pytest.raises(RuntimeError, match="runs on A5, this is A3"):
        checked("dispatch", "mx_fp8_e4m3")
    with soc("A5"), pytest.raises(NotImplementedError, match="not modelled"):
        checked("dispatch", "mx_fp8_e4m3")
    with soc("A5"), pytest.raises(RuntimeError, match="expected one of"):
        checked("dispatch", "fp8")


def test_windows() -> None:
    names = ("DEEPEP_HCCL_BUFFSIZE", "HCCL_BUFFSIZE")
    assert window_bytes(names, {}) == 200 << 20
    assert window_bytes(names, {"HCCL_BUFFSIZE": "300"}) == 300 << 20
    both = {"HCCL_BUFFSIZE": "300", "DEEPEP_HCCL_BUFFSIZE": "400"}
    assert window_bytes(names, both) == 400 << 20
    # H 7168: 14336 bytes are 28 times 512, and with 44 more 29 times.
    assert normal_bytes(1, 1, 7168) == 2 * (57 * 512 + (208 << 20))
    assert low_latency_bytes(2, 8, 7168, 16) == 2 * 2 * (16 * 29 * 512 + 8 * 28 * 512)
