"""The ranks of one deep_ep buffer, and the epcomm buffers that are opened on them by shape.

A Buffer of deep_ep learns H, K, E and the type of elements from its calls, so an epcomm buffer is
opened at the first call that needs it. All ranks make the same calls, and none decides by its own
T: buffers without a limit of tokens grow through the header that all ranks read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, DispatchCall
from epcomm.collectives.call_order import CallKind, CallSign
from epcomm.config import Mode
from epcomm.errors import BackendUnavailable, EPError, HandleError
from epcomm.group import EPGroup
from epcomm.planning.ranks import Transport
from epcomm.platforms.machine import this_machine
from epcomm.protocol import BatchFlags, FaultCode
from epcomm.registry import buffer_class
from epcomm.spec import BufferSpec

if TYPE_CHECKING:
    import torch.distributed as dist
    from mpi4py import MPI

# The classes that serve a mode, by type of device, in order of preference.
_CLASSES = {
    ("cuda", Mode.NORMAL): ("NVLinkBuffer",),
    ("cuda", Mode.LOW_LATENCY): ("NVLinkMaskedBuffer",),
    ("cpu", Mode.NORMAL): ("SharedMemoryBuffer", "CollectiveBuffer"),
    ("cpu", Mode.LOW_LATENCY): ("SharedMemoryBuffer", "CollectiveBuffer"),
}
# The same for normal mode with static sizes, of which the host reads nothing.
_STATIC_CLASSES = {"cuda": ("NVLinkStaticBuffer",), "cpu": ("StaticCollectiveBuffer",)}

# A buffer, and the specification that it was opened for.
OpenBuffer = tuple[Buffer, BufferSpec]


class Ranks:
    """Keeps what is open for the ranks of one process group, or of one communicator of mpi4py."""

    def __init__(self, ranks: dist.ProcessGroup | MPI.Comm) -> None:
        """Wrap the ranks, which may be a part of the world. Local; no rank is waited for."""
        self._ranks = ranks
        self._group = EPGroup(ranks)
        self._opened: dict[tuple[Mode, BufferSpec], Buffer] = {}
        self._classes: dict[tuple[str, ...], type[Buffer]] = {}
        # Of the last call.
        self.last: OpenBuffer | None = None

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return self._group.rank

    @property
    def size(self) -> int:
        """The number of ranks, W."""
        return self._group.world_size

    @property
    def device(self) -> torch.device:
        """The device of the tensors of the ranks."""
        return self._group.device

    @property
    def where(self) -> str:
        """The place of this rank for messages, such as `rank 3 of 8`."""
        return self._group.where

    @property
    def is_closed(self) -> bool:
        """Tell whether close() was called."""
        return self._group.is_closed

    def follow(self, device: torch.device) -> None:
        """Serve tensors on `device`, if the first call brings some that the group does not move.

        Programs make groups of gloo for what hosts say, and call with tensors of their GPU. Local.
        """
        if device.type == self.device.type or self._classes or device.type != "cuda":
            return
        self._group = EPGroup(self._ranks, device=device)

    def check_open(self, function: str) -> None:
        """Refuse a call after close().

        Raises:
            HandleError: close() was called.
        """
        if self.is_closed:
            raise HandleError(
                f"{function}: the buffer is destroyed ({self.where}); make a new Buffer"
            )

    def open(self, mode: Mode, spec: BufferSpec) -> Buffer:
        """Return the epcomm buffer for rows of `spec`, opened if no call had its shape before.

        In normal mode a limit of tokens asks for static sizes.

        Collective: for a shape that is new; all ranks come to new shapes in the same call.
        Host sync: for a shape that is new.
        Raises:
            BackendUnavailable: nothing here serves the mode; on every rank.
            ConfigError: ranks ask for other shapes; on every rank.
            HandleError: the shape is new, and the stream is being captured; or after close().
        """
        is_static = mode is Mode.NORMAL and spec.max_tokens_per_rank is not None
        kind = self._class_of(mode, is_static=is_static)
        if spec.num_sms is not None and not kind.needs_nvlink:
            spec = replace(spec, num_sms=None)
        buffer = self._opened.get((mode, spec))
        if buffer is not None:
            self.last = (buffer, spec)
            return buffer
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise HandleError(
                f"deep_ep: a call of a new shape came while a graph is captured ({self.where}), "
                "expected a shape that is open; run the call once before the capture"
            )
        buffer = self._group.open_buffer(kind.__name__, spec)
        self._opened[mode, spec] = buffer
        self.last = (buffer, spec)
        return buffer

    def returns_slots(self) -> bool:
        """Tell whether low latency brings the slots of a token home apart. Collective: at first."""
        return self._class_of(Mode.LOW_LATENCY).returns_slots

    def refuse(self, error: EPError) -> NoReturn:
        """Take part in the dispatch of the other ranks without rows, so that they hear of `error`.

        Collective: in place of a dispatch. Ranks that dispatch another shape than this rank did
        last hear of another call.
        Raises:
            error: always.
        """
        if self.last is not None:
            buffer, spec = self.last
            buffer.dispatch(_call_without_rows(spec, self.device, error))
        elif self._group.collectives.bounded is not None:
            sign = CallSign(kind=CallKind.DISPATCH)
            calls = self._group.collectives.calls
            calls.exchange_headers(sign, error=error, fault=int(FaultCode.of(error)))
        raise error

    def exclude(self, ranks: Sequence[int]) -> None:
        """Go on without ranks that are dead; see EPGroup.exclude_ranks().

        Raises:
            BackendUnavailable: buffers here need all ranks, or none is open yet.
        """
        if not self._opened:
            raise BackendUnavailable(
                f"deep_ep: ranks {list(ranks)} are masked before the first call ({self.where}), "
                "expected all of them in it; make a Buffer on the ranks that are left"
            )
        self._group.exclude_ranks(ranks)

    def sum_of_counts(self, counts: Tensor) -> tuple[int, ...]:
        """Return the sum over ranks of this rank's part of counts [W * L]: [L], on the host.

        Collective: yes.   Host sync: yes.
        """
        sent = counts.view(self.size, -1).contiguous()
        received = self._group.collectives.all_to_all(sent, phase="dispatch counts")
        return tuple(received.sum(0).tolist())

    def largest(self, number: int) -> int:
        """Return the largest of the numbers of all ranks. Collective: yes.   Host sync: yes."""
        mine = torch.tensor([number], device=self.device)
        gathered = self._group.collectives.all_gather(mine, phase="dispatch counts")
        return int(gathered.max())

    def close(self) -> None:
        """Close all buffers; see EPGroup.close()."""
        self._opened.clear()
        self.last = None
        self._group.close()

    def _class_of(self, mode: Mode, *, is_static: bool = False) -> type[Buffer]:
        device = self.device.type
        names = _STATIC_CLASSES[device] if is_static else _CLASSES[device, mode]
        if names not in self._classes:
            self._classes[names] = buffer_class(self._choose(mode, names))
        return self._classes[names]

    def _choose(self, mode: Mode, names: tuple[str, ...]) -> str:
        """Return the first class of `names` that every rank can have. Collective."""
        machine, transport = this_machine(), Transport.of(self._group)
        found: dict[str, str] = {"host": machine.host()}
        for name in names:
            kind = buffer_class(name)
            reasons = [
                *kind.probe(machine).reasons,
                *transport.reasons(kind, kind.caps(mode)),
            ]
            found[name] = "; ".join(reasons)
        everyone = self._group.collectives.gather_records(found, phase="open deep_ep")
        hosts = {str(each["host"]) for each in everyone}
        is_one_host = len(hosts) == 1 and bool(machine.host())
        lacking = []
        for name in names:
            reasons = [
                f"{name} on rank {rank}: {each[name]}"
                for rank, each in enumerate(everyone)
                if each[name]
            ]
            if buffer_class(name).needs_one_host and not is_one_host:
                reasons.append(f"{name}: ranks are on {len(hosts)} hosts, expected one")
            if not reasons:
                return name
            lacking += reasons
        raise BackendUnavailable(
            f"deep_ep: nothing serves mode {mode.value} on {self.device} ({self.where}): "
            f"{'; '.join(lacking) or 'no backend is for this device'}; use ranks of one host"
        )


def _call_without_rows(spec: BufferSpec, device: torch.device, error: EPError) -> DispatchCall:
    hidden_dtype = spec.hidden_format.dtype.torch_dtype
    return DispatchCall(
        hidden_states=torch.empty(0, spec.hidden_size, dtype=hidden_dtype, device=device),
        topk_ids=torch.empty(0, spec.top_k, dtype=torch.int64, device=device),
        topk_weights=torch.empty(0, spec.top_k, device=device),
        flags=BatchFlags.GRAD_ENABLED,
        error=error,
    )
