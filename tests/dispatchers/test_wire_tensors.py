"""A dispatch of quantised rows returns the same record as one that quantises the rows itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epcomm import (
    ConfigError,
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    MoESpec,
    RowsDispatchOutput,
    ShapeError,
    TopKOutput,
    WireDtype,
)
from epcomm.ops.slots import gather_rows
from epcomm.quantization import FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES, dequantize, quantize
from epcomm.types import WireTensor

H, E, K, T = 256, 4, 2, 3
SPEC = MoESpec(hidden_size=H, num_experts=E, top_k=K, dtype=torch.float32)
FP8 = EPConfig(
    mode="normal", backend="shared_memory", dispatch_dtype=WireDtype.FP8_E4M3, max_tokens_per_rank=T
)


def batch_of(group: EPGroup) -> tuple[Tensor, TopKOutput]:
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(T, H, generator=generator)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    return x, TopKOutput(topk_ids=ids, topk_weights=torch.rand(T, K, generator=generator))


def run(
    dispatcher: DeepEPNormalDispatcher | DeepEPLowLatencyDispatcher,
    x: Tensor | WireTensor,
    topk: TopKOutput,
) -> tuple[RowsDispatchOutput, Tensor]:
    """Dispatch, and combine the results of identity experts."""
    out = dispatcher.dispatch(x, topk)
    assert isinstance(out, RowsDispatchOutput)
    rows = gather_rows(dequantize(out.hidden_states, torch.float32), out.index)
    return out, dispatcher.combine(out.combine_input(rows))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("context", [torch.no_grad, nullcontext])
@pytest.mark.parametrize("kind", [DeepEPNormalDispatcher, DeepEPLowLatencyDispatcher])
def test_record_and_sums_are_those_of_rows_quantised_on_the_way(
    kind: type[DeepEPNormalDispatcher | DeepEPLowLatencyDispatcher],
    context: Callable[[], torch.no_grad],
) -> None:
    with EPGroup() as group, context():
        is_normal = kind is DeepEPNormalDispatcher
        dispatcher = kind(group, SPEC, FP8 if is_normal else replace(FP8, backend="collective"))
        x, topk = batch_of(group)
        wanted, y = run(dispatcher, x, topk)
        # Rows may be views that a later dispatch overwrites.
        rows = [part.clone() for part in (wanted.hidden_states.data, wanted.hidden_states.scales)]
        out, found = run(dispatcher, quantize(x, FP8_FLOAT32_SCALES), topk)
        assert torch.equal(found, y)
        assert found.dtype is torch.float32
        for part, right in zip(
            (out.hidden_states.data, out.hidden_states.scales), rows, strict=True
        ):
            used = out.index.row_of_slot
            assert used is not None
            used = used[used >= 0].long()
            bits = [each.view(torch.uint8)[used] for each in (part, right)]
            assert torch.equal(*bits)


@pytest.mark.ranks(2)
def test_gradients_are_refused_and_the_group_stays_usable(group: EPGroup) -> None:
    dispatcher = DeepEPNormalDispatcher(group, SPEC, FP8)
    x, topk = batch_of(group)
    wire = quantize(x, FP8_FLOAT32_SCALES)
    trained = replace(topk, topk_weights=topk.topk_weights.clone().requires_grad_())
    for weights, experts_need_grad in ((trained, False), (topk, True)):
        with pytest.raises(ConfigError, match="quantised and have no gradients"):
            dispatcher.dispatch(wire, weights, experts_need_grad=experts_need_grad)
    # Quantised rows have no gradient, so this rank runs as under no_grad(), unlike the others.
    with pytest.raises(ConfigError):
        dispatcher.dispatch(wire if group.rank else x.clone().requires_grad_(), topk)
    run(dispatcher, wire, topk)


@pytest.mark.ranks(2)
def test_scales_of_another_kind_are_refused_on_every_rank() -> None:
    with EPGroup() as group, torch.no_grad():
        dispatcher = DeepEPNormalDispatcher(group, SPEC, FP8)
        x, topk = batch_of(group)
        good = quantize(x, FP8_FLOAT32_SCALES)
        powers = quantize(x, FP8_POWER_OF_TWO_SCALES)
        for bad, own in (
            (powers, "with scales of torch.float8_e8m0fnu, expected fp8_e4m3/128 with scales of"),
            (replace(good, scales=None), "hidden_states.scales is NoneType, expected a tensor"),
            (
                replace(good, scales=good.scales[:, :1]),
                r"hidden_states.scales is \[3, 1\], expected",
            ),
            (replace(good, scales=good.scales.half()), "scales is torch.float16, expected torch.f"),
        ):
            with pytest.raises(ShapeError, match=own if group.rank else "on rank 1"):
                dispatcher.dispatch(bad if group.rank else good, topk)
        run(dispatcher, good, topk)
