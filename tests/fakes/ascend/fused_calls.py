"""Arguments of fused_deep_moe() from weights as a checkpoint has them."""

from typing import Any

import torch
from torch import Tensor

from fakes.ascend.deep_ep.buffer import FuseMode
from fakes.ascend.formats import ACL_FORMAT_NZ
from tests.fakes.ascend import fuseep

MODE1, MODE2 = FuseMode.FUSED_DEEP_MOE, FuseMode.DISPATCH_FFN_COMBINE


def nz(weight: Tensor) -> Tensor:
    return torch.ops.npu.npu_format_cast(weight.contiguous(), ACL_FORMAT_NZ)


def interleaved(columns: Tensor) -> Tensor:
    """Interleave columns [..., 2I]: 64 of the gate, 64 of up, and so on."""
    half = columns.shape[-1] // 2
    order = [
        side * half + 64 * tile + column
        for tile in range(half // 64)
        for side in (0, 1)
        for column in range(64)
    ]
    return columns[..., order]


def bits(scales: Tensor) -> Tensor:
    """Return the bits of scales as flat int64."""
    return scales.contiguous().view(torch.int32).to(torch.int64).flatten()


def packed(mode: FuseMode, checkpoint: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """Pack w13 [L, 2I, H], w2 [L, H, I], s13 [L, 2I] and s2 [L, H] into the arguments, in NZ."""
    w13, w2, s13, s2 = checkpoint
    if mode == MODE1:
        columns = interleaved(w13.transpose(1, 2))
        found = (nz(columns), interleaved(s13).contiguous(), nz(w2), s2.contiguous())
    else:
        found = (nz(w13.transpose(1, 2)), bits(s13), nz(w2.transpose(1, 2)), bits(s2))
    names = ("gmm1_permuted_weight", "gmm1_permuted_weight_scale")
    names += ("gmm2_weight", "gmm2_weight_scale")
    return dict(zip(names, found, strict=True))


def recorded_call(mode: FuseMode, rank: int) -> dict[str, Any]:
    first, last = rank * fuseep.L, (rank + 1) * fuseep.L
    ids, topk_weights = fuseep.topk(rank)
    w13, w2, s13, s2 = (tensor[first:last] for tensor in fuseep.weights())
    return {
        "x": fuseep.hidden_states(rank),
        "topk_idx": ids,
        "topk_weights": topk_weights,
        **packed(mode, (w13, w2, s13, s2)),
        "num_max_dispatch_tokens_per_rank": fuseep.M if mode == MODE1 else 20,
        "num_experts": fuseep.E,
        "fuse_mode": mode,
    }
