"""Golden cases from tests/contracts, and how results are compared with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epcomm.testing.ascend.undefined import undefined_value

CONTRACTS = Path(__file__).parents[2] / "contracts"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
    )
}


def load(name: str) -> dict[str, Any]:
    return json.loads((CONTRACTS / f"{name}.json").read_text("utf-8"))


def tensor_of(golden: dict[str, Any] | None) -> Tensor | None:
    """A tensor without undefined elements; None stays None."""
    if golden is None:
        return None
    return torch.tensor(golden["values"], dtype=DTYPES[golden["dtype"]]).view(golden["shape"])


def required_tensor(golden: dict[str, Any]) -> Tensor:
    tensor = tensor_of(golden)
    assert tensor is not None
    return tensor


def flat_values(values: Any) -> list[float | int | None]:  # noqa: ANN401
    if not isinstance(values, list):
        return [values]
    return [element for value in values for element in flat_values(value)]


def assert_matches(found: Tensor, golden: dict[str, Any], *, rtol: float = 0.0) -> None:
    """Shape and dtype equal, defined elements equal (to rtol), all others poisoned."""
    dtype = DTYPES[golden["dtype"]]
    assert found.dtype == dtype
    assert list(found.shape) == golden["shape"]
    values = flat_values(golden["values"])
    poison = undefined_value(dtype)
    expected = torch.tensor([poison if value is None else value for value in values], dtype=dtype)
    torch.testing.assert_close(found.flatten(), expected, rtol=rtol, atol=0.0, equal_nan=True)
