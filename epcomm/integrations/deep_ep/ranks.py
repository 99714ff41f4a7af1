"""The ranks of one deep_ep buffer, and the epcomm buffers that are opened on them by shape.

A Buffer of deep_ep learns H, K, E and the type of elements from its calls, so an epcomm buffer is
opened at the first call that needs it. All ranks make the same calls, and none decides by its own
T: buffers without a limit of tokens grow through the header that all ranks read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from epcomm.buffers.base import Buffer
from epcomm.config import Mode
from epcomm.errors import BackendUnavailable, HandleError
from epcomm.group import EPGroup
from epcomm.planning.ranks import Transport
from epcomm.platforms.machine import this_machine
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


class Ranks:
    """Keeps what is open for the ranks of one process group, or of one communicator of mpi4py."""

    def __init__(self, ranks: dist.ProcessGroup | MPI.Comm) -> None:
        """Wrap the ranks, which may be a part of the world. Local; no rank is waited for."""
        self._group = EPGroup(ranks)
        self._opened: dict[tuple[Mode, BufferSpec], Buffer] = {}
        self._classes: dict[tuple[str, ...], str] = {}

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
        """Whether close() was called."""
        return self._group.is_closed

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
        buffer = self._opened.get((mode, spec))
        if buffer is not None:
            return buffer
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise HandleError(
                f"deep_ep: a call of a new shape came while a graph is captured ({self.where}), "
                "expected a shape that is open; run the call once before the capture"
            )
        names = _CLASSES.get((self.device.type, mode), ())
        if mode is Mode.NORMAL and spec.max_tokens_per_rank is not None:
            names = _STATIC_CLASSES.get(self.device.type, ())
        if names not in self._classes:
            self._classes[names] = self._choose(mode, names)
        buffer = self._group.open_buffer(self._classes[names], spec)
        self._opened[mode, spec] = buffer
        return buffer

    def close(self) -> None:
        """Close all buffers; see EPGroup.close()."""
        self._opened.clear()
        self._group.close()

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
