"""Collectives over a torch.distributed process group: gloo, nccl, hccl."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# Documented in this module, but torch does not export it for type checkers.
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (
    AllgatherOptions,  # type: ignore[attr-defined]
    AllToAllOptions,  # type: ignore[attr-defined]
)

from epcomm.collectives.base import Collectives, Scalar, Splits
from epcomm.collectives.bounded import SLICE_S, BoundedWait
from epcomm.collectives.failure_board import StoreFailureBoard
from epcomm.collectives.gloo_threads import settle_at_exit
from epcomm.errors import ConfigError, group_closed
from epcomm.platforms.host import host_of_this_process

# The device type that each backend supports.
_DEVICE_OF_BACKEND = {"gloo": "cpu", "mpi": "cpu", "fake": "cpu", "nccl": "cuda", "hccl": "npu"}

# torch 2.13 renamed all_gather_into_tensor; 2.11 has only the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Key in the store of a process group: the number of times that split() divided its ranks.
_NUM_DIVISIONS = "epcomm/divisions"

# The process groups made by separate_begun(), by the NCCL group that they serve: a communicator
# takes memory of the device until torch destroys all groups.
_separate_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()

# The connection of _connected() to the store of each process group. Making one may take seconds,
# because torch asks a name server for the name of its address.
_stores: WeakKeyDictionary[dist.ProcessGroup, PrefixStore] = WeakKeyDictionary()

# Smallest message, in bytes, that ranks of several hosts exchange by send and recv.
_LARGE_BYTES = 2**16
# Seconds by which gloo's own timeout is later than ours, so that ours is reported.
_MARGIN_S = 0.25
# Shortest timeout of Work.wait: it counts whole milliseconds, and 0 means no timeout.
_SHORTEST_WAIT_S = 0.001


class TorchDistCollectives(Collectives):
    """The collective operations on a process group that the caller owns and destroys.

    On gloo a collective waits at most `bounded.timeout_s`, whatever the timeout of the process
    group. An EPTimeout leaves the process group unusable, but it can be destroyed.

    On nccl and hccl a collective only enqueues work, and the host waits when it reads a result (the
    counts of an exact-size dispatch, check()). The watchdog of the process group detects a lost
    rank after the timeout given to init_process_group: it logs the operation, names no rank, and
    ends the process later (torch 2.11 with a timeout of 10 s: not yet after 50 s).
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """Wrap `process_group`, of which this rank is a member.

        Raises:
            ConfigError: its backend is not supported.
        """
        self.process_group = process_group
        # Runs the exchanges; separate() and separate_begun() replace it.
        self._group: dist.ProcessGroup | None = process_group
        # Whether the ranks are on several hosts, on connections that have no other users.
        self._spans_hosts = False
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        backend = _backend_of(process_group)
        kind = _DEVICE_OF_BACKEND[backend]
        self.device = torch.device(kind)
        if kind != "cpu":
            self.device = torch.device(kind, torch.get_device_module(kind).current_device())
        if backend == "gloo":
            settle_at_exit()
            store = process_group.get_group_store()
            board = StoreFailureBoard(store, rank=self.rank, world_size=self.world_size)
            self.bounded = BoundedWait(board, rank=self.rank, world_size=self.world_size)

    def close(self) -> None:
        """Release the process group, so that destroying it ends its threads. Local, idempotent."""
        super().close()
        self.process_group = self._group = None

    def separate(self) -> str:
        if self.bounded is None:
            # One thread launches all, so exchanges on a device are in order without a communicator
            # of their own; separate_begun() makes it.
            return "" if self.device.type == "cuda" else super().separate()
        if self._group is self.process_group:
            ranks = range(self.world_size)
            self._group, self._spans_hosts = _connected(self, self._open_group(), ranks)
        return ""

    def separate_begun(self) -> None:
        group = self._open_group()
        is_separate = self.bounded is not None or group is not self.process_group
        if is_separate or torch.cuda.is_current_stream_capturing():
            return
        if group not in _separate_groups:
            if len(set(self._gather_num_groups())) > 1:
                return
            _separate_groups[group] = self._new_group(group, range(self.world_size))
        self._group = _separate_groups[group]

    def _make_part(self, ranks: Sequence[int]) -> Collectives:
        self._open_group()
        whole = self.process_group
        assert whole is not None, "parts are not divided further"
        if self.bounded is not None:
            return _GlooPart(self, whole, ranks)
        num_groups = self._gather_num_groups()
        if len(set(num_groups)) > 1:
            raise ConfigError(
                f"split: the ranks have {num_groups} process groups, expected equal numbers, from "
                f"which torch derives names ({self.names.where}); make the same groups everywhere"
            )
        return TorchDistCollectives(self._new_group(whole, ranks))

    def _gather_num_groups(self) -> list[Scalar]:
        """Return the number of living process groups of each rank. Collective: yes.

        torch derives the name of a group from its ranks and from this number. If the numbers
        differ, ranks use different names and never meet.
        """
        record = {"groups": len(dist.distributed_c10d._world.pg_names)}
        return [each["groups"] for each in self.gather_records(record, phase="dividing the ranks")]

    def _new_group(self, whole: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Make a process group of `ranks` of `whole`, which torch destroys with the others.

        Collective: yes, over `ranks`.
        """
        made = dist.new_group(
            [dist.get_global_rank(whole, rank) for rank in ranks],
            backend=_backend_of(whole),
            # Ranks outside the group do not take part.
            use_local_synchronization=True,
        )
        assert isinstance(made, dist.ProcessGroup), "new_group() returns a group to its members"
        # It is not destroyed here: torch derives its name from the ranks, and a later group of the
        # same name would use the old addresses.
        return made

    def _all_to_all(
        self, recv: Tensor, send: Tensor, recv_splits: Splits, send_splits: Splits, phase: str
    ) -> None:
        recv, send = _as_bytes(recv), _as_bytes(send)
        # None and an empty list both mean equal splits.
        recv_rows, send_rows = list(recv_splits or ()), list(send_splits or ())
        group = self._open_group()
        if self.bounded is None:
            dist.all_to_all_single(recv, send, recv_rows, send_rows, group=group)
            return
        # Both ends of a large message see that it is large.
        if self._spans_hosts and max(recv.nbytes, send.nbytes) >= _LARGE_BYTES:
            received, sent = (
                rows.split(splits or [len(rows) // self.world_size] * self.world_size)
                for rows, splits in ((recv, recv_rows), (send, send_rows))
            )
            most = [max(r.nbytes, s.nbytes) for r, s in zip(received, sent, strict=True)]
            large = [r for r, n in enumerate(most) if r != self.rank and n >= _LARGE_BYTES]
            if large:
                self._exchange_large(received, sent, large, phase)
                return
        options = AllToAllOptions()
        start = partial(group.alltoall_base, recv, send, recv_rows, send_rows, options)
        _run(self.bounded, options, start, phase)

    def _exchange_large(
        self, recv: Sequence[Tensor], send: Sequence[Tensor], large: Sequence[int], phase: str
    ) -> None:
        """Exchange rows, by rank; with the ranks `large` in both directions at once.

        In gloo's all-to-all, a rank queues the notice that it is ready to receive after its own
        message on the same connection. If one of two ranks arrives later, their messages are sent
        one after the other. Here each rank sends the notices first.
        """
        assert self.bounded is not None, "the host waits in collectives of gloo"
        group = self._open_group()

        def begin() -> list[dist.Work]:
            begun = [group.recv([recv[r]], r, 0) for r in large if recv[r].numel()]
            return begun + [group.send([send[r]], r, 0) for r in large if send[r].numel()]

        others = [r for r in range(self.world_size) if r != self.rank and r not in large]
        recv_rows, send_rows = (
            [len(rows) if r in others else 0 for r, rows in enumerate(side)]
            for side in (recv, send)
        )
        sent = torch.cat([send[self.rank][:0], *(send[r] for r in others)])
        received = recv[0].new_empty(sum(recv_rows), *recv[0].shape[1:])
        options = AllToAllOptions()
        start = partial(group.alltoall_base, received, sent, recv_rows, send_rows, options)
        _run(self.bounded, options, start, phase, begin)
        for rank, rows in enumerate(received.split(recv_rows)):
            if rank in others:
                recv[rank].copy_(rows)
        if send[self.rank].numel():
            recv[self.rank].copy_(send[self.rank])

    def _all_gather(self, recv: Tensor, tensor: Tensor, phase: str) -> None:
        recv, tensor = _as_bytes(recv.flatten()), _as_bytes(tensor.flatten())
        group = self._open_group()
        if self.bounded is None:
            _all_gather(recv, tensor, group=group)
            return
        options = AllgatherOptions()
        _run(self.bounded, options, partial(group._allgather_base, recv, tensor, options), phase)

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise group_closed("collective", self.names.where)
        return self._group


class _GlooPart(TorchDistCollectives):
    """A part of the ranks of a gloo process group, with its own connections.

    It is not registered as a process group of torch, because torch reuses names of groups and would
    then use old addresses.
    """

    process_group = None

    def __init__(
        self, whole: TorchDistCollectives, process_group: dist.ProcessGroup, ranks: Sequence[int]
    ) -> None:
        """Connect `ranks` of `process_group`, the process group of `whole`.

        Collective: yes, over all ranks of the process group, each with its own part.
        Raises:
            EPTimeout: some rank of the process group did not arrive.
        """
        self.rank, self.world_size = list(ranks).index(whole.rank), len(ranks)
        self.device, self.bounded = whole.device, whole.bounded
        self._group, self._spans_hosts = _connected(whole, process_group, ranks)
        settle_at_exit()


def _connected(
    whole: TorchDistCollectives, process_group: dist.ProcessGroup, ranks: Sequence[int]
) -> tuple[dist.ProcessGroup, bool]:
    """Connect `ranks` of `process_group` by connections that nothing else uses.

    Returns: the connections, and whether the ranks are on several hosts.

    Collective: yes, over all ranks of `whole`, each with its own part.
    """
    assert whole.bounded is not None, "the host waits in collectives of gloo"
    # gloo waits for keys of other ranks, and a store that waits serves no other thread: a clone has
    # a connection of its own. torch's annotations do not declare clone().
    store = _stores.pop(process_group, None)
    if store is None:
        store = process_group.get_group_store().clone()  # type: ignore[attr-defined]
    mine = store.add(_NUM_DIVISIONS, 1) if whole.rank == 0 else 0
    record = {"number": mine, "host": host_of_this_process()}
    found = whole.gather_records(record, phase="dividing the ranks")
    number = found[0]["number"]
    # ProcessGroupGloo has all methods of a process group that are called here.
    connected = dist.ProcessGroupGloo(
        PrefixStore(f"{_NUM_DIVISIONS}/{number}/{ranks[0]}", store),
        list(ranks).index(whole.rank),
        len(ranks),
        timedelta(seconds=whole.bounded.timeout_s),
    )
    # A rank that closes its connections before others have made theirs would break those.
    whole.gather_records({"number": number}, phase="connecting the ranks")
    # Not kept after an exception, because it may still wait for an answer.
    _stores[process_group] = store
    hosts = {found[rank]["host"] for rank in ranks}
    return connected, len(hosts) > 1  # type: ignore[return-value]


def _run(
    bounded: BoundedWait,
    options: AllToAllOptions | AllgatherOptions,
    start: Callable[[], dist.Work],
    phase: str,
    begin_messages: Callable[[], list[dist.Work]] = list,
) -> None:
    """Run one gloo operation, which `start` begins with `options`, and wait for its end.

    begin_messages: begins messages on the same connections; they arrive before its own.
    """
    # Without its own timeout the operation would occupy a gloo thread for the timeout of the
    # process group, 30 minutes. Destroying the group, aborting it or exiting the process would wait
    # for that thread (seen in torch 2.13).
    options.timeout = timedelta(seconds=bounded.timeout_s + _MARGIN_S)
    start_s = bounded.begin(phase)
    try:
        messages = begin_messages()
    except RuntimeError as error:
        bounded.finish(partial(_raise_again, error), phase, start_s)
        raise
    step, is_broken = partial(_wait_for, start(), messages, start_s + bounded.timeout_s), False
    try:
        # Fast path: most exchanges end within the first slice.
        if step(min(SLICE_S, bounded.timeout_s)):
            return
    except RuntimeError as error:
        step, is_broken = partial(_raise_again, error), True
    bounded.finish(step, phase, start_s, has_waited=not is_broken)


def _wait_for(
    work: dist.Work, messages: Sequence[dist.Work], deadline_s: float, seconds: float
) -> bool:
    """Implement Step. The work holds the tensors of the operation, also after an EPTimeout."""
    try:
        is_complete = work.wait(timedelta(seconds=max(seconds, _SHORTEST_WAIT_S)))
    except RuntimeError:
        # Either this wait timed out, or the operation failed: then it is completed, and wait()
        # raises its error immediately.
        is_complete = work.is_completed() and work.wait()
    # Not in slices, because a wait that times out closes the connections.
    for message in messages if is_complete else ():
        left_s = max(deadline_s - time.monotonic(), _SHORTEST_WAIT_S)
        message.wait(timedelta(seconds=left_s))
    return is_complete


def _raise_again(error: RuntimeError, seconds: float) -> bool:
    """Implement Step for an operation that has failed."""
    raise error


def _backend_of(process_group: dist.ProcessGroup) -> str:
    """Return the backend of the group; if it has several, the backend of the accelerator."""
    backend = str(dist.get_backend(process_group))
    if backend in _DEVICE_OF_BACKEND:
        return backend
    # The format is `cpu:gloo,cuda:nccl`.
    of_device = dict(
        pair.split(":", 1) for pair in str(dist.get_backend_config(process_group)).split(",")
    )
    for device in ("cuda", "npu", "cpu"):
        if _DEVICE_OF_BACKEND.get(of_device.get(device, "")) == device:
            return of_device[device]
    raise ConfigError(
        f"EPGroup: backend {backend!r} of the process group is not supported, expected one of "
        f"{sorted(_DEVICE_OF_BACKEND)}; create the group with one of them"
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    # gloo does not support float8, and every backend supports bytes. Keep the first dimension, so
    # that splits still count rows.
    if tensor.numel() == 0:
        return tensor.new_empty(tensor.shape, dtype=torch.uint8)
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(-1)
    return rows.view(torch.uint8)
