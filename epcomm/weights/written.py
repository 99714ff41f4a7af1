"""Whether a tensor still holds what was copied from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self
from weakref import ReferenceType, ref

from torch import Tensor

from epcomm.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class WriteState:
    """Which tensor it was, where it lay, and after how many writes.

    torch counts writes to a tensor, but neither those through its `.data` nor those of other
    processes. memory: what lay there, kept so that nothing else comes to lie there.
    """

    source: ReferenceType[Tensor]
    memory: Tensor
    address: int
    num_writes: int

    @classmethod
    def of(cls, name: str, tensor: Tensor, caller: str) -> Self:
        """The state of the tensor now.

        Raises:
            ConfigError: it was made in inference mode, where torch counts no writes, so that
                reloading would go unseen.
        """
        if tensor.is_inference():
            raise ConfigError(
                f"{caller}: {name} was made in inference mode, where tensors do not tell when they "
                "are written; load the experts outside of it, under torch.no_grad()"
            )
        return cls(
            source=ref(tensor),
            memory=tensor.detach(),
            address=tensor.data_ptr(),
            num_writes=tensor._version,
        )

    def is_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` is that one, lies where it lay, and was not written since."""
        is_same = self.source() is tensor and self.address == tensor.data_ptr()
        return is_same and self.num_writes == tensor._version
