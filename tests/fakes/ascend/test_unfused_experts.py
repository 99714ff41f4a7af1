"""The whole unfused W8A8 path of Ascend over imitations, against a golden digest of its result."""

from __future__ import annotations

import pytest
import torch

from fakes.ascend.deep_ep import Buffer
from fakes.ascend.formats import ACL_FORMAT_NZ
from fakes.ascend.limits import soc
from fakes.ascend.registry import register
from tests.fakes.ascend.fuseep import (
    RECORDED,
    E,
    L,
    M,
    W,
    dense,
    digest,
    hidden_states,
    topk,
    weights,
)
from tests.fakes.ascend.recorded import group_for
from tests.fakes.ascend.test_fused import MODE1, MODE2, buffer_of_all, distance, my_call

register()
npu = torch.ops.npu


def test_inputs_are_those_of_the_recording() -> None:
    sha = RECORDED["inputs"]["sha256"]
    found = dict(zip(("w13", "w2", "s13", "s2"), map(digest, weights()), strict=True))
    assert found == {name: sha[name] for name in found}
    x = [digest(hidden_states(rank)) for rank in range(W)]
    assert x == sha["x (bfloat16, per rank)"]


@pytest.mark.ranks(2)
def test_the_unfused_path_equals_the_golden_digest() -> None:
    group = group_for(W)
    if group is None:
        return
    rank = group.rank()
    ids, topk_weights = topk(rank)
    own = slice(rank * L, (rank + 1) * L)
    w13, w2, s13, s2 = (tensor[own] for tensor in weights())
    w13 = npu.npu_format_cast(w13.transpose(1, 2), ACL_FORMAT_NZ)
    w2 = npu.npu_format_cast(w2.transpose(1, 2), ACL_FORMAT_NZ)
    # The unfused experts with limits on: they are aligned; the buffer's H is below the chip's.
    with soc("A3", size_limits=False):
        buffer = Buffer(group, low_latency_mode=True)
        (codes, scales), counts, handle, _, _ = buffer.low_latency_dispatch(
            hidden_states(rank), ids, M, E
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
    with soc("A3", size_limits=False):
        fused = [buffer_of_all().fused_deep_moe(**my_call(mode))[0] for mode in (MODE1, MODE2)]
    apart = RECORDED["relative_l2"]
    for expected, pair in (
        (RECORDED["unfused"]["relative_l2_to_dense"], (combined, dense(rank))),
        (apart["mode1_to_unfused"], (fused[0], combined)),
        (apart["mode2_to_unfused"], (fused[1], combined)),
    ):
        # The file gives six digits.
        assert distance(*pair) == pytest.approx(expected, rel=1e-4)
