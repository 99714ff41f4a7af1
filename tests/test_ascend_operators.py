"""Who has a kernel: defined and implemented for the device, nothing less."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from epcomm.ascend_operators import has_kernel
from epcomm.testing.ascend import registry


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("npu_swiglu", "cpu", True),
        ("npu_swiglu", "npu", False),
        ("npu_swiglu", "cuda", False),
        # Defined without an implementation, and not defined.
        ("npu_quantize", "cpu", False),
        ("npu_of_another_release", "cpu", False),
    ],
)
def test_an_operator_has_a_kernel_where_it_was_implemented(
    name: str, device: str, expected: bool
) -> None:
    registry.register()
    # torch knows the device npu only with its backend.
    found = has_kernel(name, SimpleNamespace(type=device))  # pyright: ignore[reportArgumentType]
    assert found == expected
