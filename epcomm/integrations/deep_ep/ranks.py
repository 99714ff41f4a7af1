"""The ranks of one deep_ep buffer, and the epcomm buffers that are opened on them by shape.

A Buffer of deep_ep learns H, K, E and the type of elements from its calls, so an epcomm buffer is
opened at the first call that needs it. No rank decides by its own T.

On CPU ranks each call begins with an exchange of its name and of the arguments that all ranks have
in common. So a call that differs on one rank, or that it refuses, is an error on every rank before
rows are sent. Over NVLink ranks compare only when a buffer is opened.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from epcomm.buffers.base import Buffer
from epcomm.collectives.base import Collectives, Scalar
from epcomm.config import Mode
from epcomm.errors import (
    BackendUnavailable,
    CapacityError,
    ConfigError,
    EPError,
    HandleError,
    ShapeError,
)
from epcomm.group import EPGroup
from epcomm.planning.ranks import PlannedRanks
from epcomm.registry import buffer_class
from epcomm.spec import BufferSpec

if TYPE_CHECKING:
    from mpi4py import MPI

Record = Mapping[str, Scalar]


class Service(StrEnum):
    """The purpose of an epcomm buffer: low latency, or normal mode with exact or static sizes.

    With static sizes the host reads nothing. STATIC limits the tokens that a rank sends to
    max_tokens_per_rank, and ROW_BUDGET also the rows that it receives.
    """

    NORMAL = "normal"
    STATIC = "normal, static sizes"
    ROW_BUDGET = "normal, row budget"
    LOW_LATENCY = "low_latency"

    @property
    def is_static(self) -> bool:
        """Whether this is normal mode with static sizes."""
        return self in (Service.STATIC, Service.ROW_BUDGET)


# The classes that provide a service, by type of device, in order of preference. On a CPU there is
# no device to run ahead of the host, which may count rows: no class has a row budget. Low latency
# exchanges rows without a buffer there.
_CLASSES = {
    ("cuda", Service.NORMAL): ("NVLinkBuffer",),
    ("cuda", Service.STATIC): ("NVLinkStaticBuffer",),
    ("cuda", Service.ROW_BUDGET): ("NVLinkRowBudgetBuffer",),
    ("cuda", Service.LOW_LATENCY): ("NVLinkMaskedBuffer",),
    ("cpu", Service.NORMAL): ("SharedMemoryBuffer", "CollectiveBuffer"),
    ("cpu", Service.STATIC): ("StaticCollectiveBuffer",),
}

# The exchange in which ranks choose a class.
_CHOICE = "open deep_ep"
# The errors that a refused call may have, by name.
_REFUSALS = {kind.__name__: kind for kind in (CapacityError, ConfigError, HandleError, ShapeError)}


class OpenBuffer(NamedTuple):
    """A buffer, and the specification of the call that it serves."""

    buffer: Buffer
    spec: BufferSpec


class Ranks:
    """The ranks of one process group or mpi4py communicator, and the buffers open on them.

    rank, size: the number of this rank, and W.   device: of the tensors of the ranks.
    where: this rank in messages, such as `rank 3 of 8`.
    """

    def __init__(self, ranks: "dist.ProcessGroup | MPI.Comm") -> None:
        """Wrap the ranks, which may be a part of the world. Local."""
        self._ranks = ranks
        self._group = EPGroup(ranks)
        self.rank, self.size = self._group.rank, self._group.world_size
        self.device, self.where = self._group.device, self._group.where
        self._opened: dict[tuple[Service, BufferSpec], Buffer] = {}
        self._classes: dict[Service, type[Buffer]] = {}
        # The buffer of the last call of each service.
        self.last: dict[Service, OpenBuffer] = {}

    @property
    def reads_faults(self) -> bool:
        """True if hosts read faults of static sizes in the call, as on CPUs, where they wait."""
        return self.device.type == "cpu"

    def has(self, service: Service) -> bool:
        return (self.device.type, service) in _CLASSES

    def follow(self, device: torch.device) -> None:
        """Serve tensors on the GPU of the first call, also if the group is of gloo. Local."""
        if device.type == self.device.type or self._classes or device.type != "cuda":
            return
        self._group = EPGroup(self._ranks, device=device)
        self.device = self._group.device

    def check_open(self, function: str) -> None:
        if self._group.is_closed:
            where = self.where
            raise HandleError(f"{function}: the buffer is destroyed ({where}); make a new Buffer")

    def open(self, service: Service, spec: BufferSpec) -> Buffer:
        """Return the epcomm buffer for rows of `spec`, opened if no call had its shape before.

        Collective: for a new shape.   Host sync: for a new shape.
        Raises:
            BackendUnavailable: no class here provides the service; on every rank.
            ConfigError: ranks ask for other shapes; on every rank.
            HandleError: the shape is new, and the stream is being captured; or after close().
        """
        last = self.last.get(service)
        # Calls of one shape pass the same object, and comparing shapes takes 5 us.
        if last is not None and last.spec is spec:
            return last.buffer
        buffer = self._opened.get((service, spec))
        if buffer is None:
            if service not in self._classes:
                self._classes[service] = self._choose(service)
            kind = self._classes[service]
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise HandleError(
                    f"deep_ep: a call of a new shape came while a graph is captured ({self.where}),"
                    " expected a shape that is open; run the call once before the capture"
                )
            buffer = self._opened[service, spec] = self._group.open_buffer(kind.__name__, spec)
        self.last[service] = OpenBuffer(buffer, spec)
        return buffer

    def with_open_top_k(self, service: Service, spec: BufferSpec) -> BufferSpec:
        """Return the specification of a buffer that is open for any K, if K of `spec` is 0. Local.

        Without such a buffer the shape is new, and opening it is an error on every rank, because
        ranks disagree on K.
        """
        specs = [each for kind, each in self._opened if kind is service]
        return next((each for each in reversed(specs) if replace(each, top_k=0) == spec), spec)

    @property
    def collectives(self) -> Collectives:
        """The exchanges of the ranks, for low latency on CPUs."""
        return self._group.collectives

    def is_over_nvlink(self, service: Service) -> bool:
        """Return whether kernels alone wait for peers; False before the class is chosen."""
        kind = self._classes.get(service)
        return kind is not None and kind.needs_nvlink

    def announce(
        self, function: str, arguments: Record, error: EPError | None = None, *, over_nvlink: bool
    ) -> None:
        """Compare a call on all ranks before rows are sent, unless only kernels wait for peers.

        arguments: those that all ranks have in common.
        error: the reason why this rank refuses the call; then it returns only over NVLink.

        Collective: on CPU ranks.   Host sync: on CPU ranks.
        Raises:
            EPError: this rank or another refuses its call.
            ConfigError: the arguments differ.   HandleError: the functions differ.
        """
        if over_nvlink:
            return
        calls = self._group.calls
        if not calls.waits:
            if error is not None:
                # Hosts compare no calls, but they choose a class before the first one.
                self.gather(_CHOICE, {}, error)
            return
        everyone = self.gather(function, arguments, error)
        if any(each != everyone[0] for each in everyone):
            calls.agree(arguments, what=function)

    def gather(
        self, function: str, record: Record, error: EPError | None = None
    ) -> list[dict[str, Scalar]]:
        """Return the records of all ranks in a call; error: the reason why this rank refuses it.

        Collective: yes.   Host sync: yes.
        Raises:
            EPError: this rank or another refuses its call.   HandleError: the functions differ.
        """
        mine = {"function": function, **record}
        if error is not None:
            mine = {"function": function, "refused": str(error), "kind": type(error).__name__}
        everyone = self._group.calls.gather_records(mine, phase=function)
        if error is not None:
            raise error
        for rank, each in enumerate(everyone):
            if "refused" in each:
                kind = _REFUSALS.get(str(each["kind"]), EPError)
                raise kind(
                    f"deep_ep: the call of rank {rank} cannot be made (this is {self.where}); "
                    f"correct it there: {each['refused']}"
                )
        functions = [str(each["function"]) for each in everyone]
        if len(set(functions)) > 1:
            found = ", ".join(f"rank {rank} is in {name}" for rank, name in enumerate(functions))
            raise HandleError(
                f"{function}: ranks make different calls: {found} (this is {self.where}); call in "
                "the same order on all ranks"
            )
        return everyone

    def exclude(self, ranks: Sequence[int]) -> None:
        """Exclude ranks that are dead; see EPGroup.exclude_ranks().

        Raises:
            BackendUnavailable: buffers here need all ranks, or none is open yet.
        """
        if not self._opened:
            raise BackendUnavailable(
                f"deep_ep: ranks {list(ranks)} are masked, expected buffers over NVLink that all "
                f"ranks have opened ({self.where}); make a Buffer on the ranks that are left"
            )
        self._group.exclude_ranks(ranks)

    def close(self) -> None:
        """Close all buffers; see EPGroup.close()."""
        self._opened.clear()
        self.last.clear()
        self._group.close()

    def _choose(self, service: Service) -> type[Buffer]:
        """Return the first class for a service that every rank can have.

        Collective: yes.
        Raises:
            BackendUnavailable: there is none.   EPError: some rank refused its call.
        """
        ranks = PlannedRanks.of(self._group)
        machine = ranks.machine
        mode = Mode.LOW_LATENCY if service is Service.LOW_LATENCY else Mode.NORMAL
        kinds = {name: buffer_class(name) for name in _CLASSES.get((self.device.type, service), ())}
        found: dict[str, str] = {"host": machine.host()}
        for name, kind in kinds.items():
            own_reasons = ranks.own_reasons(kind, kind.caps(mode))
            found[name] = "; ".join([*kind.probe(machine).reasons, *own_reasons])
        everyone = self.gather(_CHOICE, found)
        hosts, lacking = {each["host"] for each in everyone}, []
        for name, kind in kinds.items():
            texts = [(rank, each[name]) for rank, each in enumerate(everyone)]
            reasons = [f"{name} on rank {rank}: {text}" for rank, text in texts if text]
            if kind.needs_one_host and (len(hosts) > 1 or "" in hosts):
                reasons.append(f"{name}: ranks are on {len(hosts)} hosts, expected one")
            if not reasons:
                return kind
            lacking += reasons
        raise BackendUnavailable(
            f"deep_ep: no backend provides {service} on {self.device} ({self.where}): "
            f"{'; '.join(lacking) or 'no backend is for this device'}; use ranks of one host"
        )
