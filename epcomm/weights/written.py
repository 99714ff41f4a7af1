"""Cache values that are computed from parameters, until these change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Self, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from epcomm.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class WriteState:
    """The state of a tensor: its identity, its memory, and its number of writes.

    torch counts writes to a tensor, but not writes through its `.data` or of other processes.
    memory: keeps the memory allocated, so that no other tensor gets its address.
    """

    source: ReferenceType[Tensor]
    memory: Tensor
    num_writes: int

    @classmethod
    def of(cls, name: str, tensor: Tensor, caller: str) -> Self:
        if tensor.is_inference():
            raise ConfigError(
                f"{caller}: {name} was made in inference mode, where tensors do not count "
                "writes; load the experts outside of it, under torch.no_grad()"
            )
        return cls(source=ref(tensor), memory=tensor.detach(), num_writes=tensor._version)

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is the same object, at the same address, without new writes."""
        is_same = self.source() is tensor and self.memory.data_ptr() == tensor.data_ptr()
        return is_same and self.num_writes == tensor._version


class Derived(Generic[T]):
    """A value computed from tensors, such as experts packed for an operator.

    The tensors are kept too, for state_dict and for reloading, so both take memory.
    """

    def __init__(self, caller: str) -> None:
        """Compute nothing yet; `caller` is for messages."""
        self._caller = caller
        self._states: dict[str, WriteState] = {}
        self._value: T | None = None

    def of(self, tensors: Mapping[str, Tensor], make: Callable[[], T]) -> T:
        """Return make(), called again only if the tensors changed since the last call.

        After a write through `.data`, which torch does not count, call forget().

        Local.   Host sync: none.
        """
        states = {n: WriteState.of(n, each, self._caller) for n, each in tensors.items()}
        is_of = all(n in self._states and self._states[n].is_of(t) for n, t in tensors.items())
        if self._value is None or not is_of:
            # The old value is freed first, because two copies might not fit.
            self.forget()
            with torch.no_grad():
                self._value = make()
            self._states = states
        return self._value

    def forget(self) -> None:
        """Drop the value, so that the next call computes it."""
        self._states, self._value = {}, None
