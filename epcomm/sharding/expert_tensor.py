"""Define ExpertTensor, a parameter that holds one rank's share of all experts.

Why a subclass of DTensor: torch's own tools (checkpoints, state of optimizers, FSDP) must see a
DTensor, but a plain DTensor next to ordinary parameters breaks training: fused and foreach
optimizers, clip_grad_norm_ and averages of weights take one list of all parameters, and DTensor
refuses lists and operators that mix it with tensors. An ExpertTensor takes part in such lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import BoundArguments, signature
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import resolve_name
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from epcomm.errors import ShapeError
from epcomm.sharding import pieces, shards
from epcomm.sharding.shards import Args, Kwargs
from epcomm.sharding.state import checked_part, chunks_of, part_at, write_items

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

# The context that autograd passes to a Function; it takes any attribute.
Context = Any

# Operators over lists of tensors, for foreach and fused optimizers and for loss scaling.
_LIST_OPERATORS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# Functions that select experts; torch makes their gradients ordinary tensors of all experts.
_CUTS = (
    *("__getitem__", "__iter__", "chunk", "gather", "index_select", "narrow", "select", "split"),
    *("tensor_split", "unbind"),
)
# Operators that return copies of any elements; each rank computes them from the experts of all.
_OF_WHOLE = (
    *("aten::gather", "aten::index", "aten::index_select", "aten::masked_select", "aten::nonzero"),
    *("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"),
)
# Functions that return memory or values of a whole tensor, which an ExpertTensor does not have.
# data_ptr() returns 0, as a DTensor's does, because torch's async_save calls it.
_OF_MEMORY = ("__array__", "__dlpack__", "numpy", "storage", "tolist")
_NEW = ("aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::new_empty")
_MIXED = "got mixed torch.Tensor and DTensor"
# Parts of torch's messages about operators that it does not compute on parts -> our explanation.
_NOT_COMPUTED = {
    _MIXED: "came together with ordinary tensors",
    "Sharding propagation failed": "is not computed from the parts of ranks",
    "not have a sharding strategy": "is not computed from the parts of ranks",
}
# Older releases of torch dispatch the operators of every DTensor in C++, of subclasses too. On
# those releases a mode intercepts the operators, and DTensors that C++ creates are wrapped when
# they reach Python.
_IS_DISPATCHED_TO = TorchVersion(torch.__version__) >= "2.13"
# Functions whose gradients are ordinary tensors of all experts too. Older releases cannot multiply
# such a gradient with an ExpertTensor; later ones can, and can differentiate it again.
_SUMS = () if _IS_DISPATCHED_TO else ("mean", "sum")
# Losses whose backward divides a mean by the number of elements of its input: on a piece that is
# the number on this rank, not on all ranks.
_LOSSES = ("binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss")
# Operators that compute each expert from tensors of that expert alone, besides the operators that
# torch tags as pointwise.
_BATCHED = ("aten::bmm", "aten::baddbmm", "aten::copy_", "aten::fill_")
_LOSS_BACKWARDS = tuple(f"aten::{name}_backward" for name in _LOSSES)


class ExpertTensor(shards.ShareTensor, DTensor):
    """A DTensor [P, ...] in pieces [L, ...], one on each rank of a one-dimensional mesh: Shard(0).

    An ExpertTensor differs from a DTensor:

    - Operators over lists that mix ExpertTensors with ordinary tensors compute on the local pieces.
      Norms and maxima of such lists are taken over the pieces of all ranks: collective.
    - Elementwise operators accept ordinary tensors together with an ExpertTensor. Each rank uses
      its own piece of an ordinary tensor that spans all experts.
    - Every rank draws random numbers for all experts and keeps its share: ranks with equal seeds
      get the values of one process that draws expert by expert.
    - A result that is no longer a piece of each rank, such as a sum, is an ordinary tensor:
      collective.
    - torch.distributed's functions work on the local piece if all of their ranks hold the same
      experts; else they are refused.
    - A pickled ExpertTensor is a DTensor, so that torch.load(weights_only=True) accepts it.

    shard: which experts the piece holds, where a placement says so. None: the ranks hold the
        experts in their order. An expert that several ranks hold counts once in norms.
    owner: the group that compares operations which communicate with the calls of the other ranks.

    The class has no __slots__: async_save copies the attributes that __slots__ names, and has to
    find the __slots__ of DTensor.
    """

    @classmethod
    def of_share(
        cls,
        share: Tensor,
        mesh: DeviceMesh,
        shard: shards.ExpertShard | None = None,
        owner: shards.Owner | None = None,
    ) -> ExpertTensor:
        """Wrap this rank's piece [L, ...]; every rank of the one-dimensional mesh has one. Local.

        The result is detached and shares the memory of `share`. shard: which experts these are,
        where a placement says so; the shape is then that of the logical experts, [E, ...].
        """
        shape = stride = None
        if shard is not None and shard.physical_to_logical is None:
            shard = None
        if shard is not None:
            shape, stride = torch.Size((shard.num_experts, *share.shape[1:])), share.stride()
        spread = DTensor.from_local(
            share.detach(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
        return cls._of(spread._local_tensor, spread._spec, shard, owner)

    @classmethod
    def _of(
        cls,
        share: Tensor,
        spec: DTensorSpec,
        shard: shards.ExpertShard | None,
        owner: shards.Owner | None,
    ) -> ExpertTensor:
        tensor = cls(share, spec, requires_grad=False)
        tensor.shard, tensor.owner = shard, owner
        return tensor

    def like_self(self, share: Tensor) -> ExpertTensor:
        """Wrap a piece [L, ...] of any shape and dtype for the mesh of this tensor. Local."""
        meta, old = self._spec.tensor_meta, self._local_tensor
        is_same = share.shape == old.shape and share.stride() == old.stride()
        if is_same and meta is not None and share.dtype == meta.dtype:
            return self._of(share, self._spec, self.shard, self.owner)
        return self.of_share(share, self._spec.mesh, self.shard, self.owner)

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:
        """Return the experts of all ranks, [E, ...]. Collective.

        Not differentiable where a placement says which experts a rank holds.
        """
        pieces.announce(self.owner, "full_tensor")
        if self.shard is None:
            return super().full_tensor(grad_placements=grad_placements)  # type: ignore[arg-type]
        return pieces.gather_experts(self)

    def __create_write_items__(self, fqn: str, tensor: object) -> list[WriteItem]:  # type: ignore[override]
        if self.shard is None:
            return super().__create_write_items__(fqn, tensor)  # type: ignore[misc]
        return write_items(fqn, self)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.shard is None:
            return super().__create_chunk_list__()  # type: ignore[misc]
        return chunks_of(self)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        is_placed = self.shard is not None
        part = part_at(self, index) if is_placed else super().__get_tensor_shard__(index)  # type: ignore[misc]
        return checked_part(part, self, index)

    def to_local(self, *, grad_placements: object = None) -> Tensor:
        """Return this rank's piece; gradients are an ExpertTensor."""
        return local_views([self])[0] if torch.is_grad_enabled() else self._local_tensor

    def __reduce_ex__(self, protocol: object) -> object:  # type: ignore[override]
        plain = DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[arg-type]

    def __repr__(self) -> str:  # type: ignore[override]
        return "Expert" + super().__repr__()[1:]

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs = None
    ) -> object:
        some = next((arg for arg in args if isinstance(arg, ExpertTensor)), None)
        name = getattr(func, "__name__", "")
        if name in _OF_MEMORY and some is not None:
            _refuse_memory(name, some)
        if name in _LOSSES and some is not None:
            given = signature(func).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            if given.arguments.get("reduction") != "none":
                return _reduced_loss(func, given, some)
        # Arguments are wrapped here, above autograd, so that ordinary tensors get ordinary
        # gradients.
        with torch._C.DisableTorchFunctionSubclass():
            if func == _SET_DATA:
                return _set_data(args[0], args[1])
            if func is torch.Tensor.share_memory_:
                # torch would look for the storage of this object, which has none.
                args[0]._local_tensor.share_memory_()
                return args[0]
            if name == "__getitem__":
                # The tensor is a mask, which backward reads without __torch_function__().
                args = (args[0], tree_map(_whole_of, args[1]))
            elif some is not None and len(args) > 1 and name != "__set__":
                # An in-place function writes to its first argument, which is not wrapped.
                kept = 1 if name.endswith("_") else 0
                args = (*args[:kept], *(_lifted(arg, some) for arg in args[kept:]))
            is_first = some is not None and some is next(iter(args))
            if name in (*_CUTS, *_SUMS) and is_first and torch.is_grad_enabled():
                args = (_ToBeCut.apply(some), *args[1:])
            try:
                if _IS_DISPATCHED_TO:
                    return func(*args, **(kwargs or {}))
                with _CatchOperators():
                    made = func(*args, **(kwargs or {}))
                    return tree_map(lambda leaf: _rewrapped(leaf, some), made)
            except (RuntimeError, ShapeError) as error:
                text = f"{error} {error.__cause__}"
                problem = next((_NOT_COMPUTED[part] for part in _NOT_COMPUTED if part in text), "")
                if not problem:
                    raise
                leaves = tree_leaves((args, kwargs))
                raise _refusal(resolve_name(func) or name, leaves, problem) from error

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs = None
    ) -> object:
        return _run(pieces.Operation(func, args, kwargs or {}))


