"""The whole unfused W8A8 path of Ascend over stand-ins, against a golden digest of its result."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from epcomm.testing.ascend.deep_ep import Buffer
from epcomm.testing.ascend.formats import ACL_FORMAT_NZ
from epcomm.testing.ascend.limits import soc
from epcomm.testing.ascend.registry import register
from tests.testing.ascend.recorded import golden, group_for

pytestmark = pytest.mark.ranks(4)

register()
npu = torch.ops.npu

RECORDED = golden("ascend_fuseep_end_to_end")
W, E, H, I, K = 2, 4, 128, 192, 2  # noqa: E741 (the letter of the intermediate size)
L, M = E // W, 5


def grid(*sizes: int) -> tuple[Tensor, ...]:
    """Index of each dimension, int64."""
    return torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")


def digest(tensor: Tensor) -> str:
    """sha256 of the bytes, row-major."""
    return hashlib.sha256(
        bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
    ).hexdigest()


def hidden_states(rank: int, num_tokens: int) -> Tensor:
    t, h = grid(num_tokens, H)
    m = 40 + 4 * ((2 * t + 3 * rank) % 8)
    numerator = 2 * ((53 * t + 7 * h * h + 14 * h + 101 * rank + 3 * t * h) % m) - (m - 1)
    return (numerator.double() / 16).bfloat16()


def weights() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w13 int8 [E, 2I, H], w2 int8 [E, H, I], s13 [E, 2I], s2 [E, H], as in a checkpoint."""
    e, i, h = grid(E, 2 * I, H)
    w13 = ((7 * i + 14 * h + 29 * e + (i * h) % 23) % 31) - 15
    e, h, i = grid(E, H, I)
    w2 = ((11 * h + 24 * i + 17 * e + (i * h) % 19) % 31) - 15
    e, i = grid(E, 2 * I)
    s13 = (1000003 + 7919 * ((5 * i + 11 * e) % 97)).double() * 2**-27
    e, h = grid(E, H)
    s2 = (900007 + 6007 * ((3 * h + 17 * e) % 89)).double() * 2**-27
    return w13.to(torch.int8), w2.to(torch.int8), s13.float(), s2.float()


def test_inputs_are_those_of_the_recording() -> None:
    sha = RECORDED["inputs"]["sha256"]
    found = dict(zip(("w13", "w2", "s13", "s2"), map(digest, weights()), strict=True))
    assert found == {name: sha[name] for name in found}
    x = [digest(hidden_states(rank, num_tokens)) for rank, num_tokens in enumerate((5, 3))]
    assert x == sha["x (bfloat16, per rank)"]


def test_the_unfused_path_equals_the_golden_digest() -> None:
    group = group_for(W)
    if group is None:
        return
    rank = group.rank()
    ids = torch.tensor(RECORDED["inputs"]["topk_idx"][rank])
    topk_weights = torch.tensor(RECORDED["inputs"]["topk_weights"][rank])
    own = slice(rank * L, (rank + 1) * L)
    w13, w2, s13, s2 = (tensor[own] for tensor in weights())
    w13 = npu.npu_format_cast(w13.transpose(1, 2), ACL_FORMAT_NZ)
    w2 = npu.npu_format_cast(w2.transpose(1, 2), ACL_FORMAT_NZ)
    # The unfused experts with limits on: they are aligned; the buffer's H is below the chip's.
    with soc("A3", size_limits=False):
        buffer = Buffer(group, low_latency_mode=True)
        (codes, scales), counts, handle, _, _ = buffer.low_latency_dispatch(
            hidden_states(rank, ids.shape[0]), ids, M, E
        )
    groups = {"group_list": counts, "group_list_type": 1, "group_type": 0, "split_item": 2}
    with soc("A3"):
        (sums,) = npu.npu_grouped_matmul([codes], [w13], output_dtype=torch.int32, **groups)
        hidden, hidden_scales = npu.npu_dequant_swiglu_quant(
            sums,
            weight_scale=s13,
            activation_scale=scales,
            group_index=counts,
            activate_left=True,
            quant_mode=1,
        )
        (y,) = npu.npu_grouped_matmul(
            [hidden],
            [w2],
            scale=[s2.bfloat16()],
            per_token_scale=[hidden_scales],
            output_dtype=torch.bfloat16,
            **groups,
        )
    with soc("A3", size_limits=False):
        combined, _, _ = buffer.low_latency_combine(y, ids, topk_weights, handle)
    first = RECORDED["unfused"]["y_first_4_columns"][rank]["values"]
    assert combined[:, :4].tolist() == first
    assert digest(combined) == RECORDED["unfused"]["y_sha256"][rank]
