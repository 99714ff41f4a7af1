"""Golden values of operators for NPUs: reading them, and comparing what they define."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fakes.ascend.undefined import undefined_value

CONTRACTS = Path(__file__).parents[2] / "contracts"


def golden(name: str) -> dict[str, Any]:
    return json.loads((CONTRACTS / f"{name}.json").read_text("utf-8"))


def tensor_of(recorded: dict[str, Any]) -> Tensor:
    """Return the tensor, with 0 for undefined values, and without rows that are not listed."""
    dtype = getattr(torch, recorded["dtype"])
    values = _map(recorded["values"], lambda value: 0 if value is None else value)
    # Exact in every dtype: decimals are exact or restore a float32.
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    return torch.tensor(values, dtype=wide).to(dtype).reshape(_listed_shape(recorded))


def optional_tensor(recorded: dict[str, Any] | None) -> Tensor | None:
    return None if recorded is None else tensor_of(recorded)


def defined(recorded: dict[str, Any]) -> Tensor:
    """Return where the values of the tensor are defined, bool, in its shape."""
    values = _map(recorded["values"], lambda value: value is not None)
    listed = torch.tensor(values, dtype=torch.bool).reshape(_listed_shape(recorded))
    found = torch.zeros(recorded["shape"], dtype=torch.bool)
    found[: recorded.get("defined_rows")] = listed
    return found


def is_poison(tensor: Tensor) -> bool:
    """Return whether no operator has written any element."""
    if tensor.is_floating_point():
        return bool(tensor.isnan().all())
    return bool((tensor == undefined_value(tensor.dtype)).all())


def assert_equals(
    found: Tensor, recorded: dict[str, Any], *, rtol: float = 0.0, poisoned: bool = True
) -> None:
    """Compare shape, dtype and defined values, to the bit without rtol; others may be poison."""
    assert str(found.dtype) == f"torch.{recorded['dtype']}"
    assert list(found.shape) == recorded["shape"]
    is_defined = defined(recorded)
    listed = is_defined[: recorded.get("defined_rows")]
    expected = tensor_of(recorded)[listed]
    torch.testing.assert_close(found[is_defined], expected, rtol=rtol, atol=0.0)
    assert not poisoned or is_poison(found[~is_defined])


@cache
def group_for(num_ranks: int) -> dist.ProcessGroup | None:
    """Return the first ranks, or None on the other ranks; collective."""
    if num_ranks == dist.get_world_size():
        return dist.group.WORLD
    group = dist.new_group(list(range(num_ranks)))
    return group if isinstance(group, dist.ProcessGroup) and group.rank() >= 0 else None


def _listed_shape(recorded: dict[str, Any]) -> list[int]:
    shape = list(recorded["shape"])
    if "defined_rows" in recorded:
        shape[0] = recorded["defined_rows"]
    return shape


def _map(values: Any, function: Any) -> Any:  # noqa: ANN401 (nested lists)
    if isinstance(values, list):
        return [_map(value, function) for value in values]
    return function(values)
