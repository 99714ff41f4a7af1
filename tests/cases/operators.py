from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """A mode that records the names of the operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def expect_gating_calls(num_calls: int) -> Iterator[None]:
    """Check that the block calls the gating operator num_calls times."""
    with Operators() as operators:
        yield
    assert operators.names.count("npu.npu_moe_gating_top_k.default") == num_calls
