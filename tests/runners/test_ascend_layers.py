from dataclasses import replace

import pytest
import torch

from epcomm import (
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    Int8ChannelWeights,
    TopKOutput,
    WireDtype,
)
from epcomm.config import Mode
from epcomm.runners.ascend.runner import AscendRunner
from epcomm.testing.buffer_suite import BATCH_SPECS
from epcomm.testing.data import BatchSpec, make_batch, make_weights, random_ids
from epcomm.weights.unquantized import ExpertTensors
from tests.cases.quantized_model import (
    OF_ASCEND,
    OF_BFLOAT16,
    assert_within,
    stored_model,
    without_halves,
)

# The runners, and what their configuration must say. Two operators of Ascend's round as div, which
# its dispatch does not, so rows are sent unquantised there.
RUNNERS = {
    "ascend": EPConfig(mode="normal"),
    "ascend_swiglu": EPConfig(mode="normal"),
    "ascend_nz": EPConfig(mode="normal"),
    "ascend_swiglu_quant": EPConfig(
        mode="normal", dispatch_dtype=WireDtype.BF16, int8_profile="div"
    ),
}


def check_w8a8_layer(group: EPGroup, config: EPConfig, hidden_size: int) -> None:
    """Check that y equals a float64 model, before and after other experts are loaded."""
    spec = replace(BATCH_SPECS["uneven"], hidden_size=hidden_size, dtype=torch.bfloat16)
    world_size = group.world_size
    old, new = (
        Int8ChannelWeights.from_unquantized(
            make_weights(spec, world_size, intermediate_size=128, number=number)
        )
        for number in (0, 1)
    )
    on_device = old.with_tensors({k: each.to(group.device) for k, each in old.tensors().items()})
    layer = ExpertParallelExperts(on_device, group, config, top_k=spec.num_topk(world_size))
    assert f"wire: dispatch {config.dispatch_dtype or 'int8/0'}" in layer.explain()
    batch = without_halves(make_batch(spec, group.rank, world_size))
    x, ids, weights = (
        each.to(group.device) for each in (batch.x, batch.topk_ids, batch.topk_weights)
    )
    topk = TopKOutput(topk_ids=ids, topk_weights=weights)
    with torch.no_grad():
        first, again = layer(x, topk), layer(x, topk)
        layer.load_state_dict(new.tensors())
        second = layer(x, topk)
    layer.check()
    assert torch.equal(first, again)
    rounding = OF_BFLOAT16 if config.runner == "ascend_swiglu" else OF_ASCEND
    by_runner = config.backend == "collective"
    # Ascend's package returns single slots to the source rank.
    num_parts = (
        world_size
        if by_runner or (config.mode is Mode.STANDARD and config.backend == "ascend")
        else 1
    )
    for y, experts in ((first, old), (second, new)):
        expected = stored_model(batch, experts, rounding, num_parts=num_parts, by_runner=by_runner)
        assert_within(y, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.usefixtures("npu_operators")
def test_a_layer_equals_a_float64_model_before_and_after_a_reload(
    runner: str, group: EPGroup
) -> None:
    config = replace(RUNNERS[runner], backend="collective", runner=runner)
    check_w8a8_layer(group, config, hidden_size=64)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("npu_operators")
def test_sizes_beyond_the_activation_of_sums_are_planned_and_computed(
    monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    """Use ranks of one expert, whose counts the operator does not take either."""
    inner = 6400  # of Phi-3.5-MoE

    def is_of_kind(cls: type[AscendRunner], weights: ExpertTensors) -> bool:
        return isinstance(weights, cls.kinds)

    # On an NPU the runner is a candidate for the same experts.
    monkeypatch.setattr(AscendRunner, "is_candidate", classmethod(is_of_kind))
    spec = BatchSpec(
        hidden_size=64,
        num_local_experts=1,
        top_k=1,
        tokens_of_rank=lambda rank, world_size: 5 + rank,
        choose_ids=random_ids,
        dtype=torch.bfloat16,
    )
    with torch.no_grad():
        plain = make_weights(spec, group.world_size, intermediate_size=inner)
        weights = Int8ChannelWeights.from_unquantized(plain)
        # Few activations of this batch are between two codes: the bounds tell float32 scales and
        # float16 results on either rank.
        batch = without_halves(make_batch(spec, group.rank, group.world_size, number=2))
        config = EPConfig(mode="normal", backend="collective")
        layer = ExpertParallelExperts(weights, group, config, top_k=1)
        assert "runner ascend_swiglu\n" in layer.explain()
        reason = f"2 * intermediate_size is {2 * inner}, expected a multiple of 64 of at most 10496"
        assert f"rejected runner ascend: {reason} for npu_dequant" in layer.explain()
        y = layer(batch.x, batch.topk)
        layer.check()
    # The runner stores the result of a token's one slot, and that times its router weight, which
    # goes back as it is.
    expected = stored_model(batch, weights, OF_BFLOAT16, num_parts=2, by_runner=True)
    assert_within(y, expected)
    assert expected.error.sum() <= 0.01 * expected.values.abs().sum()
