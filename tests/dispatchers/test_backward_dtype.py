"""EPConfig.backward_dtype: gradients near those of float64, bytes, and refusals."""

from dataclasses import replace

import pytest
import torch

from epcomm import BackendUnavailable, ConfigError, EPConfig, EPGroup, WireDtype
from epcomm.buffers.nvlink.normal import NVLinkBuffer, NVLinkStaticBuffer
from epcomm.planning.plan import plan
from tests.dispatchers.test_combine_dtype import batch_of, compute, spec_of
from tests.dispatchers.test_sum_groups import NORMAL, WAYS, M

# Bytes of a row of 152 elements to the experts, and back with four gradients of router weights.
ROW_BYTES = {None: (304, 320), WireDtype.FP8_E4M3: (160, 176), WireDtype.MXFP8: (160, 176)}
# The same over nvlink, whose rows have no gaps.
NVLINK_ROW_BYTES = {**ROW_BYTES, WireDtype.MXFP8: (157, 173)}
NVLINK = EPConfig(backend="nvlink")
NVLINK_WAYS = {
    "nvlink": (NORMAL, NVLINK),
    "nvlink, budget": (NORMAL, replace(NVLINK, max_tokens_per_rank=M, max_recv_slots=256)),
}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "low latency"])
@pytest.mark.parametrize("backward_dtype", ROW_BYTES, ids=str)
def test_gradients_have_two_roundings_at_most(backward_dtype: WireDtype | None, way: str) -> None:
    check_gradients(way, backward_dtype)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", NVLINK_WAYS)
@pytest.mark.parametrize("backward_dtype", ROW_BYTES, ids=str)
def test_gradients_over_nvlink_are_within_the_bound_too(
    backward_dtype: WireDtype | None, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This module needs Triton.
    from tests.buffers.nvlink.test_low_latency import serve_any_device

    # The second class is the base of the first.
    for each in (NVLinkStaticBuffer, NVLinkBuffer):
        serve_any_device(monkeypatch, each)
    check_gradients(way, backward_dtype)


def check_gradients(way: str, backward_dtype: WireDtype | None) -> None:
    """Compare gradients with those in float64, and the bytes of a plan with those of rows."""
    kind, config = {**WAYS, **NVLINK_WAYS}[way]
    with EPGroup() as group:
        rank, world_size = group.rank, group.world_size
        config = replace(config, backward_dtype=backward_dtype)
        dispatcher = kind(group, spec_of(world_size), config)
        batch = batch_of(rank, world_size, config).to(group.device)
        x, weights = (each.clone().requires_grad_() for each in (batch.x, batch.topk_weights))
        out = dispatcher.dispatch(x, replace(batch.topk, topk_weights=weights))
        y = dispatcher.combine(out.combine_input(compute(out, rank)))
        y.backward(batch.dy)
        dispatcher.check()
        to_experts, back = (ROW_BYTES if way in WAYS else NVLINK_ROW_BYTES)[backward_dtype]
        most, others = dispatcher.plan.max_bytes_per_token(backward=True), world_size - 1
        if config.replicated:
            # dy is not sent, and the rank that adds up a token sends the total as it is.
            to_experts, back = 0, -(-(back + ROW_BYTES[None][1]) // world_size)
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
    assert decode.buffer_spec.backward_format is None
    for mode, backend, reason in (
        ("low_latency", "collective", "has no gradients"),
        ("normal", "deep_ep_v2", "sends gradients as bf16"),
    ):
        with pytest.raises(BackendUnavailable, match=f"{reason}, but .*backward_dtype is mxfp8"):
            plan(replace(config, mode=mode, backend=backend), spec_of(4))
