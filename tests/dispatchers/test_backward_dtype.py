"""EPConfig.backward_dtype: gradients near those of float64, bytes, and refusals."""

from dataclasses import replace

import pytest
import torch

from epcomm import ConfigError, EPConfig, EPGroup, WireDtype
from epcomm.buffers.collective.all_to_all import CollectiveExchangePlan
from epcomm.planning.plan import plan
from tests.dispatchers.test_combine_dtype import SPEC, compute, make_batch, spec_of
from tests.dispatchers.test_sum_groups import WAYS

# Bytes of a row of 88 elements to the experts, and back with the gradients of four router weights.
ROW_BYTES = {None: (176, 192), WireDtype.FP8_E4M3: (96, 112), WireDtype.MXFP8: (96, 112)}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("way", ["collective", "shared_memory", "low latency, shared_memory"])
@pytest.mark.parametrize("backward_dtype", ROW_BYTES, ids=str)
def test_gradients_are_within_the_bound_of_two_roundings(
    backward_dtype: WireDtype | None, way: str
) -> None:
    kind, config = WAYS[way]
    with EPGroup() as group:
        config = replace(config, backward_dtype=backward_dtype)
        dispatcher = kind(group, spec_of(group.world_size), config)
        batch = make_batch(SPEC, group.rank, group.world_size)
        x, weights = (each.clone().requires_grad_() for each in (batch.x, batch.topk_weights))
        out = dispatcher.dispatch(x, replace(batch.topk, topk_weights=weights))
        y = dispatcher.combine(out.combine_input(compute(out, group.rank)))
        before = dispatcher.traffic()
        y.backward(batch.dy)
        sent = dispatcher.traffic() - before
        rows = out.handle.exchange_plan
        assert isinstance(rows, CollectiveExchangePlan), "of both backends"
        to_experts, back = ROW_BYTES[backward_dtype]
        for sent_bytes, splits, row_bytes in (
            (sent.dispatch_bytes, rows.send_splits, to_experts),
            (sent.combine_bytes, rows.recv_splits, back),
        ):
            assert sent_bytes == (sum(splits) - splits[group.rank]) * row_bytes
        most, others = dispatcher.plan.max_bytes_per_token(backward=True), group.world_size - 1
        assert most == {"dispatch": others * to_experts, "combine": others * back}
        assert f"combine bf16 (backward {backward_dtype or 'bf16'}" in dispatcher.plan.explain()
    # Half a step of E4M3 is 2**-4 of an element, or below the least normal number 2**-10 of a
    # scale, which is at most 1 / 224 of the largest element. The others are roundings to bfloat16.
    share = (1 + (0 if backward_dtype is None else 2**-4)) ** 2 * (1 + 2**-8) ** 4 - 1
    dx, x, dy = x.grad, batch.x.double(), batch.dy.double()
    bound = share * dy.abs() + 3 * 2**-10 / 224 * torch.linalg.vector_norm(dy, torch.inf, 1, True)
    # Expert e multiplies by e + 1.5, so all terms of an element of dx have the sign of dy.
    factors = ((batch.topk_ids + 1.5) * (batch.topk_ids >= 0)).double()
    slope = (factors * batch.topk_weights).sum(1, keepdim=True)
    for found, expected, most in (
        (dx, dy * slope, bound * slope),
        (weights.grad, factors * (dy * x).sum(1, True), factors * (bound * x.abs()).sum(1, True)),
    ):
        assert found is not None, "gradients are needed"
        assert ((found.double() - expected).abs() <= most).all()


def test_other_formats_and_backends_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"backward_dtype is .*nvfp4.*, expected one of"):
        EPConfig(backward_dtype=WireDtype.NVFP4)
    config = EPConfig(max_tokens_per_rank=8, backward_dtype=WireDtype.MXFP8)
    with pytest.raises(ConfigError, match=r"states are fp64; expected .* backward_dtype None"):
        plan(config, replace(spec_of(4), dtype=torch.float64))
    with pytest.raises(ConfigError, match="plan: backward_dtype is mxfp8 with sum_groups and redu"):
        plan(replace(config, sum_groups=4, redundant_experts=0), spec_of(4))
    decode = plan(replace(config, backend="collective"), spec_of(4)).decode
    assert decode is not None, "the config has a limit of tokens"
    assert decode.buffer_spec.backward_format is None
    static = replace(config, mode="normal", max_recv_slots=64)
    with pytest.raises(ConfigError, match=r"as bf16, but EPConfig\.backward_dtype is mxfp8"):
        plan(static, spec_of(4))
