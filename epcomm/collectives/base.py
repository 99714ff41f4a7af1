"""The contract of a transport: all-to-all of rows, all-gather of equal tensors, agreement."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from epcomm.collectives.bounded import BoundedWait
from epcomm.collectives.call_order import CallKind, CallOrder, CallSign
from epcomm.config import EPConfig
from epcomm.errors import ConfigError, ShapeError, describe_ranks

if TYPE_CHECKING:
    import torch.distributed as dist

# Seconds that a collective waits for other ranks until a layer says otherwise.
DEFAULT_TIMEOUT_S = EPConfig.timeout_s

Scalar = str | int | float | bool | None

# Bytes that every rank sends of its records at first, their length among them: twice what a plan in
# mode auto needs, the longest of this package. Longer ones take a second exchange.
_FIRST_BYTES = 8192
_LENGTH_BYTES = 8


class Collectives(ABC):
    """Three collective operations over the ranks of one group.

    All ranks call the same operations in the same order. Ranks are numbered inside the group.
    `phase` says what a collective is for, in the message of a wait that was in vain.

    Raises, on every collective:
        EPTimeout: other ranks did not arrive in time; the message names them. Every later
            collective raises the same at once. A transport without `bounded` follows its own rules.
    """

    rank: int
    world_size: int
    device: torch.device
    # What packages that bring their own exchange take for the ranks; None on other transports.
    process_group: dist.ProcessGroup | None = None
    # Ends the waits of the collectives; None where the host does not wait in them.
    bounded: BoundedWait | None = None
    # Seconds that kernels wait for other ranks; EPGroup.limit_waits() sets it with that of bounded.
    kernel_timeout_s: float = DEFAULT_TIMEOUT_S

    @cached_property
    def calls(self) -> CallOrder:
        """The calls made over this transport, which ranks compare before they send rows."""
        return CallOrder(self)

    def close(self) -> None:
        """Free what this object made for itself, never what it was given. Local, idempotent."""
        self.calls.close()

    @abstractmethod
    def all_to_all(
        self,
        send: Tensor,
        *,
        send_splits: Sequence[int] | None = None,
        recv_splits: Sequence[int] | None = None,
        out: Tensor | None = None,
        phase: str = "all_to_all",
    ) -> Tensor:
        """Send consecutive rows to each rank and return the rows from all ranks, by source.

        Args:
            send: [N, ...], contiguous, any dtype (bytes travel); N = sum(send_splits).
            send_splits: rows for each rank; None: N / W each.
            recv_splits: rows from each rank; None: N / W each.
            out: where to put them, contiguous; None: memory of their own.
            phase: what the exchange is for.

        Returns:
            [sum(recv_splits), ...], ordered by source rank.

        Collective: yes; trailing shape and dtype equal on all ranks.
        Host sync: on gloo, until the rows are here; on NCCL none.
        Lifetime: the caller owns the result, which is `out` if that was given. On transports with
            `bounded`, `send` may be overwritten when this returns.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor, *, phase: str = "all_gather") -> Tensor:
        """Return [W, *tensor.shape]: the tensors of all ranks.

        Collective: yes; shape and dtype equal on all ranks.
        Host sync: as all_to_all.   Lifetime: the caller owns the result.
        """

    def gather_records(
        self, record: Mapping[str, Scalar], *, phase: str = "gather_records"
    ) -> list[dict[str, Scalar]]:
        """Return the small records of all ranks, by rank; JSON travels, never pickle.

        Collective: yes.   Host sync: yes.
        """
        return [record for (record,) in self._gather_json([record], phase)]

    def agree(
        self,
        record: Mapping[str, Scalar],
        *,
        what: str,
        findings: Mapping[str, Scalar] | None = None,
    ) -> list[dict[str, Scalar]]:
        """Compare a record over all ranks.

        Args:
            record: names and values that must be equal everywhere.
            what: the function and the thing compared, for the message.
            findings: what this rank has to tell, which may differ; it takes no exchange of its own.

        Returns:
            The findings of all ranks, by rank.

        Collective: yes.   Host sync: yes.

        Raises:
            ConfigError: some field differs; on every rank, with the field, values and ranks.
        """
        gathered = self._gather_json([record, findings or {}], what)
        records = [compared for compared, _ in gathered]
        names = list(dict.fromkeys(name for other in records for name in other))
        faults = [
            _describe_values(name, [other.get(name, "<absent>") for other in records])
            for name in names
            if len({json.dumps(other.get(name, "<absent>")) for other in records}) > 1
        ]
        if faults:
            raise ConfigError(
                f"{what}: ranks disagree on {'; on '.join(faults)} "
                f"(this is rank {self.rank} of {self.world_size}); make them equal on all ranks"
            )
        return [each for _, each in gathered]

    def _gather_json(
        self, records: Sequence[Mapping[str, Scalar]], phase: str
    ) -> list[list[dict[str, Scalar]]]:
        """Gather what all ranks pass, by rank; most often in one exchange behind the header."""
        if self.bounded is not None:
            self.calls.exchange_headers(CallSign(kind=CallKind.RECORDS), phase=phase)
            phase = f"{phase}, records"
        payload = json.dumps([dict(record) for record in records]).encode()
        message = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload
        texts = self._gather_bytes(message[:_FIRST_BYTES].ljust(_FIRST_BYTES), phase)
        lengths = [int.from_bytes(text[:_LENGTH_BYTES], "little") for text in texts]
        num_left = _LENGTH_BYTES + max(lengths) - _FIRST_BYTES
        if num_left > 0:
            rests = self._gather_bytes(message[_FIRST_BYTES:].ljust(num_left), phase)
            texts = [text + rest for text, rest in zip(texts, rests, strict=True)]
        return [json.loads(text[_LENGTH_BYTES:]) for text in texts]

    def _gather_bytes(self, message: bytes, phase: str) -> list[bytes]:
        """Return the messages of all ranks, by rank, of one length."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self.device)
        gathered = self.all_gather(mine, phase=phase).cpu().numpy()
        return [gathered[rank].tobytes() for rank in range(self.world_size)]


def _describe_values(name: str, values: Sequence[Scalar]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(json.dumps(value), []).append(rank)
    parts = [f"{value} on {describe_ranks(ranks)}" for value, ranks in ranks_of.items()]
    return f"{name}: {', '.join(parts)}"


def check_sendable(tensor: Tensor, device: torch.device) -> None:
    """Refuse what a collective cannot take.

    Raises:
        ShapeError: the tensor is not contiguous, or not on the device of the group.
    """
    if not tensor.is_contiguous() or tensor.device != device:
        raise ShapeError(
            f"collective: tensor {list(tensor.shape)} with strides {tensor.stride()} on "
            f"{tensor.device}, expected contiguous on {device}; call .contiguous() or .to()"
        )


def receiving(out: Tensor | None, send: Tensor, num_rows: int) -> Tensor:
    """Return the memory of `num_rows` rows like those of `send`: `out` if it fits, else new memory.

    Raises:
        ShapeError: `out` is given and has another shape or dtype, or is not contiguous.
    """
    shape = (num_rows, *send.shape[1:])
    if out is None:
        return send.new_empty(shape)
    if out.shape != shape or out.dtype != send.dtype:
        raise ShapeError(
            f"collective: out is {out.dtype} {list(out.shape)}, expected {send.dtype} "
            f"{list(shape)}; pass None"
        )
    check_sendable(out, send.device)
    return out
