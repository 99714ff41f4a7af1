"""The weights of routed experts as checkpoints hold them, and one rank's share of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from epcomm.errors import ConfigError, ShapeError
from epcomm.types import WireFormat

# What a runner needs to compute a part of a gradient.
PartT = TypeVar("PartT")


class Activation(StrEnum):
    """The function between the two matrices of an expert.

    SWIGLU: silu(gate) * up.
    CLAMPED_SWIGLU: g * sigmoid(alpha * g) * (u + 1) with g = min(gate, limit) and
        u = clamp(up, -limit, limit).
    LIMITED_SWIGLU: silu(g) * u with the same g and u.
    RELU2: relu(up)**2, no gate.
    """

    SWIGLU = "swiglu"
    CLAMPED_SWIGLU = "clamped_swiglu"
    LIMITED_SWIGLU = "limited_swiglu"
    RELU2 = "relu2"

    @property
    def is_gated(self) -> bool:
        """Return whether the first matrix yields gate and up."""
        return self is not Activation.RELU2


@dataclass(frozen=True, kw_only=True)
class ExpertFormat:
    """The layout of expert matrices and the activation between them.

    is_transposed: matrices are [E, in, out] instead of [E, out, in].
    is_interleaved: gate and up columns alternate instead of gate first, then up.
    alpha: of CLAMPED_SWIGLU.   limit: of CLAMPED_SWIGLU and LIMITED_SWIGLU.
    """

    activation: Activation = Activation.SWIGLU
    is_transposed: bool = False
    is_interleaved: bool = False
    alpha: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        needs_alpha = self.activation is Activation.CLAMPED_SWIGLU
        needs_limit = needs_alpha or self.activation is Activation.LIMITED_SWIGLU
        if (self.alpha is not None, self.limit is not None) != (needs_alpha, needs_limit):
            raise ConfigError(
                f"ExpertFormat: {self.activation.value} with alpha={self.alpha} and "
                f"limit={self.limit}; clamped_swiglu needs both, limited_swiglu a limit, others "
                "neither"
            )


class LateGradient(Generic[PartT]):
    """The gradient of a tensor as the sum of its parts, which backward may compute late."""

    def __init__(self, number: int, *, joins: bool = False) -> None:
        """Start a sum of `number` parts.

        joins: parts that runners leave are computed together, when the last is added.
        """
        self._number, self._joins, self._num_added = number, joins, 0
        self._parts: list[PartT] = []
        self._sum: Tensor | None = None
        self._task = -1

    def leave(self, part: PartT, compute: Callable[[Sequence[PartT]], Tensor]) -> None:
        """Keep a part for add(), and drop those of earlier backward passes.

        compute: returns the gradient of parts together.
        """
        self._begin_pass()
        self._parts.append(part)
        self._compute = compute

    def _begin_pass(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._parts, self._sum, self._num_added = task, [], None, 0

    def add(self, part: Tensor | None) -> Tensor | None:
        """Add a part, or None for one that was left; return the sum after the last, else None.

        The sum is rounded once: it is in float32 or wider.
        """
        self._begin_pass()
        self._num_added += 1
        is_last = self._num_added == self._number
        if part is None and (is_last or not self._joins):
            ready = slice(None) if self._joins else slice(1)
            part = self._compute(self._parts[ready])
            del self._parts[ready]
        if is_last and self._sum is None:
            return part
        if part is None:
            return None
        wide = torch.promote_types(part.dtype, torch.float32)
        # In place, so that a second sum is never in memory.
        self._sum = part.to(wide, copy=True) if self._sum is None else self._sum.add_(part)
        if not is_last:
            return None
        total, self._sum = self._sum, None
        return total.to(part.dtype)


class ExpertTensors(ABC):
    """The matrices of E experts, in any precision, as a frozen record.

    gate_up_proj, down_proj: the matrices, whose layout the subclasses describe.
    format: the layout of the matrices and the activation between them.
    late: the gradients that a runner may leave instead of returning them; not a field.
    """

    late: ClassVar[Mapping[str, LateGradient[Any]]] = {}

    gate_up_proj: Tensor
    down_proj: Tensor
    format: ExpertFormat

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by field name; the first dimension of each is E."""
        return {name: each for name, each in vars(self).items() if isinstance(each, Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return experts of the same kind with other tensors for those of tensors()."""
        return replace(self, **tensors)  # type: ignore[type-var]

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Return the dtype of the hidden states that these experts take and return."""

    @property
    @abstractmethod
    def wire_format(self) -> WireFormat:
        """Return the wire format of hidden states that these experts need."""

    @cached_property
    def hidden_size(self) -> int:
        """The hidden size, H."""
        return self.down_proj.shape[2 if self.format.is_transposed else 1]

    @cached_property
    def intermediate_size(self) -> int:
        """The intermediate size of an expert, I."""
        return self.down_proj.shape[1 if self.format.is_transposed else 2]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that kernels may refuse, by name."""
        return {"hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size}

    @property
    def num_experts(self) -> int:
        """The number of experts, E."""
        return self.gate_up_proj.shape[0]

    @property
    def requires_grad(self) -> bool:
        """Return whether any tensor needs gradients."""
        return any(tensor.requires_grad for tensor in self.tensors().values())

    def exchanged(
        self, tensors: Mapping[str, Tensor], *, late: Mapping[str, LateGradient[Any]] | None = None
    ) -> Self:
        """Return these experts with other tensors of the same form, without checks."""
        other = copy(self)
        vars(other).update(tensors, late=late or {})
        return other


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights(ExpertTensors):
    """The matrices of E experts, unquantised, in the layout of their checkpoint.

    gate_up_proj: [E, 2I, H] (no gate: [E, I, H]); transposed: [E, H, 2I].
    down_proj: [E, H, I]; transposed: [E, I, H].
    gate_up_bias: [E, 2I] or None.   down_bias: [E, H] or None.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    format: ExpertFormat = ExpertFormat()

    def __post_init__(self) -> None:
        expected = self._expected_shapes()
        matrices = {"gate_up_proj": self.gate_up_matrices(), "down_proj": self.down_matrices()}
        for name, tensor in self.tensors().items():
            shape = list(matrices.get(name, tensor).shape)
            if shape != expected[name]:
                raise ShapeError(
                    f"ExpertWeights: {name} is {shape} ([E, in, out] for matrices), expected "
                    f"{expected[name]} to fit the other tensors; check ExpertFormat"
                )
            if tensor.dtype != self.dtype or tensor.device != self.gate_up_proj.device:
                raise ShapeError(
                    f"ExpertWeights: {name} is {tensor.dtype} on {tensor.device}, expected "
                    f"{self.dtype} on {self.gate_up_proj.device} as gate_up_proj; convert it"
                )

    @property
    def dtype(self) -> torch.dtype:
        return self.gate_up_proj.dtype

    @property
    def wire_format(self) -> WireFormat:
        return WireFormat.of(self.dtype)

    def gate_up_matrices(self) -> Tensor:
        """Return the first matrices as a view [E, H, 2I], ready to be multiplied from the right."""
        return self.gate_up_proj if self.format.is_transposed else self.gate_up_proj.transpose(1, 2)

    def down_matrices(self) -> Tensor:
        """Return the second matrices as a view [E, I, H], ready to be multiplied from the right."""
        return self.down_proj if self.format.is_transposed else self.down_proj.transpose(1, 2)

    def _expected_shapes(self) -> dict[str, list[int]]:
        for name in ("gate_up_proj", "down_proj"):
            if getattr(self, name).dim() != 3:
                shape = list(getattr(self, name).shape)
                raise ShapeError(f"ExpertWeights: {name} is {shape}, expected three dimensions")
        num_experts, hidden, inner = self.num_experts, self.hidden_size, self.intermediate_size
        first = inner * (2 if self.format.activation.is_gated else 1)
        return {
            "gate_up_proj": [num_experts, hidden, first],
            "down_proj": [num_experts, inner, hidden],
            "gate_up_bias": [num_experts, first],
            "down_bias": [num_experts, hidden],
        }
