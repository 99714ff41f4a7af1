"""Golden values of operators for NPUs: reading them, and comparing what they define."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CONTRACTS = Path(__file__).parents[2] / "contracts"


def golden(name: str) -> dict[str, Any]:
    """The file `name`.json."""
    return json.loads((CONTRACTS / f"{name}.json").read_text("utf-8"))


def tensor_of(recorded: dict[str, Any]) -> Tensor:
    """The tensor; 0 where its values are not defined."""
    dtype = getattr(torch, recorded["dtype"])
    values = _map(recorded["values"], lambda value: 0 if value is None else value)
    # Exact in every dtype: decimals are exact or restore a float32.
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    return torch.tensor(values, dtype=wide).to(dtype).reshape(_listed_shape(recorded))


def defined(recorded: dict[str, Any]) -> Tensor:
    """bool, the shape of the tensor: where its values are defined."""
    values = _map(recorded["values"], lambda value: value is not None)
    return torch.tensor(values, dtype=torch.bool).reshape(_listed_shape(recorded))


def assert_equals(found: Tensor, recorded: dict[str, Any], *, rtol: float = 0.0) -> None:
    """Shape and dtype; and the values where they are defined, to the bit without rtol.

    Where `defined_rows` says that rows are listed, those alone are compared.
    """
    assert str(found.dtype) == f"torch.{recorded['dtype']}"
    assert list(found.shape) == recorded["shape"]
    listed = found[: recorded.get("defined_rows", found.shape[0])] if found.dim() else found
    mask = defined(recorded)
    torch.testing.assert_close(listed[mask], tensor_of(recorded)[mask], rtol=rtol, atol=0.0)


def group_for(num_ranks: int) -> dist.ProcessGroup | None:
    """The first ranks, or None beyond them; all ranks call this alike."""
    if num_ranks == dist.get_world_size():
        assert dist.group.WORLD is not None
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
