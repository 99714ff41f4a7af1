"""EPGroup: the ranks that share experts, their transport and their buffers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from epcomm.buffers.base import Backend, Buffer, ExcludesRanks, ReturnsSlots
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.header import CallKind, operation_sign
from epcomm.calls.order import Calls
from epcomm.collectives.base import Collectives
from epcomm.collectives.staged import StagedCollectives
from epcomm.errors import BackendUnavailable, ConfigError, PickleRefused, group_closed, grouped
from epcomm.registry import buffer_class, fused_class
from epcomm.spec import BufferSpec, HostLayout

if TYPE_CHECKING:
    from mpi4py import MPI

    from epcomm.buffers.fused import FusedBackend

BackendT = TypeVar("BackendT", bound=Backend)
# Dimensions of a DeviceMesh that has the host of each rank: hosts, and ranks of a host.
_NUM_HOST_DIMENSIONS = 2


class EPGroup:
    """Owns the collectives of one group of ranks and the buffers opened on them.

    Layers share a group, so layers of the same shape share a buffer. There is no other shared
    state. `with EPGroup(...) as group:` closes it at the end.

    hosts: the hosts of the ranks, if given by a two-dimensional DeviceMesh; None: plan() finds out.
    where: the name of this rank in messages, such as `rank 3 of 8`.
    """

    def __init__(
        self,
        ranks: dist.ProcessGroup | DeviceMesh | MPI.Comm | Collectives | int | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        """Wrap the ranks that share experts; the caller still owns the argument.

        Args:
            ranks: a torch.distributed process group; a DeviceMesh of one dimension, or of two, the
                hosts and the ranks of each host; an mpi4py communicator, whose messages are kept
                apart from ours; or Collectives. None: the default process group.
            device: the device of the ranks' tensors if the transport does not support it, such as a
                GPU with gloo; backend nvlink uses the transport only to open. None: the device of
                the transport.

        All ranks of a two-dimensional mesh share experts and are ordered by global rank. If the
        mesh has all ranks, the default process group serves them; otherwise it must be part of a
        mesh of all ranks, of which a flattened dimension serves them. Backends for one host do not
        serve such a mesh, even if its ranks could share memory; pass another mesh for that.

        Local, except that flattening a mesh is collective over all ranks. plan() and open_buffer()
        compare the hosts of all ranks.
        Raises:
            ConfigError: this rank is not a member, a mesh has more dimensions, there is no default
                process group, or the argument has another type.
        """
        mesh = ranks if isinstance(ranks, DeviceMesh) else None
        self.collectives = _collectives_of(ranks)
        # A mesh of hosts may have its ranks in another order than the process group.
        self._mesh = mesh if mesh is not None and mesh.ndim == 1 else None
        self.hosts: HostLayout | None = None if mesh is None else _hosts_of(mesh)
        self._owns_collectives = self.collectives is not ranks
        device = self.collectives.device if device is None else torch.device(device)
        if device.type != self.collectives.device.type:
            self.collectives = StagedCollectives(self.collectives, device)
        self.calls = Calls.of(self.collectives)
        self.rank = self.collectives.rank
        self.world_size = self.collectives.world_size
        self.device: torch.device = self.collectives.device
        self._backends: dict[tuple[str, BufferSpec], Backend] = {}
        self._timeout_s: float | None = None
        self._logged: set[str] = set()
        self.where = f"rank {self.rank} of {self.world_size}"
        self.is_closed = False

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks as a one-dimensional DeviceMesh, for expert parameters.

        It is the one-dimensional mesh given at construction, or one made from the process group.
        None over MPI and if Collectives were passed. Local.
        """
        from epcomm.collectives.torch_dist import TorchDistCollectives

        is_ours = self._owns_collectives and isinstance(self.collectives, TorchDistCollectives)
        if self._mesh is None and is_ours:
            group = self.collectives.process_group
            assert group is not None, "its collectives are those of a process group"
            self._mesh = DeviceMesh.from_group(group, self.device.type)
        return self._mesh

    def announce_operation(self, name: str) -> None:
        """Announce a collective operation on expert parameters and compare it on all ranks.

        name: the name of the operation, such as `norm`.

        Collective: yes, if the host waits in collectives; otherwise, and after close(), it returns.
        Host sync: yes.
        Raises:
            HandleError: some ranks make a different call; on every rank.
            EPTimeout: some ranks make no call.
        """
        if not self.is_closed and self.collectives.bounded is not None:
            phase = f"{name} of an expert parameter"
            self.calls.announce_to_parts(CallKind.PARAMETERS, operation_sign(name), phase=phase)

    def __deepcopy__(self, memo: dict[int, object]) -> EPGroup:
        """Return this group: copies of a layer share it."""
        return self

    def __reduce__(self) -> NoReturn:
        raise PickleRefused(
            f"EPGroup: cannot be pickled, because it holds connections to other ranks "
            f"({self.where}); make an EPGroup in each process"
        )

    def limit_waits(self, timeout_s: float) -> None:
        """Set the timeout of a layer for other ranks; plan() calls it. Local.

        The group uses the longest timeout of its layers; without layers, DEFAULT_TIMEOUT_S of
        epcomm/collectives/base.py.
        """
        self._timeout_s = max(timeout_s, self._timeout_s or timeout_s)
        self.collectives.limit_waits(self._timeout_s)

    def is_news(self, text: str) -> bool:
        """Return whether `text` has not been logged in this group yet. Local."""
        is_new = text not in self._logged
        self._logged.add(text)
        return is_new

    def open_buffer(self, name: str, spec: BufferSpec) -> Buffer:
        """Return the buffer of class `name` for `spec`; layers with equal arguments share it.

        Collective: yes; all ranks open the same buffers in the same order.
        Raises:
            ConfigError: unknown class, or ranks disagree on the specification.
            HandleError: the group is closed.
            EPTimeout: some ranks did not arrive in time.
        """
        return self._open(name, spec, buffer_class, "open_buffer")

    def open_fused(self, name: str, spec: BufferSpec) -> FusedBackend:
        """Return the fused operator `name` for `spec`, shared as open_buffer() shares buffers."""
        return self._open(name, spec, fused_class, "open_fused")

    def exclude_ranks(self, ranks: Sequence[int]) -> None:
        """Exclude dead ranks, named by an EPTimeout, so that nvlink layers work without them.

        Their experts are lost: entries of topk_ids that name one count as -1. Batches in flight are
        lost too, and excluded ranks stay excluded. Operations that compare all ranks are no longer
        possible: new layers and buffers, and check_calls.

        Args:
            ranks: numbers in this group, the same on every remaining rank.

        Collective: yes, among the remaining ranks, in the same order relative to other calls; sends
            nothing to excluded ranks or over the process group.
        Host sync: yes.
        Raises:
            BackendUnavailable: a buffer of this group needs all ranks; no rank is excluded.
            ConfigError: a rank is not in the group, or is this rank.
            EPTimeout: another rank did not arrive; it may be excluded too.
            HandleError: the group is closed.
        """
        if self.is_closed:
            raise group_closed("exclude_ranks", self.where)
        backends = tuple(self._backends.values())
        needing = sorted({each.name for each in backends if not isinstance(each, ExcludesRanks)})
        if needing:
            raise BackendUnavailable(
                f"exclude_ranks: the group has buffers of {', '.join(needing)}, expected nvlink "
                f"alone, because other backends need all ranks ({self.where}); make an EPGroup of "
                "a process group of the remaining ranks"
            )
        for backend in backends:
            if isinstance(backend, ExcludesRanks):
                backend.exclude_ranks(ranks)

    def traffic(self) -> dict[str, BufferTraffic]:
        """Return the bytes that this rank has sent to other ranks, by backend; {} after close()."""
        of_backend = grouped((each.name, each.traffic()) for each in self._backends.values())
        return {name: sum(sent, BufferTraffic()) for name, sent in of_backend.items()}

    def _open(
        self, name: str, spec: BufferSpec, class_of: Callable[[str], type[BackendT]], function: str
    ) -> BackendT:
        if self.is_closed:
            raise group_closed(function, self.where)
        # Compare before the look-up: a rank that finds its buffer must not leave others waiting.
        self.calls.agree({"backend": name, **spec.as_record()}, what=function)
        kind, key = class_of(name), (name, spec)
        if spec.returns_slots and not issubclass(kind, ReturnsSlots):
            raise ConfigError(
                f"{function}: {name} returns sums, but BufferSpec.returns_slots requires one row "
                f"per slot ({self.where}); use nvlink in low latency"
            )
        found = self._backends.get(key)
        if found is None:
            self.calls.open_transfers()
            found = kind(self.calls, spec)
            found.prepare()
            self._backends[key] = found
        assert isinstance(found, kind), "each name stands for one class"
        return found

    def close(self, *, after_error: bool = False) -> None:
        """Close all buffers; later calls through them raise HandleError. Idempotent.

        Args:
            after_error: do not wait for other ranks; buffers whose release is collective stay
                allocated.

        Local, except for the buffers of deep_ep and nvlink, whose release is collective.
        Raises:
            HandleError: a call was begun and never waited for; everything is closed.
        """
        self.is_closed = True
        transfers = self.calls.transfers
        if transfers is not None and not after_error:
            transfers.settle()
        while self._backends:
            _, backend = self._backends.popitem()
            if after_error:
                backend.abandon()
            else:
                backend.close()
        if self._owns_collectives:
            self.collectives.close()
        error = None if transfers is None else transfers.take_unfinished(is_last=True)
        if error is not None and not after_error:
            raise error

    def __enter__(self) -> EPGroup:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(after_error=error is not None)


