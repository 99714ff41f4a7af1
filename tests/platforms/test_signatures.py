"""A package without a parameter is refused: nothing falls back to another format silently."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from epcomm.buffers.ascend.base import AscendBuffer
from epcomm.buffers.ascend.low_latency import AscendLowLatencyBuffer
from epcomm.buffers.ascend.normal import AscendNormalBuffer
from epcomm.platforms.signatures import signature_reasons

CONTRACT = Path(__file__).parents[1] / "contracts" / "deep_ep_ascend_signatures.json"
ADAPTERS = [AscendNormalBuffer, AscendLowLatencyBuffer]


class Package:
    """One method of every kind."""

    def __init__(self, group: object) -> None: ...

    def dispatch(self, x: object, quant_mode: str | None = None) -> None: ...

    def swallow(self, *args: object, **kwargs: object) -> None: ...

    def by_place(self, x: object, /) -> None: ...

    @staticmethod
    def fixed(size: int = 1) -> None: ...


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ({"__init__": ("group",), "dispatch": ("x", "quant_mode")}, None),
        ({"dispatch": ("x",)}, None),
        ({"__init__": ("group", "low_latency_mode")}, "Package of the package installed has no "),
        ({"dispatch": ("x", "use_mxfp8")}, "Package.dispatch of the package installed has no "),
        ({"dispatch": ("quant_mode",)}, "Package.dispatch of the package installed wants x, which"),
        ({"combine": ("x",)}, "the package installed has no Package.combine; install another"),
        ({"swallow": ("quant_mode",)}, "installed has no parameter quant_mode; install another"),
        ({"swallow": ()}, None),
        ({"by_place": ("x",)}, "has no parameter x"),
    ],
)
def test_what_a_class_lacks(calls: Mapping[str, Sequence[str]], reason: str | None) -> None:
    found = signature_reasons(Package, calls)
    if reason is None:
        assert found == []
    else:
        assert [text for text in found if reason in text], found


def recorded_class(*, without: tuple[str, str] | None = None) -> type:
    """Make a class with the recorded signatures, less one parameter: (method, parameter)."""
    methods = json.loads(CONTRACT.read_text("utf-8"))["methods"]
    members = {name: _method(name, entry, without) for name, entry in methods.items()}
    return type("Buffer", (), members)


def _method(name: str, entry: dict[str, list], without: tuple[str, str] | None) -> object:  # type: ignore[type-arg]
    def method() -> None: ...

    parameters = [
        inspect.Parameter(
            each["name"],
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=each.get("default", inspect.Parameter.empty),
        )
        for each in entry["parameters"]
        if (name, each["name"]) != without
    ]
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_adapters_fit_the_recorded_signatures_and_miss_every_parameter(
    adapter: type[AscendBuffer],
) -> None:
    assert signature_reasons(recorded_class(), adapter.calls) == []
    for method, names in adapter.calls.items():
        for name in names:
            (reason,) = signature_reasons(recorded_class(without=(method, name)), adapter.calls)
            assert f"has no parameter {name}; install another release" in reason
            assert "__init__" not in reason
