"""The arguments of fused_deep_moe(), and the checks of both of its operators."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.types import Int8Profile
from fakes.ascend.deep_ep import exchange
from fakes.ascend.formats import require_aligned, require_whole
from fakes.ascend.limits import require
from fakes.ascend.operators.activation import Int8Rows

NAME = "deep_ep.Buffer.fused_deep_moe"


@dataclass(frozen=True, kw_only=True)
class FusedCall:
    """The arguments of one rank.

    x: bfloat16 [T, H].
    ids: int32 or int64 [T, K].
    weights: float32 [T, K].
    w13, s13, w2, s2: of the L experts of this rank, as the operator wants them.
    limit: the 8th argument, whose meaning depends on the operator.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    w13: Tensor
    s13: Tensor
    w2: Tensor
    s2: Tensor
    limit: int
    num_experts: int
    num_ranks: int

    @property
    def num_local(self) -> int:
        """L."""
        return self.num_experts // self.num_ranks


@dataclass(frozen=True, kw_only=True)
class Experts(ABC):
    """The experts of a rank as an operator reads them: w13, w2 in int8, s13, s2 in float32."""

    w13: Tensor
    s13: Tensor
    w2: Tensor
    s2: Tensor

    @abstractmethod
    def hidden(self, expert: int, codes: Tensor, scales: Tensor) -> Int8Rows:
        """Compute the first GEMM and SwiGLU of codes [N, H] and float32 scales [N]: [N, I]."""

    @abstractmethod
    def output(self, expert: int, hidden: Int8Rows) -> Tensor:
        """Compute the second product, bfloat16 [N, H]."""


@dataclass(frozen=True, kw_only=True)
class FusedOperator:
    """One of the two fused operators.

    check: raises RuntimeError for arguments that the operator refuses; local.
    profile: the arithmetic by which the operator quantises x.
    experts: its arithmetic.
    counts: its counts, from the rows received by (expert, source), int64 [L, W].
    limits_rows: whether `limit` bounds what a rank receives; else it bounds T.
    """

    check: Callable[[FusedCall], None]
    profile: Int8Profile
    experts: Callable[[FusedCall], Experts]
    counts: Callable[[Tensor], Tensor]
    limits_rows: bool


def check_tokens(call: FusedCall) -> None:
    """Refuse tokens and routing that neither operator takes."""
    x, ids = call.x, call.ids
    require(NAME, x.dim() == 2 and x.is_contiguous(), "x is 2-D and contiguous")
    require(NAME, x.dtype == torch.bfloat16, f"x is bfloat16, got {x.dtype}")
    rule = "x has a row at least; a rank without tokens passes a dummy one, with valid ids"
    require(NAME, x.shape[0] > 0, rule)
    fits = ids.dim() == 2 and ids.is_contiguous() and ids.shape[0] == x.shape[0]
    fits = fits and ids.shape[1] > 0 and ids.dtype in (torch.int32, torch.int64)
    require(NAME, fits, "topk_idx is int64 (or int32) [T, K], contiguous")
    require_tensor("topk_weights", call.weights, torch.float32, list(ids.shape))
    fits = call.num_experts > 0 and call.num_experts % call.num_ranks == 0
    require(NAME, fits, f"num_experts is a multiple of {call.num_ranks}, got {call.num_experts}")
    # The documentation mentions -1 in mode 1; the behaviour of the kernel is unknown.
    exchange.require_ids(NAME, ids, call.num_experts, allow_none=False)


def check_w13(call: FusedCall) -> int:
    """Refuse a first weight that is not int8 [L, H, 2I], and return 2I."""
    w13, num_local, hidden_size = call.w13, call.num_local, call.x.shape[1]
    fits = w13.dim() == 3 and w13.shape[2] > 0 and w13.shape[2] % 2 == 0
    rule = f"gmm1_permuted_weight is [{num_local}, {hidden_size}, 2I], got {list(w13.shape)}"
    require(NAME, fits, rule)
    require_weight("gmm1_permuted_weight", w13, [num_local, hidden_size, w13.shape[2]])
    return w13.shape[2]


def require_weight(name: str, weight: Tensor, shape: list[int]) -> None:
    """Refuse all but contiguous int8 of this shape, in NZ whole and aligned."""
    rule = f"{name} is int8, got {weight.dtype}; whatever quant_mode is, no others are computed"
    require(NAME, weight.dtype == torch.int8, rule)
    require_tensor(name, weight, torch.int8, shape)
    require_whole(NAME, weight)
    require_aligned(NAME, weight)


def require_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> None:
    """Refuse all but contiguous tensors of this dtype and shape."""
    found = f"{tensor.dtype} {list(tensor.shape)}"
    fits = tensor.dtype == dtype and list(tensor.shape) == shape and tensor.is_contiguous()
    require(NAME, fits, f"{name} is {dtype} {shape}, contiguous; got {found}")
