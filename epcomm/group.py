"""EPGroup: the ranks that share experts, their transport, and the buffers opened on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TypeGuard, TypeVar

import torch

from epcomm.buffers.base import Backend, Buffer, ExcludesRanks, ReturnsSlots
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.header import CallKind, operation_sign
from epcomm.calls.order import Calls
from epcomm.collectives.base import Collectives
from epcomm.collectives.staged import StagedCollectives
from epcomm.errors import BackendUnavailable, ConfigError, HandleError, PickleRefused
from epcomm.registry import buffer_class, fused_class
from epcomm.spec import BufferSpec, HostLayout

if TYPE_CHECKING:
    import torch.distributed as dist
    from mpi4py import MPI
    from torch.distributed.device_mesh import DeviceMesh

    from epcomm.buffers.fused import FusedBackend

BackendT = TypeVar("BackendT", bound=Backend)
# Of a DeviceMesh that says on which host each rank runs.
_NUM_HOST_DIMENSIONS = 2


class EPGroup:
    """Owns the collectives of one group of ranks and the buffers opened on them.

    Layers share a group, so that layers of one shape share a buffer. There is no other shared
    state. `with EPGroup(...) as group:` closes it at the end.

    hosts: where the ranks run, as a DeviceMesh of two dimensions has said; None: nobody has, and
        plan() finds it out.
    """

    def __init__(
        self,
        ranks: dist.ProcessGroup | DeviceMesh | MPI.Comm | Collectives | int | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        """Wrap the ranks that share experts; the caller keeps owning what is passed.

        Args:
            ranks: a process group as torch.distributed hands it out, a DeviceMesh of one dimension,
                or of two, which says where the ranks run: hosts, and the ranks of each; an mpi4py
                communicator (its messages stay apart from ours), or ready Collectives; None: the
                default process group.
            device: of the tensors of the ranks, where their transport moves others, such as a GPU
                beside gloo: backend nvlink needs no more of the transport than to open. None: the
                one that the transport moves.

        All ranks of a mesh of two dimensions share experts, numbered by their ranks in the default
        process group, which serves them if it has no others; else the mesh is part of one of all
        ranks, and a flattened dimension of that serves them.
        What serves one host alone does not serve them, even where processes said to be on several
        hosts could share memory: pass another mesh for that.

        Local; no rank is waited for, but where a mesh is flattened: then all ranks do that
        together. plan() and open_buffer() compare the hosts of all ranks.
        Raises:
            ConfigError: this rank is no member, a mesh has more dimensions, there is no default
                process group, or the object is none of these.
        """
        mesh = ranks if _is_mesh(ranks) else None
        self.collectives = _collectives_of(ranks)
        # A mesh of hosts may have its ranks in another order than the process group.
        self._mesh = mesh if mesh is not None and mesh.ndim == 1 else None
        self.hosts: HostLayout | None = None if mesh is None else _hosts_of(mesh)
        self._owns_collectives = self.collectives is not ranks
        if device is not None and device.type != self.collectives.device.type:
            self.collectives = StagedCollectives(self.collectives, device)
        self.calls = Calls.of(self.collectives)
        self.rank = self.collectives.rank
        self.world_size = self.collectives.world_size
        self.device: torch.device = self.collectives.device
        self._backends: dict[tuple[str, BufferSpec], Backend] = {}
        self._timeout_s: float | None = None
        self._logged: set[str] = set()
        self.is_closed = False

    @property
    def where(self) -> str:
        """The place of this rank for messages, such as `rank 3 of 8`."""
        return f"rank {self.rank} of {self.world_size}"

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks as a one-dimensional DeviceMesh, for parameters that say where they are.

        The one of one dimension given at construction, which may be a dimension of a larger one,
        else one made of the process group. None over MPI and over Collectives that were passed
        ready-made. Local.
        """
        from epcomm.collectives.torch_dist import TorchDistCollectives

        is_ours = self._owns_collectives and isinstance(self.collectives, TorchDistCollectives)
        if self._mesh is None and is_ours:
            from torch.distributed.device_mesh import DeviceMesh

            group = self.collectives.process_group
            assert group is not None, "its collectives are those of a process group"
            self._mesh = DeviceMesh.from_group(group, self.device.type)
        return self._mesh

    def announce_operation(self, name: str) -> None:
        """Compare an operation on expert parameters that communicates with the other ranks' calls.

        name: of the operation, such as `norm`.

        Collective: yes, where the host waits in collectives; else, and after close(), it returns.
        Host sync: yes.
        Raises:
            HandleError: some ranks make another call; on every rank.
            EPTimeout: some ranks make none.
        """
        if not self.is_closed and self.collectives.bounded is not None:
            phase = f"{name} of an expert parameter"
            self.calls.announce_to_parts(CallKind.PARAMETERS, operation_sign(name), phase=phase)

    def __deepcopy__(self, memo: dict[int, object]) -> EPGroup:
        """Return this group, which copies of layers share, such as averages of weights."""
        return self

    def __reduce__(self) -> NoReturn:
        raise PickleRefused(
            f"EPGroup: cannot be pickled, because it holds connections to other ranks "
            f"({self.where}); make an EPGroup in each process"
        )

    def limit_waits(self, timeout_s: float) -> None:
        """Set how long a layer waits for other ranks; plan() calls it.

        The group waits as long as its most patient layer. Before the first, it waits
        DEFAULT_TIMEOUT_S of epcomm/collectives/base.py.

        Local.
        """
        self._timeout_s = max(timeout_s, self._timeout_s or timeout_s)
        self.collectives.limit_waits(self._timeout_s)

    def is_news(self, text: str) -> bool:
        """Return whether `text` is logged for the first time in this group. Local."""
        is_new = text not in self._logged
        self._logged.add(text)
        return is_new

    def open_buffer(self, name: str, spec: BufferSpec) -> Buffer:
        """Return the buffer of class `name` for `spec`, shared by all layers that ask for the same.

        Collective: yes; all ranks ask for the same buffers in the same order.
        Raises:
            ConfigError: unknown class, or ranks disagree on the specification.
            HandleError: the group is closed.
            EPTimeout: some ranks do not come.
        """
        return self._open(name, spec, buffer_class, "open_buffer")

    def open_fused(self, name: str, spec: BufferSpec) -> FusedBackend:
        """Return the fused operator `name` for `spec`, shared as open_buffer() shares buffers."""
        return self._open(name, spec, fused_class, "open_fused")

    def exclude_ranks(self, ranks: Sequence[int]) -> None:
        """Exclude dead ranks, so that the layers of this group work without them over nvlink.

        An EPTimeout has named them. Their experts are lost: entries of topk_ids that name one are
        as entries of -1. What was under way is lost too, and excluded ranks stay excluded. What all
        ranks agree on is no longer possible: new layers and buffers, and check_calls.

        Args:
            ranks: numbers in this group, the same on every rank that is left.

        Collective: yes, among the ranks that are left, at one place in the order of their calls;
            no message goes to the others, nor over the process group.
        Host sync: yes.
        Raises:
            BackendUnavailable: a buffer of this group needs all ranks; before anything is done.
            ConfigError: ranks that are none of the group, or this one.
            EPTimeout: some other rank did not come; it may be excluded as well.
            HandleError: the group is closed.
        """
        if self.is_closed:
            raise HandleError(
                f"exclude_ranks: the EPGroup is closed ({self.where}); make a new one"
            )
        backends = tuple(self._backends.values())
        needing = sorted({each.name for each in backends if not isinstance(each, ExcludesRanks)})
        if needing:
            raise BackendUnavailable(
                f"exclude_ranks: the group has buffers of {', '.join(needing)}, expected nvlink "
                f"alone, because other backends need all ranks ({self.where}); make an EPGroup of "
                "a process group of the ranks that are left"
            )
        for backend in backends:
            if isinstance(backend, ExcludesRanks):
                backend.exclude_ranks(ranks)

    def traffic(self) -> dict[str, BufferTraffic]:
        """Return the bytes that this rank has sent to others, by backend; none if closed."""
        sent: dict[str, BufferTraffic] = {}
        for backend in self._backends.values():
            name = backend.name
            sent[name] = sent.get(name, BufferTraffic()) + backend.traffic()
        return sent

    def _open(
        self,
        name: str,
        spec: BufferSpec,
        class_of: Callable[[str], type[BackendT]],
        function: str,
    ) -> BackendT:
        if self.is_closed:
            raise HandleError(f"{function}: the EPGroup is closed ({self.where}); make a new one")
        # Compared before the look-up: a rank that finds its backend must not leave others waiting.
        self.calls.agree({"backend": name, **spec.as_record()}, what=function)
        kind, key = class_of(name), (name, spec)
        if spec.returns_slots and not issubclass(kind, ReturnsSlots):
            raise ConfigError(
                f"{function}: {name} returns sums, and BufferSpec.returns_slots asks for a row of "
                f"each slot ({self.where}); use nvlink in low latency"
            )
        found = self._backends.get(key)
        if found is None:
            found = kind(self.calls, spec)
            found.prepare()
            self._backends[key] = found
        assert isinstance(found, kind), "names are of one class each"
        return found

    def close(self, *, after_error: bool = False) -> None:
        """Close all buffers; later calls through them raise HandleError. Idempotent.

        Args:
            after_error: other ranks may not come; buffers of packages whose own closing waits for
                them stay allocated.

        Local, but for such buffers (deep_ep, nvlink), which all ranks close together.
        """
        self.is_closed = True
        while self._backends:
            _, backend = self._backends.popitem()
            if after_error:
                backend.abandon()
            else:
                backend.close()
        if self._owns_collectives:
            self.collectives.close()

    def __enter__(self) -> EPGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(after_error=error is not None)