def _collectives_of(ranks: object) -> Collectives:
    from epcomm.collectives.torch_dist import TorchDistCollectives

    if isinstance(ranks, Collectives):
        return ranks
    if ranks is None:
        if not dist.is_initialized():
            raise ConfigError(
                "EPGroup: there is no default process group; call "
                "torch.distributed.init_process_group first, for example under torchrun"
            )
        ranks = dist.group.WORLD
    if isinstance(ranks, DeviceMesh):
        ranks = _process_group_of(ranks)
    if ranks is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            "EPGroup: this rank is not a member of the process group; "
            "construct the EPGroup on member ranks only"
        )
    if isinstance(ranks, dist.ProcessGroup):
        return TorchDistCollectives(ranks)
    if _is_communicator(ranks):
        from epcomm.collectives.mpi import MpiCollectives

        return MpiCollectives(ranks)
    raise ConfigError(
        f"EPGroup: ranks is {type(ranks).__name__}, expected a ProcessGroup (for example "
        "torch.distributed.group.WORLD after init_process_group), a DeviceMesh, an mpi4py "
        "communicator or Collectives"
    )


def _process_group_of(mesh: DeviceMesh) -> object:
    if mesh.ndim not in (1, _NUM_HOST_DIMENSIONS):
        raise ConfigError(
            f"EPGroup: the DeviceMesh has {mesh.ndim} dimensions, expected 1, or 2 (hosts and "
            "their ranks); pass mesh['the expert dimension'] or mesh['hosts', 'ranks of a host']"
        )
    if mesh.get_coordinate() is None:
        return dist.GroupMember.NON_GROUP_MEMBER
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    if mesh._get_root_mesh().size() != dist.get_world_size():
        raise ConfigError(
            f"EPGroup: the DeviceMesh of hosts has {mesh.size()} of {dist.get_world_size()} ranks "
            "and is not part of a larger one; slice it from a mesh of all ranks, such as "
            "init_device_mesh(device, (stages, hosts, ranks), mesh_dim_names=('stage', 'host', "
            "'rank'))['host', 'rank']"
        )
    # Do not use new_group(): torch derives the name of a group from the number of groups that each
    # rank has, so ranks with other groups would use different names and never meet.
    return mesh._flatten().get_group()


def _hosts_of(mesh: DeviceMesh) -> HostLayout | None:
    """Return the host of each rank of the EP group, or None if the mesh has no hosts."""
    if mesh.ndim != _NUM_HOST_DIMENSIONS:
        return None
    ranks, ranks_per_host = mesh.mesh.flatten().tolist(), mesh.size(1)
    # A process group has its ranks in ascending order, a mesh in any order.
    return HostLayout.of([ranks.index(rank) // ranks_per_host for rank in sorted(ranks)])


def _is_communicator(ranks: object) -> TypeGuard[MPI.Comm]:
    # A caller that passes a communicator has imported mpi4py, so do not import it here.
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(ranks, mpi.Comm)
