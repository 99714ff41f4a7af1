"""The contract of a transport: all-to-all of rows, all-gather of equal tensors, agreement."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.collectives.bounded import DEFAULT_TIMEOUT_S, BoundedWait
from epcomm.errors import BackendUnavailable, ConfigError, RankNames, ShapeError, grouped

Scalar = str | int | float | bool | None
# The rows to or from each rank, [W]; None: equal ones.
Splits = Sequence[int] | None

# Bytes in the first exchange of records, including their length: twice the longest records of this
# package, those of a plan in mode auto. Longer records need a second exchange.
_FIRST_BYTES = 8192
_LENGTH_BYTES = 8


class Closable(Protocol):
    """An object that holds memory until it is closed."""

    def close(self) -> None:
        """Free the memory. Local, idempotent."""
        ...


class StreamOrder:
    """A single order for the calls of a group on the device, whatever stream each call uses.

    Kernels wait for other ranks. On unordered streams they could occupy two GPUs in different
    orders and deadlock.
    """

    def __init__(self) -> None:
        # The stream of the last call and its raw handle, which is cheaper to compare.
        self._stream: torch.cuda.Stream | None = None
        self._number: int | None = None

    def follow(self, device: torch.device) -> None:
        """Make the current stream of a CUDA device wait for the stream of the last call. Local.

        During stream capture it does nothing: a graph cannot wait for work outside it.
        """
        number = torch._C._cuda_getCurrentRawStream(device.index)
        if number == self._number or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._stream, self._number = stream, number

    def fork(self, device: torch.device, side: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event after which the next call runs on `side`, in order. Local.

        Calls on `side` are in order among themselves, so the current stream does not wait for them.
        """
        if self._stream is not side:
            self.follow(device)
        begun = torch.cuda.Event()
        begun.record(torch.cuda.current_stream(device))
        if not torch.cuda.is_current_stream_capturing():
            self._stream, self._number = side, side.cuda_stream
        return begun


