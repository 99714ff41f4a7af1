"""EPConfig.combine_dtype: y by the definition, bytes, and gradients only if asked for."""

from __future__ import annotations

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
    WireDtype,
    WireFormat,
)
from epcomm.ops.slots import pack
from epcomm.planning.plan import plan
from epcomm.quantization import dequantize, quantize
from epcomm.testing.data import BatchSpec, RankBatch, holed_ids, make_batch

SPEC = BatchSpec(
    hidden_size=88,
    num_local_experts=3,
    top_k=4,
    dtype=torch.bfloat16,
    # Rank 1 has no token.
    tokens_of_rank=lambda rank, size: 0 if rank == 1 else 5 + rank,
    choose_ids=holed_ids,
)
# Elements, scales, and the gap to a multiple of 16 bytes, of a sum of 88 elements.
ROW_BYTES = {None: 176, WireDtype.FP8_E4M3: 96, WireDtype.MXFP8: 96, WireDtype.NVFP4: 64}
WAYS = {
    "collective": (DeepEPNormalDispatcher, "collective"),
    "shared_memory": (DeepEPNormalDispatcher, "shared_memory"),
    "low latency": (DeepEPLowLatencyDispatcher, "shared_memory"),
}


def spec_of(world_size: int) -> MoESpec:
    return MoESpec(
        hidden_size=SPEC.hidden_size,
        num_experts=SPEC.num_experts(world_size),
        top_k=SPEC.num_topk(world_size),
        dtype=SPEC.dtype,
    )


def compute(out: RowsDispatchOutput, rank: int) -> Tensor:
    """Return weighted results of slots; expert e multiplies by e + 1.5."""
    assert out.slot_weights is not None, "the runner applies them"
    rows = pack(out.hidden_states.data, out.index)
    counts = out.num_tokens_per_expert.long()
    experts = torch.arange(len(counts)) + rank * len(counts)
    scale = torch.repeat_interleave(experts + 1.5, counts) * out.slot_weights
    return (rows.float() * scale.unsqueeze(1)).to(rows.dtype)


def expected(batch: RankBatch, world_size: int, combine_dtype: WireDtype) -> Tensor:
    """Return y by the definition, one token and rank at a time."""
    y = torch.zeros(batch.x.shape)
    for token, x in enumerate(batch.x.float()):
        for rank in range(world_size):
            sums, is_sent = torch.zeros_like(x), False
            for expert, weight in zip(
                batch.topk_ids[token], batch.topk_weights[token], strict=True
            ):
                if expert >= 0 and expert // SPEC.num_local_experts == rank:
                    sums = sums + (x * ((expert + 1.5) * weight)).to(SPEC.dtype).float()
                    is_sent = True
            if is_sent:
                wire = quantize(sums.to(SPEC.dtype).unsqueeze(0), WireFormat(dtype=combine_dtype))
                y[token] += dequantize(wire, torch.float32)[0]
    return y.to(SPEC.dtype)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("combine_dtype", [each for each in ROW_BYTES if each], ids=str)
def test_y_is_the_float32_sum_of_quantised_sums_of_ranks(
    combine_dtype: WireDtype, way: str
) -> None:
    kind, backend = WAYS[way]
    with EPGroup() as group, torch.no_grad():
        config = EPConfig(backend=backend, combine_dtype=combine_dtype)
        dispatcher = kind(group, spec_of(group.world_size), config)
        batch = make_batch(SPEC, group.rank, group.world_size)
        for _ in range(3):
            before = dispatcher.traffic()
            out = dispatcher.dispatch(batch.x, batch.topk)
            assert isinstance(out, RowsDispatchOutput), "the backends return rows"
            y = dispatcher.combine(out.combine_input(compute(out, group.rank)))
            assert torch.equal(y, expected(batch, group.world_size, combine_dtype))
            sources = out.handle.exchange_plan.rows_from_ranks().tolist()
            num_rows = sum(sources) - sources[group.rank]
            sent = dispatcher.traffic().combine_bytes - before.combine_bytes
            assert sent == num_rows * ROW_BYTES[combine_dtype]


@pytest.mark.parametrize("combine_dtype", ROW_BYTES, ids=str)
def test_plan_states_the_bytes_of_sums(combine_dtype: WireDtype | None) -> None:
    config = EPConfig(mode="normal", backend="collective", combine_dtype=combine_dtype)
    chosen = plan(config, spec_of(4), world_size=4)
    assert chosen.prefill.max_bytes_per_token()["combine"] == 3 * ROW_BYTES[combine_dtype]
    assert f"combine {combine_dtype or 'bf16'}" in chosen.explain()


def test_other_formats_sizes_and_backends_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"combine_dtype is .*mxfp4.*, expected one of"):
        EPConfig(combine_dtype=WireDtype.MXFP4)
    config = EPConfig(mode="normal", combine_dtype=WireDtype.NVFP4)
    with pytest.raises(ConfigError, match=r"hidden_size is 87; expected a multiple of 2"):
        plan(config, replace(spec_of(4), hidden_size=87))
    with pytest.raises(ConfigError, match=r"states are fp64; expected .* combine_dtype None"):
        plan(config, replace(spec_of(4), dtype=torch.float64))
    static = replace(config, max_tokens_per_rank=8, max_recv_slots=64)
    with pytest.raises(ConfigError, match="returns sums as bf16, not as nvfp4"):
        plan(static, spec_of(4))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["collective", "shared_memory"])
def test_gradients_are_refused_on_every_rank_unless_asked_for(backend: str) -> None:
    with EPGroup() as group:
        config = EPConfig(backend=backend, combine_dtype=WireDtype.MXFP8)
        batch = make_batch(SPEC, group.rank, group.world_size)
        # The gradients of one rank concern all.
        x = batch.x.clone().requires_grad_(group.rank == 0)
        dispatcher = DeepEPNormalDispatcher(group, spec_of(2), config)
        own, other = "combine_dtype is mxfp8, and gradients", "combine_dtype without them on rank 0"
        with pytest.raises(ConfigError, match=own if group.rank == 0 else other):
            dispatcher.dispatch(x, batch.topk)
        grads, sums = [], []
        for combine_dtype in (None, WireDtype.MXFP8):
            permitted = replace(
                config, combine_dtype=combine_dtype, combine_dtype_with_gradients=True
            )
            dispatcher = DeepEPNormalDispatcher(group, spec_of(2), permitted)
            x = batch.x.clone().requires_grad_()
            out = dispatcher.dispatch(x, batch.topk)
            y = dispatcher.combine(out.combine_input(compute(out, group.rank)))
            y.backward(batch.dy)
            grads.append(x.grad)
            sums.append(y)
        assert torch.equal(*grads)
        assert torch.equal(*sums) == (len(x) == 0)
