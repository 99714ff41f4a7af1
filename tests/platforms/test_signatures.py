import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from epcomm.buffers.ascend.packed import (
    AscendBuffer,
    AscendLowLatencyBuffer,
    AscendNormalBuffer,
    format_arguments,
)
from epcomm.platforms.signatures import signature_reasons
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.types import WireDtype, WireFormat

CONTRACT = Path(__file__).parents[1] / "contracts" / "deep_ep_ascend_signatures.json"
BF16 = WireFormat(dtype=WireDtype.BF16)
ADAPTERS = [AscendNormalBuffer, AscendLowLatencyBuffer]


class Package:
    """A class with one method of every kind."""

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
        ({"__init__": ("group", "low_latency_mode")}, "Package of the installed package has no "),
        ({"dispatch": ("x", "use_mxfp8")}, "Package.dispatch of the installed package has no "),
        ({"dispatch": ("quant_mode",)}, "Package.dispatch of the installed package requires x,"),
        ({"combine": ("x",)}, "the installed package has no Package.combine; install another"),
        ({"swallow": ("quant_mode",)}, "has no parameter quant_mode; install another"),
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


def recorded_class(*, changed: bool = False, without: tuple[str, str] | None = None) -> type:
    """Make a class with the recorded signatures, less one parameter: (method, parameter).

    changed: with those that changed in September 2026.
    """
    recorded = json.loads(CONTRACT.read_text("utf-8"))
    methods = recorded["methods"] | (recorded["changed"]["methods"] if changed else {})
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


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("wire", [BF16, INT8_PER_TOKEN], ids=str)
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.dispatching)
def test_adapters_fit_the_recorded_signatures_and_miss_every_parameter(
    adapter: type[AscendBuffer], wire: WireFormat, changed: bool
) -> None:
    method = adapter.dispatching
    is_int8 = wire is INT8_PER_TOKEN
    found = format_arguments(getattr(recorded_class(changed=changed), method), wire)
    is_low_latency = adapter is AscendLowLatencyBuffer
    expected = {"quant_mode": "int8" if is_int8 else "bf16"}
    if changed:
        expected = {"use_mxfp4": False, "use_mxfp8": False}
    assert found == expected | ({"use_fp8": is_int8} if changed or is_low_latency else {})
    calls = {**adapter.calls, method: (*adapter.calls[method], *found)}
    assert signature_reasons(recorded_class(changed=changed), calls) == []
    for called, names in calls.items():
        for name in names:
            package = recorded_class(changed=changed, without=(called, name))
            (reason,) = signature_reasons(package, calls)
            assert f"has no parameter {name}; install another release" in reason
            assert "__init__" not in reason
