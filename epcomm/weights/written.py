"""Say what is made of parameters, and made anew whenever these have changed."""

from __future__ import annotations

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
    """The state of a tensor: which one it was, where it lay, and after how many writes.

    torch counts writes to a tensor, but neither those through its `.data` nor those of other
    processes. memory: what lay there, kept so that nothing else comes to lie there.
    """

    source: ReferenceType[Tensor]
    memory: Tensor
    address: int
    num_writes: int

    @classmethod
    def of(cls, name: str, tensor: Tensor, caller: str) -> Self:
        """Return the state of the tensor now.

        Raises:
            ConfigError: it was made in inference mode, where torch counts no writes, so that
                reloading would go unseen.
        """
        if tensor.is_inference():
            raise ConfigError(
                f"{caller}: {name} was made in inference mode, where tensors do not count "
                "writes; load the experts outside of it, under torch.no_grad()"
            )
        return cls(
            source=ref(tensor),
            memory=tensor.detach(),
            address=tensor.data_ptr(),
            num_writes=tensor._version,
        )

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is that one, lies where it lay, and was not written since."""
        is_same = self.source() is tensor and self.address == tensor.data_ptr()
        return is_same and self.num_writes == tensor._version


class Derived(Generic[T]):
    """A value made of tensors as they are now, such as experts packed for an operator.

    The tensors stay, for state_dict and for reloading; both take memory.
    """

    def __init__(self, caller: str) -> None:
        """Make nothing yet; `caller` is for messages."""
        self._caller = caller
        self._states: dict[str, WriteState] = {}
        self._value: T | None = None

    def of(self, tensors: Mapping[str, Tensor], make: Callable[[], T]) -> T:
        """Return what make() makes of the tensors, anew only if they changed since the last call.

        A write through `.data` leaves the version of its tensor as it was; then comes forget().

        Local.   Host sync: none.
        Raises:
            ConfigError: tensors that were made in inference mode, which do not tell when they are
                written.
        """
        states = {n: WriteState.of(n, each, self._caller) for n, each in tensors.items()}
        is_of = all(n in self._states and self._states[n].is_of(t) for n, t in tensors.items())
        if self._value is None or not is_of:
            # The old one is freed first: two copies beside the originals might not fit.
            self.forget()
            with torch.no_grad():
                self._value = make()
            self._states = states
        return self._value

    def forget(self) -> None:
        """Make it anew at the next call, whatever the tensors tell."""
        self._states, self._value = {}, None