class _CatchOperators(TorchDispatchMode):
    """A mode that runs operators on ExpertTensors where torch does not dispatch to their class."""

    def __torch_dispatch__(  # type: ignore[override]
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs = None
    ) -> object:
        if any(isinstance(leaf, ExpertTensor) for leaf in tree_leaves((args, kwargs))):
            return _run(pieces.Operation(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _rewrapped(leaf: object, some: ExpertTensor | None) -> object:
    """Wrap a DTensor that C++ made from an ExpertTensor, such as a gradient, as ExpertTensor."""
    if type(leaf) is not DTensor or leaf.requires_grad or leaf._spec.placements != (Shard(0),):
        return leaf
    shard = some.shard if some is not None and leaf.shape[:1] == some.shape[:1] else None
    owner = None if some is None else some.owner
    return ExpertTensor._of(leaf._local_tensor, leaf._spec, shard, owner)


def _set_data(tensor: object, value: object) -> None:
    """Assign `tensor.data = value`, where value holds this rank's experts or all experts."""
    if isinstance(tensor, ExpertTensor):
        part = pieces.own_part(value, tensor)
        if not isinstance(part, Tensor) or part.shape[:1] != tensor._local_tensor.shape[:1]:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError(
                f"Tensor.data: an expert parameter of {list(tensor.shape)} was given {shape} "
                f"({tensor.position}); pass this rank's {tensor._local_tensor.shape[0]} experts or "
                f"all {tensor.shape[0]}"
            )
        value = tensor.like_self(part.detach())
        _SET_DATA(tensor, value)
        tensor._local_tensor, tensor._spec = value._local_tensor, value._spec
        tensor.shard, tensor.owner = value.shard, value.owner
    else:
        assert isinstance(value, ExpertTensor), "the tensor or the value is one"
        _SET_DATA(tensor, value.full_tensor())


class _Wrapped(torch.autograd.Function):
    """Wraps an ordinary tensor [L, ...] as an ExpertTensor; the gradient is an ordinary tensor."""

    @staticmethod
    def forward(ctx: Context, part: Tensor, some: ExpertTensor) -> ExpertTensor:
        return ExpertTensor.of_share(part, some._spec.mesh, some.shard, some.owner)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return shards.piece_of(gradients[0]), None


class _ToBeCut(torch.autograd.Function):
    """The identity, whose backward takes this rank's part of a gradient of all experts."""

    @staticmethod
    def forward(ctx: Context, some: ExpertTensor) -> ExpertTensor:
        ctx.some = some
        return some.like_self(some._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *gradients: Tensor) -> Tensor:  # type: ignore[override]
        part = pieces.own_part(gradients[0], ctx.some)
        assert isinstance(part, Tensor), "it came as one"
        # A cut along another dimension has the gradient of a piece already.
        return gradients[0] if isinstance(gradients[0], DTensor) else ctx.some.like_self(part)


def _lifted(arg: object, some: ExpertTensor) -> object:
    if not isinstance(arg, Tensor) or isinstance(arg, DTensor):
        return arg
    is_whole = arg.dim() == some.dim() and arg.shape[0] == some.shape[0]
    return _Wrapped.apply(shards.cut_share(arg, some.held), some) if is_whole else arg


class _LocalViews(torch.autograd.Function):
    """Takes the pieces of ExpertTensors, with ExpertTensors as gradients; keeps other tensors."""

    @staticmethod
    def forward(ctx: Context, factors: Sequence[float], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.factors = factors
        ctx.set_materialize_grads(False)
        ctx.kinds = [tensor if isinstance(tensor, ExpertTensor) else None for tensor in tensors]
        # Views, because autograd changes the metadata of a Function's results, and the piece
        # belongs to the parameter.
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        views = tuple(piece.view_as(piece) for piece in local)
        needed = zip(views, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*(view for view, is_needed in needed if not is_needed))
        return views

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        results: list[Tensor | None] = [None]
        for kind, factor, gradient in zip(ctx.kinds, ctx.factors, gradients, strict=True):
            if gradient is not None and factor != 1.0:
                gradient = gradient * factor
            if gradient is not None and kind is not None:
                gradient = kind.like_self(gradient.contiguous())
            results.append(gradient)
        return tuple(results)


def local_views(
    tensors: Sequence[Tensor], factors: Sequence[float] | None = None
) -> tuple[Tensor, ...]:
    """Return differentiable local pieces; gradients are multiplied by `factors`. Local."""
    return _LocalViews.apply(factors or [1.0] * len(tensors), *tensors)  # type: ignore[return-value]


def _reduced_loss(func: Callable[..., Any], given: BoundArguments, some: ExpertTensor) -> Tensor:
    """Return a loss over the experts of all ranks. Collective."""
    reduction = given.arguments.get("reduction")
    given.arguments["reduction"] = "none"
    losses = None if reduction is None else func(*given.args, **given.kwargs)
    if losses is None or losses.dim() == 0:
        problem = "is given to a loss without reduction, or with size_average; pass reduction"
        raise _refusal(func.__name__, [some], problem)
    return losses.mean() if reduction == "mean" else losses.sum()


def _refuse_memory(name: str, tensor: ExpertTensor) -> NoReturn:
    """Refuse memory and values; the message names what safetensors and others should save."""
    raise ShapeError(
        f"Tensor.{name}: an expert parameter of {list(tensor.shape)} has no separate memory, "
        f"because each rank holds {list(tensor._local_tensor.shape)} of it ({tensor.position}); "
        "call it on to_local() for this rank's experts or on full_tensor() for all, and to save a "
        "model write whole tensors, for example "
        "model.save_pretrained(folder, state_dict=gather_state_dict(model, group))"
    )


def _refusal(name: str, tensors: Sequence[object], problem: str) -> ShapeError:
    """Make the error of an operator that torch does not compute for a DTensor in `tensors`."""
    some = next(tensor for tensor in tensors if isinstance(tensor, DTensor))
    mesh = some._spec.mesh
    return ShapeError(
        f"{name}: an expert parameter of {list(some.shape)}, of which this rank holds "
        f"{list(some._local_tensor.shape)}, {problem} (rank {mesh.get_local_rank()} of "
        f"{mesh.size()}); call to_local() on it for this rank's experts or full_tensor() for all, "
        "or leave it out"
    )


def _run(op: pieces.Operation) -> object:
    """Run an operator that has an ExpertTensor among its arguments."""
    name, args = op.name, op.args
    if name.startswith(_LIST_OPERATORS):
        return pieces.run_on_lists(op)
    if pieces.takes_parts(op):
        return pieces.run_on_parts(op)
    if name.startswith("c10d::"):
        return _run_c10d(op)
    if name in _NEW and len(args[1]) == args[0].dim() and args[1][0] == args[0].shape[0]:
        # Optimizers that factor their state make a new tensor with one entry for each expert.
        size = [args[0]._local_tensor.shape[0], *args[1][1:]]
        return args[0].like_self(op.func(args[0]._local_tensor, size, *args[2:], **op.kwargs))
    if name in _OF_WHOLE:
        return op.run(_whole_of)
    if name in ("aten::allclose", "aten::equal"):
        return _are_alike(op)
    if name == "aten::_is_any_true":
        # detect_anomaly() asks whether a gradient has NaN, on the ranks that it is active on.
        return op.func(args[0]._local_tensor)
    if _is_elementwise(op):
        if pieces.draws_numbers(op):
            drawn = pieces.run_expert_by_expert(op)
            return _written(op) if drawn is None else op.some.like_self(drawn)
        # The gradient of a mean, without a dimension, would be divided by the elements of a piece.
        is_of_each = name in _LOSS_BACKWARDS and args[0].dim() > 0
        is_by_expert = torch.Tag.pointwise in op.func.tags or name in _BATCHED or is_of_each
        if is_by_expert or _is_masking(op):
            return _run_on_pieces(op)
    with pieces.Announcing(op.some.owner, op.func):
        return _run_as_dtensor(op)


def _whole_of(leaf: object) -> object:
    return leaf.full_tensor() if isinstance(leaf, ExpertTensor) else leaf


def _are_alike(op: pieces.Operation) -> bool:
    """Return whether a comparison holds for the experts of every rank. Collective."""
    piece = op.some._local_tensor
    is_alike = op.run(lambda leaf: pieces.own_part(leaf, op.some))
    flags = op.some.like_self(torch.full(piece.shape[:1], is_alike, device=piece.device))
    return bool(_run(pieces.Operation(torch.ops.aten.all.default, (flags,), {})))


def _is_masking(op: pieces.Operation) -> bool:
    """Return whether an operator writes one number through a mask of the tensor's shape."""
    if op.name != "aten::index_put_" or len(op.args[1]) != 1:
        return False
    mask, value = op.args[1][0], op.args[2]
    return mask.dtype is torch.bool and mask.shape == op.args[0].shape and value.dim() == 0


def _is_elementwise(op: pieces.Operation) -> bool:
    """Return whether every piece of the result may depend on pieces of this rank alone."""
    some = op.some
    for tensor in op.tensors:
        if isinstance(tensor, DTensor):
            spec = tensor._spec
            is_alike = spec.mesh == some._spec.mesh and spec.placements == some._spec.placements
            if not is_alike or tensor.dim() != some.dim() or tensor.shape[0] != some.shape[0]:
                return False
        elif tensor.dim() > some.dim():
            return False
    # An ordinary tensor that is written to would hold values of one rank alone.
    return not op.writes or isinstance(op.args[0], DTensor)


def _run_on_pieces(op: pieces.Operation) -> object:
    result = op.run(lambda leaf: pieces.own_part(leaf, op.some))
    if op.writes:
        return _written(op)
    like = op.some.like_self
    return tree_map(lambda leaf: like(leaf) if isinstance(leaf, Tensor) else leaf, result)


def _written(op: pieces.Operation) -> object:
    """Return the tensor that an operator has written, its first argument or `out`."""
    written = op.kwargs.get("out", op.args[0] if op.args else None)
    for tensor in tree_leaves(written):
        # torch does not count writes below this level, but caches of weights compare the count.
        torch.autograd.graph.increment_version(shards.piece_of(tensor))
    return written


def _run_as_dtensor(op: pieces.Operation) -> object:
    """Run an operator as torch does for DTensors, of all physical experts [P, ...].

    Collective: where the result is not a tensor of experts.
    Raises:
        ShapeError: torch refuses it, or it writes to several placed experts in one call.
    """
    some, originals = op.some, dict[int, ExpertTensor]()
    # The DTensors are kept alive, so that no other object gets an id that `originals` holds.
    kept: list[DTensor] = []

    def plain(leaf: object) -> object:
        if not isinstance(leaf, ExpertTensor):
            return leaf
        share, mesh = leaf._local_tensor, leaf._spec.mesh
        if leaf.shard is None:
            kept.append(DTensor(share, leaf._spec, requires_grad=False))
        else:
            kept.append(DTensor.from_local(share, mesh, [Shard(0)], run_check=False))
        originals[id(kept[-1])] = leaf
        return kept[-1]

    try:
        result = op.run(plain)
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        # C++ code of torch.distributed dispatches here without __torch_function__().
        raise _refusal(str(op.func), kept, _NOT_COMPUTED[_MIXED]) from error
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    are_by_expert = all(getattr(leaf, "placements", None) == (Shard(0),) for leaf in results)
    is_placed = any(leaf.shard is not None for leaf in originals.values())
    if is_placed and not are_by_expert:
        if op.writes:
            problem = "whose experts are placed, is written otherwise than expert by expert"
            raise _refusal(str(op.func), [some], problem)
        return op.run(
            lambda leaf: pieces.gather_experts(leaf) if shards.is_expert_tensor(leaf) else leaf
        )

    def back(leaf: object) -> object:
        if not isinstance(leaf, DTensor):
            return leaf
        original = originals.get(id(leaf))
        if original is not None:
            torch.autograd.graph.increment_version(original._local_tensor)
            return original
        placements = leaf._spec.placements
        if leaf._spec.mesh != some._spec.mesh or len(placements) != 1:
            return leaf
        if is_placed:
            return some.like_self(leaf._local_tensor)
        if placements[0].is_shard(0):
            return ExpertTensor._of(leaf._local_tensor, leaf._spec, None, some.owner)
        # A sum over ranks is an ordinary tensor.
        return leaf if placements[0].is_shard() else leaf.full_tensor()

    return tree_map(back, result)


def _run_c10d(op: pieces.Operation) -> object:
    """Run a collective on local pieces; its ranks must hold the same experts."""
    mesh_ranks = set(op.some._spec.mesh.mesh.flatten().tolist())
    for boxed in tree_leaves((op.args, op.kwargs)):
        if not isinstance(boxed, torch.ScriptObject) or "ProcessGroup" not in str(boxed._type()):
            continue
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed))
        if len(mesh_ranks & set(ranks)) > 1:
            raise ShapeError(
                f"{op.func}: got an expert parameter, of which ranks {sorted(mesh_ranks)} hold "
                f"different experts, with a process group of ranks {ranks} ({op.some.position}); "
                "reduce over copies of the same experts alone, and leave expert parameters out of "
                "DDP by epcomm.training.gradients.ignore_experts_in_ddp(model)"
            )
    by_piece = {id(shards.piece_of(tensor)): tensor for tensor in op.tensors}
    result = op.run(lambda leaf: shards.piece_of(leaf) if isinstance(leaf, Tensor) else leaf)
    return tree_map(lambda leaf: by_piece.get(id(leaf), leaf), result)
