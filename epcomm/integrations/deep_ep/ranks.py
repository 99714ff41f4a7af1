"""The ranks of one deep_ep buffer, and the epcomm buffers that are opened on them by shape.

A Buffer of deep_ep learns H, K, E and the type of elements from its calls, so an epcomm buffer is
opened at the first call that needs it. All ranks make the same calls, and none decides by its own
T: buffers without a limit of tokens grow through the header that all ranks read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from epcomm.buffers.base import Buffer, ReturnsSlots
from epcomm.calls.header import CallKind
from epcomm.collectives.base import Scalar
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
    import torch.distributed as dist
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
    def mode(self) -> Mode:
        """The mode of epcomm."""
        return Mode.LOW_LATENCY if self is Service.LOW_LATENCY else Mode.NORMAL

    @property
    def is_static(self) -> bool:
        """Whether this is normal mode with static sizes."""
        return self in (Service.STATIC, Service.ROW_BUDGET)


_ON_HOSTS = ("SharedMemoryBuffer", "CollectiveBuffer")
# The classes that provide a service, by type of device, in order of preference. On a CPU there is
# no device to run ahead of the host, which may count rows: no class has a row budget.
_CLASSES = {
    ("cuda", Service.NORMAL): ("NVLinkBuffer",),
    ("cuda", Service.STATIC): ("NVLinkStaticBuffer",),
    ("cuda", Service.ROW_BUDGET): ("NVLinkRowBudgetBuffer",),
    ("cuda", Service.LOW_LATENCY): ("NVLinkMaskedBuffer",),
    ("cpu", Service.NORMAL): _ON_HOSTS,
    ("cpu", Service.STATIC): ("StaticCollectiveBuffer",),
    ("cpu", Service.LOW_LATENCY): _ON_HOSTS,
}

# The exchange in which ranks choose a class, in messages.
_CHOICE = "open deep_ep"
# The function of calls on new routes, in messages.
_DISPATCH = "dispatch"
# In headers, the size of an exchange of compare_owner(). Records have none.
_FOREIGN_SIZE = 1
# The errors that a refused call may have, by name.
_REFUSALS = {kind.__name__: kind for kind in (CapacityError, ConfigError, HandleError, ShapeError)}


class OpenBuffer(NamedTuple):
    """A buffer, and the specification of the call that it serves."""

    buffer: Buffer
    spec: BufferSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a dispatch that are equal on all ranks beside its specification.

    num_max_tokens_per_rank: a limit of tokens beside exact sizes, 0 for none.
    num_worst_tokens: the rows that a rank of V1 receives in exact sizes, 0 for those that come.
    has_topk_weights, do_expand: whether the call makes exchanges in addition, or needs none.
    """

    num_max_tokens_per_rank: int = 0
    num_worst_tokens: int = 0
    has_topk_weights: bool = True
    do_expand: bool = False

    def as_word(self) -> int:
        """Return them as one number for the headers of the call."""
        # A call has one of both limits at most.
        limit = self.num_max_tokens_per_rank + self.num_worst_tokens
        return limit << 2 | self.has_topk_weights << 1 | self.do_expand


NO_OPTIONS = Options()