class Collectives(ABC):
    """The collective operations over the ranks of one group.

    All ranks call the same operations in the same order. Ranks are numbered inside the group.
    `phase` names the purpose of a collective in the message of a timeout.

    Raises, on every collective:
        EPTimeout: other ranks did not arrive in time; the message names them. Every later
            collective raises the same immediately. A transport without `bounded` has its own rules.
    """

    rank: int
    world_size: int
    device: torch.device
    # The process group for packages with their own exchange; None on other transports.
    process_group: dist.ProcessGroup | None = None
    # Limits the waits of the host; None if the host does not wait in collectives.
    bounded: BoundedWait | None = None
    # Seconds that kernels wait for other ranks, see limit_waits().
    kernel_timeout_s: float = DEFAULT_TIMEOUT_S
    # The Calls of all groups on these collectives; close() closes it.
    calls: Closable | None = None
    # In a part of a group, the suffix of phases in messages, such as `, between hosts`.
    scope: str = ""

    @cached_property
    def names(self) -> RankNames:
        """The numbers of the ranks for messages; in a part of a group, those in the group."""
        return RankNames.of_all(self.rank, self.world_size)

    @cached_property
    def streams(self) -> StreamOrder:
        """The order of calls on the device, shared by all buffers of a group and its parts."""
        return StreamOrder()

    @cached_property
    def _parts(self) -> dict[tuple[tuple[int, ...], ...], Collectives]:
        """The parts made by split(), keyed by all parts of the division."""
        return {}

    def limit_waits(self, timeout_s: float) -> None:
        """Set how long this rank waits for others, here and in all parts. Local."""
        self.kernel_timeout_s = timeout_s
        if self.bounded is not None:
            self.bounded.timeout_s = timeout_s
        for part in self._parts.values():
            part.limit_waits(timeout_s)

    def separate(self) -> str:
        """Move all exchanges to connections that only this object uses, if that is possible.

        Returns: '' if exchanges may run on another thread than the collectives that other code runs
            on the same ranks, in any order relative to them; otherwise the reason why not. Equal on
            all ranks.

        Collective: yes.   Host sync: yes.
        """
        return f"{type(self).__name__} has no connections of its own"

    def separate_begun(self) -> None:  # noqa: B027
        """Make a communicator for exchanges on a device, if they share one; called once.

        Without it, begun calls would wait on the device for other collectives of the process group.
        It takes memory of the device, so it is made for the first begun call.

        Collective: yes.   Host sync: yes.
        """

    def split(self, parts: Sequence[Sequence[int]], *, scope: str) -> Collectives:
        """Return the collectives of the part that contains this rank.

        Messages of the part name ranks by their numbers in the whole group. A part has the same
        timeout and failure board, so a rank that waits in one part is not missing in another.

        Args:
            parts: the ranks of each part, ascending; each rank is in exactly one.
            scope: the suffix of phases in messages, such as `, between hosts`.

        Collective: yes, the first time for these parts.   Host sync: yes.
        Lifetime: until these collectives are closed; the same parts return the same object.
        """
        key = tuple(map(tuple, parts))
        assert all(list(part) == sorted(part) for part in key), "ranks ascend in every part"
        if key not in self._parts:
            mine = next(part for part in key if self.rank in part)
            found = self._make_part(mine)
            found.names = RankNames(
                own=self.names.own,
                numbers=tuple(self.names.numbers[rank] for rank in mine),
                world_size=self.names.world_size,
            )
            found.streams = self.streams
            found.scope = scope
            found.kernel_timeout_s = self.kernel_timeout_s
            self._parts[key] = found
        return self._parts[key]

    def _make_part(self, ranks: Sequence[int]) -> Collectives:
        """Make the collectives of a part, with the `bounded` of the whole group.

        ranks: the ranks of the part, including this one.

        Collective: yes, over all ranks, each with its own part.
        """
        raise BackendUnavailable(
            f"split: {type(self).__name__} does not implement the division of its ranks "
            f"({self.names.where}); pass a process group or an mpi4py communicator"
        )

    def close(self) -> None:
        """Free what this object allocated, but not what the caller passed. Local, idempotent."""
        for part in self._parts.values():
            part.close()
        self._parts.clear()
        if self.calls is not None:
            self.calls.close()

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
            send: [N, ...], contiguous, any dtype (sent as bytes); N = sum(send_splits).
            send_splits: number of rows for each rank; None: N / W each.
            recv_splits: number of rows from each rank; None: N / W each.
            out: memory for the received rows, contiguous; None: a new tensor.
            phase: the purpose of the exchange.

        Returns:
            [sum(recv_splits), ...], ordered by source rank.

        Collective: yes; trailing shape and dtype equal on all ranks.
        Host sync: on gloo and MPI, until the rows have arrived; on NCCL none.
        Lifetime: the caller owns the result, which is `out` if that was given. On transports with
            `bounded`, `send` may be overwritten when this returns.
        Raises:
            ShapeError: a tensor is not contiguous, not on the device of the group, or does not fit.
        """
        num_rows = send.shape[0] if recv_splits is None else sum(recv_splits)
        out = _receiving(out, send, num_rows, self.device)
        self._all_to_all(out, send, recv_splits, send_splits, phase + self.scope)
        return out

    def all_gather(self, tensor: Tensor, *, phase: str = "all_gather") -> Tensor:
        """Return [W, *tensor.shape]: the tensors of all ranks.

        Collective: yes; shape and dtype equal on all ranks.
        Host sync: as all_to_all.   Lifetime: the caller owns the result.
        """
        _check_sendable(tensor, self.device)
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        self._all_gather(gathered, tensor, phase + self.scope)
        return gathered

    @abstractmethod
    def _all_to_all(
        self, recv: Tensor, send: Tensor, recv_splits: Splits, send_splits: Splits, phase: str
    ) -> None:
        """Implement all_to_all() for tensors that were checked; phase: with the scope."""

    @abstractmethod
    def _all_gather(self, recv: Tensor, tensor: Tensor, phase: str) -> None:
        """Implement all_gather() for tensors that were checked; phase: with the scope."""

    def gather_records(
        self, record: Mapping[str, Scalar], *, phase: str = "gather_records"
    ) -> list[dict[str, Scalar]]:
        """Return the small records of all ranks, by rank. They are sent as JSON, never as pickle.

        Collective: yes.   Host sync: yes.
        """
        return [record for (record,) in self._gather_json([record], phase)]

    def agree(
        self,
        record: Mapping[str, Scalar],
        *,
        what: str,
        findings: Mapping[str, Scalar] | None = None,
        phase: str = "",
    ) -> list[dict[str, Scalar]]:
        """Compare a record over all ranks.

        Args:
            record: names and values that must be equal everywhere.
            what: the function and the object compared, for the message.
            findings: other values of this rank, which may differ; sent in the same exchange.
            phase: the name of the exchange; '': `what`.

        Returns:
            The findings of all ranks, by rank.

        Collective: yes.   Host sync: yes.

        Raises:
            ConfigError: some field differs; on every rank, with the field, values and ranks.
        """
        gathered = self._gather_json([record, findings or {}], phase or what)
        records = [compared for compared, _ in gathered]
        names = list(dict.fromkeys(name for other in records for name in other))
        faults = [
            self._describe_values(name, [other.get(name, "<absent>") for other in records])
            for name in names
            if len({json.dumps(other.get(name, "<absent>")) for other in records}) > 1
        ]
        if faults:
            raise ConfigError(
                f"{what}: ranks disagree on {'; on '.join(faults)} "
                f"(this is {self.names.where}); make them equal on all ranks"
            )
        return [each for _, each in gathered]

    def _describe_values(self, name: str, values: Sequence[Scalar]) -> str:
        ranks_of = grouped((json.dumps(value), rank) for rank, value in enumerate(values))
        parts = [f"{value} on {self.names.describe(ranks)}" for value, ranks in ranks_of.items()]
        return f"{name}: {', '.join(parts)}"

    def _gather_json(
        self, records: Sequence[Mapping[str, Scalar]], phase: str
    ) -> list[list[dict[str, Scalar]]]:
        """Return the records of all ranks, by rank; usually in one exchange."""
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
        """Return the messages of all ranks, by rank; their lengths are equal."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self.device)
        gathered = self.all_gather(mine, phase=phase).cpu().numpy()
        return [gathered[rank].tobytes() for rank in range(self.world_size)]


def _check_sendable(tensor: Tensor, device: torch.device) -> None:
    if not tensor.is_contiguous() or tensor.device != device:
        raise ShapeError(
            f"collective: tensor {list(tensor.shape)} with strides {tensor.stride()} on "
            f"{tensor.device}, expected a contiguous one on {device}; call .contiguous() or .to()"
        )


def _receiving(out: Tensor | None, send: Tensor, num_rows: int, device: torch.device) -> Tensor:
    """Return `out`, or new memory if it is None, for `num_rows` rows like those of `send`."""
    _check_sendable(send, device)
    shape = (num_rows, *send.shape[1:])
    if out is None:
        return send.new_empty(shape)
    if out.shape != shape or out.dtype != send.dtype:
        raise ShapeError(
            f"collective: out is {out.dtype} {list(out.shape)}, expected {send.dtype} "
            f"{list(shape)}; pass None"
        )
    _check_sendable(out, device)
    return out
