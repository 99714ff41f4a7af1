"""EPConfig.combine_dtype: y by the definition, bytes, and gradients only if asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epcomm import (
    BackendUnavailable,
    ConfigError,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    Mode,
    MoESpec,
    RowsDispatchOutput,
    WireDtype,
    WireFormat,
)
from epcomm.dispatchers import Dispatcher
from epcomm.ops.slots import expert_of_slot, pack
from epcomm.planning.plan import plan
from epcomm.planning.plans import PhasePlan
from epcomm.platforms.assumed import DEVICES
from epcomm.quantization import dequantize, quantize
from epcomm.testing.data import BatchSpec, RankBatch, holed_ids, make_batch
from epcomm.types import WeightsAppliedBy
from tests.cases.meshes import mesh_of
from tests.dispatchers.test_sum_groups import WAYS

# Several blocks of each format, the last one short.
SPEC = BatchSpec(
    hidden_size=152,
    num_local_experts=3,
    top_k=4,
    dtype=torch.bfloat16,
    # Rank 1 has no token.
    tokens_of_rank=lambda rank, size: 0 if rank == 1 else 5 + rank,
    choose_ids=holed_ids,
)
# Elements, scales, and the gap to a multiple of 16 bytes, of a sum of 152 elements.
ROW_BYTES = {None: 304, WireDtype.FP8_E4M3: 160, WireDtype.MXFP8: 160, WireDtype.NVFP4: 96}
FORMATS = [each for each in ROW_BYTES if each]


def spec_of(world_size: int) -> MoESpec:
    return MoESpec(
        hidden_size=SPEC.hidden_size,
        num_experts=SPEC.num_experts(world_size),
        top_k=SPEC.num_topk(world_size),
        dtype=SPEC.dtype,
    )


def compute(out: RowsDispatchOutput, rank: int) -> Tensor:
    """Return results of slots, weighted unless combine does it; expert e multiplies by e + 1.5."""
    rows = pack(out.hidden_states.data, out.index)
    experts = expert_of_slot(out.index, len(rows)) + rank * SPEC.num_local_experts
    results = (rows * (experts + 1.5).unsqueeze(1)).to(rows.dtype)
    if out.weights_applied_by is WeightsAppliedBy.COMBINE:
        return results
    return (results * out.slot_weights.unsqueeze(1)).to(rows.dtype)


def batch_of(
    rank: int, world_size: int, config: EPConfig, *, spec: BatchSpec = SPEC, number: int = 0
) -> RankBatch:
    """Return the tokens of a rank; weights are powers of two, whose products are exact."""
    batch = make_batch(spec, 0 if config.replicated else rank, world_size, number=number)
    return replace(batch, topk_weights=batch.topk_weights.log2().round().exp2())


def expected(batch: RankBatch, hosts: list[list[int]], combine_dtype: WireDtype | None) -> Tensor:
    """Return y by the definition, one token, host and rank at a time."""
    wire_format = WireFormat(dtype=combine_dtype or WireDtype.BF16)
    y = torch.zeros(batch.x.shape)
    for token, x in enumerate(batch.x.float()):
        entries = list(zip(batch.topk_ids[token], batch.topk_weights[token], strict=True))
        for ranks in hosts:
            total, is_sent = torch.zeros_like(x), False
            for rank in ranks:
                sums = torch.zeros_like(x)
                for expert, weight in entries:
                    if expert >= 0 and expert // SPEC.num_local_experts == rank:
                        sums += (x * (expert + 1.5)).to(SPEC.dtype).float() * weight
                        is_sent = True
                total += sums.to(SPEC.dtype).float()
            if is_sent:
                wire = quantize(total.to(SPEC.dtype).unsqueeze(0), wire_format)
                y[token] += dequantize(wire, torch.float32)[0]
    return y.to(SPEC.dtype)


def check_sums(
    group: EPGroup, kind: type[Dispatcher], config: EPConfig, hosts: list[list[int]]
) -> PhasePlan:
    """Compare y with the definition; return the plan."""
    combine_dtype = config.combine_dtype
    assert combine_dtype is not None, "the sums are quantised"
    dispatcher = kind(group, spec_of(group.world_size), config)
    batch = batch_of(group.rank, group.world_size, config)
    for _ in range(3):
        out = dispatcher.dispatch(batch.x, batch.topk)
        y = dispatcher.combine(out.combine_input(compute(out, group.rank)))
        assert torch.equal(y, expected(batch, hosts, combine_dtype))
    return dispatcher.plan


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("combine_dtype", FORMATS, ids=str)
def test_y_is_the_float32_sum_of_quantised_rank_sums(combine_dtype: WireDtype, way: str) -> None:
    kind, config = WAYS[way]
    with EPGroup() as group, torch.no_grad():
        hosts = [[rank] for rank in range(group.world_size)]
        chosen = check_sums(group, kind, replace(config, combine_dtype=combine_dtype), hosts)
        num_bytes, world_size = ROW_BYTES[combine_dtype], group.world_size
        if config.replicated:
            # A rank adds up a share of the tokens, whose totals are not quantised.
            num_bytes = -(-(num_bytes + ROW_BYTES[None]) // world_size)
        assert chosen.max_bytes_per_token()["combine"] == (world_size - 1) * num_bytes
        assert f"combine {combine_dtype}" in chosen.explain()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("combine_dtype", FORMATS, ids=str)
def test_y_is_the_float32_sum_of_quantised_host_sums(combine_dtype: WireDtype) -> None:
    with EPGroup(mesh_of((2, 2), ("host", "place"))) as group, torch.no_grad():
        config = EPConfig(backend="hierarchical", combine_dtype=combine_dtype)
        check_sums(group, DeepEPNormalDispatcher, config, [[0, 1], [2, 3]])
        expect_refusal(group, DeepEPNormalDispatcher, config, "and gradients are needed")


@pytest.mark.parametrize("mode", [Mode.NORMAL, Mode.LOW_LATENCY])
@pytest.mark.parametrize(
    ("combine_dtype", "num_bytes"),
    [(WireDtype.MXFP8, 152 + 5), (WireDtype.NVFP4, 76 + 4 + 12)],
)
def test_plan_states_the_bytes_of_sums_over_nvlink(
    combine_dtype: WireDtype, num_bytes: int, mode: Mode
) -> None:
    config = EPConfig(
        mode=mode, backend="nvlink", combine_dtype=combine_dtype, max_tokens_per_rank=8
    )
    chosen = plan(config, spec_of(4), world_size=4, machine=DEVICES["h200"])
    # Without a gap after the scales.
    bytes_of_token = [each.max_bytes_per_token()["combine"] for each in chosen.phases().values()]
    assert set(bytes_of_token) == {3 * num_bytes}


def test_other_formats_sizes_and_backends_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"combine_dtype is .*mxfp4.*, expected one of"):
        EPConfig(combine_dtype=WireDtype.MXFP4)
    config = EPConfig(mode="normal", combine_dtype=WireDtype.NVFP4)
    with pytest.raises(ConfigError, match=r"hidden_size is 87; expected a multiple of 2"):
        plan(config, replace(spec_of(4), hidden_size=87))
    with pytest.raises(ConfigError, match=r"states are fp64; expected .* combine_dtype None"):
        plan(config, replace(spec_of(4), dtype=torch.float64))
    with pytest.raises(BackendUnavailable, match="returns sums as bf16, not as nvfp4") as caught:
        plan(replace(config, backend="deep_ep_v2"), spec_of(4))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="not as logfmt10, which deep_ep_v1 has in low latency"):
        plan(replace(config, combine_dtype=WireDtype.LOGFMT10), spec_of(4))
    for permits, said in (
        (False, "False (combine_dtype_with_gradients is not set)"),
        (True, "True"),
    ):
        chosen = plan(replace(config, combine_dtype_with_gradients=permits), spec_of(4))
        assert f"; trainable: {said}; " in chosen.explain()
    wide, decode = replace(spec_of(4), hidden_size=16400), replace(config, mode="low_latency")
    decode = replace(decode, backend="nvlink", max_tokens_per_rank=8)
    with pytest.raises(BackendUnavailable, match="nvfp4 of at most 16384 columns") as caught:
        plan(decode, wide, world_size=4, machine=DEVICES["h200"])
    assert "\n" not in str(caught.value)


@torch.enable_grad()
def expect_refusal(group: EPGroup, kind: type[Dispatcher], config: EPConfig, own: str) -> None:
    """Check that gradients of rank 0 are refused on all ranks, there with the text `own`."""
    dispatcher = kind(group, spec_of(group.world_size), config)
    batch = batch_of(group.rank, group.world_size, config)
    x = batch.x.clone().requires_grad_(group.rank == 0)
    text = own if group.rank == 0 else "in a mode or combine_dtype without them on rank 0"

    def call() -> None:
        out = dispatcher.dispatch(x, batch.topk)
        # Only static sizes reach check().
        dispatcher.combine(out.combine_input(compute(out, group.rank)))
        dispatcher.check()

    with pytest.raises(ConfigError, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_refused_on_every_rank_unless_asked_for(way: str) -> None:
    kind, config = WAYS[way]
    refused = replace(config, combine_dtype=WireDtype.MXFP8)
    permitted = replace(refused, combine_dtype_with_gradients=True)
    with EPGroup() as group:
        if way == "low latency":
            for each in (refused, permitted):
                expect_refusal(group, kind, each, "low latency has no gradients")
            return
        expect_refusal(group, kind, refused, "combine_dtype is mxfp8, and gradients")
        batch = batch_of(group.rank, 2, config)
        grads, sums = [], []
        for each in (config, permitted):
            dispatcher = kind(group, spec_of(2), each)
            x = batch.x.clone().requires_grad_()
            out = dispatcher.dispatch(x, batch.topk)
            y = dispatcher.combine(out.combine_input(compute(out, group.rank)))
            y.backward(batch.dy)
            grads.append(x.grad)
            sums.append(y)
        assert torch.equal(*grads)
        assert torch.equal(*sums) == (len(x) == 0)