def _collectives_of(ranks: object) -> Collectives:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

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
            "EPGroup: this rank is no member of the process group; "
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
    import torch.distributed as dist

    if mesh.ndim not in (1, _NUM_HOST_DIMENSIONS):
        raise ConfigError(
            f"EPGroup: the DeviceMesh has {mesh.ndim} dimensions, expected 1, or 2: hosts and the "
            "ranks of each; pass mesh['the expert dimension'] or mesh['hosts', 'ranks of a host']"
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
            "and is no part of a larger one; cut it from a mesh of all ranks, such as "
            "init_device_mesh(device, (stages, hosts, ranks), mesh_dim_names=('stage', 'host', "
            "'rank'))['host', 'rank']"
        )
    # A group made by its ranks alone would be named by how many groups each of them has, so that
    # ranks with other groups besides would wait for names that nobody else uses.
    return mesh._flatten().get_group()


def _hosts_of(mesh: DeviceMesh) -> HostLayout | None:
    """Return the host of each rank of the EP group, if the mesh has hosts for a dimension."""
    if mesh.ndim != _NUM_HOST_DIMENSIONS:
        return None
    ranks, ranks_per_host = _ranks_of(mesh), mesh.size(1)
    # Ranks of a process group are in ascending order, and those of a mesh in any.
    return HostLayout.of([ranks.index(rank) // ranks_per_host for rank in sorted(ranks)])


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    return mesh.mesh.flatten().tolist()


def _is_mesh(ranks: object) -> TypeGuard[DeviceMesh]:
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(ranks, DeviceMesh)


def _is_communicator(ranks: object) -> TypeGuard[MPI.Comm]:
    # Who passes one has imported mpi4py; nobody else needs it.
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(ranks, mpi.Comm)