class Ranks:
    """The ranks of one process group or mpi4py communicator, and the buffers open on them.

    rank, size: the number of this rank, and W.   device: of the tensors of the ranks.
    where: this rank in messages, such as `rank 3 of 8`.
    """

    def __init__(self, ranks: dist.ProcessGroup | MPI.Comm) -> None:
        """Wrap the ranks, which may be a part of the world. Local; no rank is waited for."""
        self._ranks = ranks
        self._group = self._new_group()
        self.rank, self.size = self._group.rank, self._group.world_size
        self.device, self.where = self._group.device, self._group.where
        # The function of the last call and its arguments, compared where the calls of ranks differ.
        self._asked: tuple[str, Callable[[], Record]] = ("", dict)
        self._opened: dict[tuple[Service, BufferSpec], Buffer] = {}
        self._classes: dict[Service, type[Buffer]] = {}
        # The buffers of the last calls.
        self.last: dict[Service, OpenBuffer] = {}

    @property
    def reads_faults(self) -> bool:
        """Whether hosts read faults of static sizes in the call: on CPUs, where they wait."""
        return self.device.type == "cpu"

    def has(self, service: Service) -> bool:
        """Return whether there is a class for a service on this type of device."""
        return (self.device.type, service) in _CLASSES

    def follow(self, device: torch.device) -> None:
        """Serve tensors on `device`, if the first call brings some that the group does not move.

        Programs make groups of gloo for what hosts say, and call with tensors of their GPU. Local.
        """
        if device.type == self.device.type or self._classes or device.type != "cuda":
            return
        self._group = self._new_group(device)
        self.device = self._group.device

    def check_open(self, function: str) -> None:
        """Raise HandleError after close()."""
        if self._group.is_closed:
            raise HandleError(
                f"{function}: the buffer is destroyed ({self.where}); make a new Buffer"
            )

    def open(self, service: Service, spec: BufferSpec, options: Options = NO_OPTIONS) -> Buffer:
        """Return the epcomm buffer for rows of `spec`, opened if no call had its shape before.

        options: of the call that follows.

        Collective: for a new shape; all ranks come to new shapes in the same call.
        Host sync: for a new shape.
        Raises:
            BackendUnavailable: no class here provides the service; on every rank.
            ConfigError: ranks ask for other shapes; on every rank.
            HandleError: the shape is new, and the stream is being captured; or after close().
        """
        self._asked = _DISPATCH, partial(_record_of, service, spec, options)
        last = self.last.get(service)
        # Calls of one shape bring one object, and comparing shapes takes 5 us.
        if last is not None and last.spec is spec:
            return last.buffer
        key = service, spec
        if key not in self._opened:
            self._opened[key] = self._open_new(service, spec, options)
        self.last[service] = OpenBuffer(self._opened[key], spec)
        return self._opened[key]

    def _open_new(self, service: Service, spec: BufferSpec, options: Options) -> Buffer:
        kind = self._class_of(service)
        if spec.num_sms is not None:
            # Where calls say it, one buffer serves all numbers of SMs.
            shared = self.open(service, replace(spec, num_sms=None), options)
            if shared.takes_num_sms or not kind.needs_nvlink:
                return shared
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise HandleError(
                f"deep_ep: a call of a new shape came while a graph is captured ({self.where}), "
                "expected a shape that is open; run the call once before the capture"
            )
        return self._group.open_buffer(kind.__name__, spec)

    def go_along(
        self, function: str, num_columns: int, dtype: torch.dtype, *, has_weights: bool = False
    ) -> None:
        """Note the arguments of the next call along a handle, compared if calls differ. Local.

        Columns and dtype of x, and whether weights travel, are equal on all ranks.
        """
        record = {"x": f"[rows, {num_columns}] {dtype}", "has_topk_weights": has_weights}
        self._asked = function, lambda: record

    def compare_owner(self, function: str, buffer: Buffer) -> None:
        """Refuse a handle of another Buffer on some ranks, where hosts compare calls.

        A program may replace its Buffer between forward and backward. All ranks then pass handles
        of the previous Buffer, and call in its group. This group only checks that all ranks do.

        Collective: if `buffer` was not opened here, on CPU ranks.   Host sync: likewise.
        Raises:
            HandleError: only some ranks pass such a handle; on every rank.
        """
        if buffer.needs_nvlink or any(each is buffer for each in self._opened.values()):
            return
        error = HandleError(
            f"{function}: handle is of another Buffer on some ranks, expected one of this Buffer "
            f"({self.where}); pass what its dispatch() returned, or on all ranks a handle of the "
            "other Buffer"
        )
        self._group.calls.announce(CallKind.RECORDS, size=_FOREIGN_SIZE, error=error, fault=0)

    def returns_slots(self) -> bool:
        """Return whether low latency returns each slot to its source. Collective: at first."""
        return issubclass(self._class_of(Service.LOW_LATENCY), ReturnsSlots)

    def refuse_on_hosts(self, service: Service, error: EPError) -> None:
        """Raise `error` on every rank, whichever call it makes, where hosts compare calls.

        Return over NVLink, where kernels alone wait for peers, if the class is chosen.

        Collective: in place of a call.   Host sync: yes.
        """
        kind = self._classes.get(service)
        if kind is not None and kind.needs_nvlink:
            return
        calls = self._group.calls
        if not calls.waits:
            # Hosts compare nothing, but choose a class before the first call.
            calls.gather_records(_refusal(error), phase=_CHOICE)
        else:
            calls.announce(CallKind.REFUSAL, error=error, fault=0)
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

    def gather_counts(self, record: Record) -> list[dict[str, Scalar]]:
        """Return the records of all ranks, which learn of it if one makes another call.

        Collective: yes.   Host sync: yes.
        """
        return self._group.calls.gather_records(record, phase="dispatch counts")

    def close(self) -> None:
        """Close all buffers; see EPGroup.close()."""
        self._opened.clear()
        self.last.clear()
        self._group.close()

    def _new_group(self, device: torch.device | None = None) -> EPGroup:
        group, this = EPGroup(self._ranks, device=device), weakref.ref(self)

        def explain(kinds: Sequence[CallKind], error: EPError | None) -> None:
            # A cycle of references would keep the buffers of a group that is dropped.
            ranks = this()
            # A handle may be read after its Buffer was freed.
            if ranks is not None:
                ranks._explain(kinds, error)

        group.calls.explain_by(explain)
        return group

    def _explain(self, kinds: Sequence[CallKind], error: EPError | None) -> None:
        """Raise the refusal of a rank, or the difference between the arguments of all ranks.

        kinds: of the calls of all ranks.   error: this rank's own.

        Collective: yes.   Host sync: yes.
        """
        function, record = self._asked
        are_new = {kind in (CallKind.DISPATCH, CallKind.RECORDS) for kind in kinds}
        if are_new != {function == _DISPATCH}:
            # The calls are of both kinds, or this one is none of those that note their arguments.
            function = ""
        calls = self._group.calls
        mine = {"function": function, **_refusal(error)}
        everyone = calls.gather_records(mine, phase="different calls")
        if error is not None:
            raise error
        _raise_refusal(everyone, self.where)
        if function and all(each["function"] == function for each in everyone):
            calls.agree(record(), what=function)

    def _class_of(self, service: Service) -> type[Buffer]:
        if service not in self._classes:
            self._classes[service] = buffer_class(self._choose(service))
        return self._classes[service]

    def _choose(self, service: Service) -> str:
        """Return the first class for a service that every rank can have.

        Collective: yes.
        Raises:
            BackendUnavailable: there is none; on every rank.
            EPError: some rank refused its call, see refuse_on_hosts().
        """
        ranks = PlannedRanks.of(self._group)
        machine = ranks.machine
        names = _CLASSES.get((self.device.type, service), ())
        found: dict[str, str] = {"host": machine.host()}
        for name in names:
            kind = buffer_class(name)
            own_reasons = ranks.own_reasons(kind, kind.caps(service.mode))
            found[name] = "; ".join([*kind.probe(machine).reasons, *own_reasons])
        everyone = self._group.calls.gather_records(found, phase=_CHOICE)
        _raise_refusal(everyone, self.where)
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
            f"deep_ep: no backend provides {service} on {self.device} ({self.where}): "
            f"{'; '.join(lacking) or 'no backend is for this device'}; use ranks of one host"
        )


def _record_of(service: Service, spec: BufferSpec, options: Options) -> Record:
    """Return the arguments of a dispatch that all ranks have in common, as plain values."""
    # Ranks may take other numbers of SMs.
    shape = replace(spec, num_sms=None).as_record()
    return {"service": service, **shape, **asdict(options)}


def _refusal(error: EPError | None) -> dict[str, str]:
    """Return the record by which other ranks learn of this rank's error, empty without one."""
    return {} if error is None else {"refused": str(error), "kind": type(error).__name__}


def _raise_refusal(everyone: Sequence[Record], where: str) -> None:
    """Raise the error of the first rank whose record holds one.

    Raises:
        EPError: as that rank raises it.
    """
    for rank, each in enumerate(everyone):
        if "refused" in each:
            kind = _REFUSALS.get(str(each["kind"]), EPError)
            raise kind(
                f"deep_ep: the call of rank {rank} cannot be made (this is {where}); correct it "
                f"there: {each['refused']}"
            )
