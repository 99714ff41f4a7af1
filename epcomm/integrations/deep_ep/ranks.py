"""The ranks of one deep_ep buffer, and the epcomm buffers that are opened on them by shape.

A Buffer of deep_ep learns H, K, E and the type of elements from its calls, so an epcomm buffer is
opened at the first call that needs it. All ranks make the same calls, and none decides by its own
T: buffers without a limit of tokens grow through the header that all ranks read.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, ReturnsRowTopk, ReturnsSlots
from epcomm.calls.call import DispatchCall
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
from epcomm.protocol import BatchFlags
from epcomm.records import ExchangePlan
from epcomm.registry import buffer_class
from epcomm.spec import BufferSpec
from epcomm.types import RowsPer

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
# Where the sizes are the rows that a rank receives. On a CPU there is no device to run ahead of the
# host, which may count them.
_ROW_BUDGET_CLASSES = {"cuda": ("NVLinkRowBudgetBuffer",)}

# The exchange in which ranks choose a class, in messages.
_CHOICE = "open deep_ep"

# In headers, the size of an exchange of compare_owner(). Records have none.
_FOREIGN_SIZE = 1

# The errors that a refused call may have, by name.
_REFUSALS = {kind.__name__: kind for kind in (CapacityError, ConfigError, HandleError, ShapeError)}

# A buffer, and the specification that it was opened for.
OpenBuffer = tuple[Buffer, BufferSpec]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a dispatch that are equal on all ranks beside its specification.

    num_max_tokens_per_rank: a limit of tokens beside exact sizes, 0 for none.
    num_worst_tokens: the rows that a rank of V1 receives in exact sizes, 0 for those that come.
    has_topk_weights, do_expand: these make exchanges of their own, or spare them.
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


@dataclass(frozen=True, kw_only=True)
class Along:
    """A call along a handle, as all ranks make it: the columns and dtype of x, and its options."""

    function: str
    num_columns: int
    dtype: torch.dtype
    has_topk_weights: bool

    def as_record(self) -> dict[str, str | bool]:
        """Return plain values for Collectives.agree()."""
        x = f"[rows, {self.num_columns}] {self.dtype}"
        return {"x": x, "has_topk_weights": self.has_topk_weights}


class Ranks:
    """Keeps what is open for the ranks of one process group, or of one communicator of mpi4py."""

    def __init__(
        self, ranks: dist.ProcessGroup | MPI.Comm, *, has_row_budget: bool = False
    ) -> None:
        """Wrap the ranks, which may be a part of the world. Local; no rank is waited for.

        has_row_budget: static sizes are the rows that a rank receives, not those that it sends.
        """
        self._ranks, self._has_row_budget = ranks, has_row_budget
        self._group = self._new_group()
        # What the last calls asked for, which ranks compare where their calls differ.
        self._asked_dispatch: tuple[Mode, BufferSpec, Options] | None = None
        self._asked_along: Along | None = None
        # Set by compare_owner() during its exchange; _explain() raises it.
        self._foreign: HandleError | None = None
        self._opened: dict[tuple[Mode, BufferSpec], Buffer] = {}
        self._classes: dict[tuple[str, ...], type[Buffer]] = {}
        # Of the last call, by the classes that serve it.
        self.last: dict[tuple[str, ...], OpenBuffer] = {}
        # The last call: calls of one shape bring one object, and comparing shapes takes 5 us.
        self._previous: tuple[Mode, BufferSpec, Buffer] | None = None

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
    def has_static_sizes(self) -> bool:
        """Return whether normal mode may have static sizes, of which the host reads nothing."""
        return self.device.type in self._static_classes

    @property
    def reads_faults(self) -> bool:
        """Return whether hosts read faults of static sizes at once: on CPUs, where they wait."""
        return self.device.type == "cpu"

    @property
    def is_closed(self) -> bool:
        """Return whether close() was called."""
        return self._group.is_closed

    def follow(self, device: torch.device) -> None:
        """Serve tensors on `device`, if the first call brings some that the group does not move.

        Programs make groups of gloo for what hosts say, and call with tensors of their GPU. Local.
        """
        if device.type == self.device.type or self._classes or device.type != "cuda":
            return
        self._group = self._new_group(device)

    def check_open(self, function: str) -> None:
        """Refuse a call after close().

        Raises:
            HandleError: close() was called.
        """
        if self.is_closed:
            raise HandleError(
                f"{function}: the buffer is destroyed ({self.where}); make a new Buffer"
            )

    def open(self, mode: Mode, spec: BufferSpec, options: Options = NO_OPTIONS) -> Buffer:
        """Return the epcomm buffer for rows of `spec`, opened if no call had its shape before.

        In normal mode a limit of tokens asks for static sizes.
        options: of the call that follows.

        Collective: for a shape that is new; all ranks come to new shapes in the same call.
        Host sync: for a shape that is new.
        Raises:
            BackendUnavailable: nothing here serves the mode; on every rank.
            ConfigError: ranks ask for other shapes; on every rank.
            HandleError: the shape is new, and the stream is being captured; or after close().
        """
        self._asked_dispatch = mode, spec, options
        if self._previous is not None and self._previous[0] is mode and self._previous[1] is spec:
            return self._previous[2]
        is_static = mode is Mode.NORMAL and spec.max_tokens_per_rank is not None
        kind = self._class_of(mode, is_static=is_static)
        buffer = self._opened.get((mode, spec))
        if buffer is None and spec.num_sms is not None:
            # Where calls say it, one buffer serves all numbers of SMs.
            shared = self.open(mode, replace(spec, num_sms=None), options)
            buffer = shared if isinstance(shared, ReturnsRowTopk) or not kind.needs_nvlink else None
            if buffer is not None:
                self._opened[mode, spec] = buffer
        if buffer is not None:
            self.last[self._names(mode, is_static=is_static)] = (buffer, spec)
            self._previous = mode, spec, buffer
            return buffer
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise HandleError(
                f"deep_ep: a call of a new shape came while a graph is captured ({self.where}), "
                "expected a shape that is open; run the call once before the capture"
            )
        buffer = self._group.open_buffer(kind.__name__, spec)
        self._opened[mode, spec] = buffer
        self.last[self._names(mode, is_static=is_static)] = (buffer, spec)
        self._previous = mode, spec, buffer
        return buffer

    def go_along(self, function: str, x: Tensor, *, has_weights: bool = False) -> None:
        """Note what the next call along a handle asks for, to be compared if calls differ. Local.

        Columns and dtype of x, and whether weights travel, are equal on all ranks.
        """
        self._asked_along = Along(
            function=function,
            num_columns=x.shape[1],
            dtype=x.dtype,
            has_topk_weights=has_weights,
        )

    def open_again(self, mode: Mode, found: OpenBuffer) -> Buffer:
        """Return a buffer that open() has returned for a call of the same shape. Local."""
        self._previous = None
        self._asked_dispatch = mode, found[1], NO_OPTIONS
        self.last[_CLASSES[self.device.type, mode]] = found
        return found[0]

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
        self._foreign = HandleError(
            f"{function}: handle is of another Buffer on some ranks, expected one of this Buffer "
            f"({self.where}); pass what its dispatch() returned, or on all ranks a handle of the "
            "other Buffer"
        )
        try:
            self._group.calls.announce(CallKind.RECORDS, size=_FOREIGN_SIZE)
        finally:
            self._foreign = None

    def returns_slots(self) -> bool:
        """Return whether low latency returns each slot to its source. Collective: at first."""
        return issubclass(self._class_of(Mode.LOW_LATENCY), ReturnsSlots)

    def refuse(
        self,
        mode: Mode,
        error: EPError,
        *,
        is_static: bool = False,
        spec: BufferSpec | None = None,
    ) -> NoReturn:
        """Take part in the dispatch of the other ranks without rows, so that they learn of `error`.

        Where hosts compare calls, on CPUs and where buffers open, every rank raises `error`,
        whatever it calls. Over NVLink the others make a dispatch of the same shape, and have NaN in
        its sums where no host reads what others say, in low latency and with static sizes; in any
        other call they, and this rank if the shape of its call is new, wait until the timeout.

        spec: of the call, if its tensors tell: over NVLink the others may open such a buffer now.
            None: that of the last call.

        Collective: in place of a dispatch of `mode`.
        Raises:
            error: always.
        """
        self.refuse_on_hosts(mode, error, is_static=is_static)
        if spec is not None:
            try:
                self.open(mode, spec)
            except EPError as problem:
                raise error from problem
        if (last := self.last.get(self._names(mode, is_static=is_static))) is not None:
            buffer, spec = last
            call = _call_without_rows(spec, self.device, error)
            out = buffer.dispatch(call)
            if spec.returns_slots and isinstance(buffer, ReturnsSlots):
                # They combine what they received, and wait for every rank. Not so this rank: its
                # next batch may have to come first.
                hidden_dtype = spec.hidden_format.dtype.torch_dtype
                no_rows = torch.zeros(1, spec.hidden_size, dtype=hidden_dtype, device=self.device)
                buffer.combine_slots_async(no_rows, out.exchange_plan, call.topk_weights)
            elif is_static and self.reads_faults:
                buffer.check()
            elif is_static:
                dtype = spec.hidden_format.dtype.torch_dtype
                no_rows = torch.zeros(1, spec.hidden_size, dtype=dtype, device=self.device)
                buffer.combine(no_rows, out.exchange_plan, rows_per=RowsPer.ROW)
        raise error

    def refuse_combine(self, mode: Mode, error: EPError) -> NoReturn:
        """Take part without rows in a combine of the other ranks along an unknown way.

        On CPUs every rank raises `error`, whatever it calls. Over NVLink the others are taken to
        combine the oldest batch in low latency, and their sums are NaN; in normal mode they wait
        until the timeout.

        Collective: in place of a combine, or a dispatch along a way that exists.
        Raises:
            error: always.
        """
        self.refuse_on_hosts(mode, error)
        if mode is Mode.LOW_LATENCY and (last := self.last.get(self._names(mode))) is not None:
            combine_error(last[0], last[1].hidden_size, self.device, error)
        raise error

    def refuse_on_hosts(self, mode: Mode, error: EPError, *, is_static: bool = False) -> None:
        """Raise `error` on every rank, whichever call it makes, where hosts compare calls.

        Return over NVLink, where kernels alone wait for peers, if the classes of `mode` are chosen.

        Collective: in place of a call.   Host sync: yes.
        Raises:
            error: on every rank.
        """
        kind = self._classes.get(self._names(mode, is_static=is_static))
        if kind is not None and kind.needs_nvlink:
            return
        calls = self._group.calls
        if not calls.waits:
            # Hosts compare nothing, but choose a class before the first call.
            calls.gather_records(_refusal(error), phase=_CHOICE)
        else:
            calls.announce(CallKind.REFUSAL, error=error, fault=0)
        raise error

    def _explain(self, kinds: Sequence[CallKind], error: EPError | None) -> None:
        """Raise what ranks refuse, or in what the shapes of their dispatches differ.

        kinds: of the calls of all ranks.   error: this rank's own.

        Collective: yes.   Host sync: yes.
        """
        calls, along = self._group.calls, self._asked_along
        foreign, self._foreign = self._foreign, None
        error = error or foreign
        is_new = {kind in (CallKind.DISPATCH, CallKind.RECORDS) for kind in kinds}
        function, asked = None, {}
        if is_new == {True} and self._asked_dispatch is not None:
            mode, spec, options = self._asked_dispatch
            function = "dispatch"
            # Ranks may take other numbers of SMs.
            shape = replace(spec, num_sms=None).as_record()
            asked = {"mode": mode.value, **shape, **asdict(options)}
        elif is_new == {False} and along is not None:
            function, asked = along.function, along.as_record()
        everyone = calls.gather_records(
            {"function": function, **_refusal(error)}, phase="different calls"
        )
        if error is not None:
            raise error
        _raise_refusal(everyone, self.where)
        if function is not None and all(each["function"] == function for each in everyone):
            calls.agree(asked, what=function)

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
        mine = {"counts": " ".join(map(str, counts.tolist()))}
        # As a record: ranks that make another call hear of that, and meet no foreign sizes.
        everyone = self._group.calls.gather_records(mine, phase="dispatch counts")
        counts_of_rank = [list(map(int, str(each["counts"]).split())) for each in everyone]
        rows = torch.tensor(counts_of_rank, dtype=torch.int64, device="cpu")
        return tuple(rows.sum(0).view(self.size, -1)[self.rank].tolist())

    def largest(self, number: int) -> int:
        """Return the largest of the numbers of all ranks. Collective: yes.   Host sync: yes."""
        everyone = self._group.calls.gather_records({"rows": number}, phase="dispatch counts")
        return max(int(each["rows"] or 0) for each in everyone)

    def close(self) -> None:
        """Close all buffers; see EPGroup.close()."""
        self._opened.clear()
        self.last.clear()
        self._previous = None
        self._group.close()

    def _class_of(self, mode: Mode, *, is_static: bool = False) -> type[Buffer]:
        names = self._names(mode, is_static=is_static)
        if names not in self._classes:
            self._classes[names] = buffer_class(self._choose(mode, names))
        return self._classes[names]

    def _names(self, mode: Mode, *, is_static: bool = False) -> tuple[str, ...]:
        device = self.device.type
        return self._static_classes[device] if is_static else _CLASSES[device, mode]

    @property
    def _static_classes(self) -> Mapping[str, tuple[str, ...]]:
        return _ROW_BUDGET_CLASSES if self._has_row_budget else _STATIC_CLASSES

    def _choose(self, mode: Mode, names: tuple[str, ...]) -> str:
        """Return the first class of `names` that every rank can have.

        Collective: yes.
        Raises:
            BackendUnavailable: there is none; on every rank.
            EPError: some rank refused its call, see refuse().
        """
        ranks = PlannedRanks.of(self._group)
        machine = ranks.machine
        found: dict[str, str] = {"host": machine.host()}
        for name in names:
            kind = buffer_class(name)
            reasons = [
                *kind.probe(machine).reasons,
                *ranks.own_reasons(kind, kind.caps(mode)),
            ]
            found[name] = "; ".join(reasons)
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
            f"deep_ep: nothing serves mode {mode.value} on {self.device} ({self.where}): "
            f"{'; '.join(lacking) or 'no backend is for this device'}; use ranks of one host"
        )


def _refusal(error: EPError | None) -> dict[str, str]:
    """Return the record by which other ranks learn of this rank's error, empty without one."""
    return {} if error is None else {"refused": str(error), "kind": type(error).__name__}


def _raise_refusal(everyone: Sequence[Mapping[str, Scalar]], where: str) -> None:
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


def _call_without_rows(spec: BufferSpec, device: torch.device, error: EPError) -> DispatchCall:
    hidden_dtype = spec.hidden_format.dtype.torch_dtype
    return DispatchCall(
        hidden_states=torch.empty(0, spec.hidden_size, dtype=hidden_dtype, device=device),
        topk_ids=torch.empty(0, spec.top_k, dtype=torch.int64, device=device),
        topk_weights=torch.empty(0, spec.top_k, dtype=torch.float32, device=device),
        flags=BatchFlags.GRAD_ENABLED,
        error=error,
    )


def combine_error(
    buffer: Buffer,
    hidden_size: int,
    device: torch.device,
    error: EPError,
    exchange_plan: ExchangePlan | None = None,
) -> None:
    """Take part in a combine without rows, so that the other ranks learn of `error`.

    Collective: in place of combine().
    Raises:
        error: where the other ranks raise too.
    """
    no_rows = torch.empty(0, hidden_size, dtype=torch.bfloat16, device=device)
    buffer.combine(no_rows, exchange_plan, rows_per=RowsPer.ROW, error=error)
