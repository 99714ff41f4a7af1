"""Rows, experts and autocast in different dtypes: the table of docs/precision.md."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from epcomm import (
    ConfigError,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    MoESpec,
    TopKOutput,
    WireDtype,
)
from epcomm.collectives.torch_dist import TorchDistCollectives
from epcomm.ops.slots import pack
from epcomm.runners import grouped_mm, reference
from epcomm.runners.base import ExpertRunner
from epcomm.sharding.shards import sharded_parameters
from epcomm.testing.buffer_suite import BATCH_SPECS
from epcomm.testing.data import RankBatch, make_batch, make_weights
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import OracleResult, relative_error, run_oracle
from epcomm.weights.quantized import Fp8BlockWeights, Int8ChannelWeights

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NUM_RANKS = 2
pytestmark = pytest.mark.ranks(NUM_RANKS)
SPEC = BATCH_SPECS["uneven"]
NORMAL = EPConfig(mode="normal")
TOP_K = SPEC.num_topk(NUM_RANKS)


def tolerance(*dtypes: torch.dtype) -> float:
    """Return the largest error of results in these dtypes, relative to the largest result.

    A few products and activations, the weighted result, the sum of a rank, y, and gradients through
    twice as many: 16 roundings of the largest value by half a unit, all in one direction.
    """
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    return 16 * coarsest / 2 if coarsest > torch.finfo(FP32).eps else FP32_TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table.

    experts, rows: dtypes at construction and of x.   cast: of the layer afterwards.
    computes, travels: expected dtypes between the products, and of received rows.
    """

    experts: torch.dtype = FP32
    rows: torch.dtype = FP32
    cast: torch.dtype | None = None
    autocast: torch.dtype | None = None
    config: EPConfig = NORMAL
    computes: torch.dtype
    travels: torch.dtype = FP32

    @property
    def held(self) -> torch.dtype:
        """The dtype of the parameters in the call."""
        return self.cast or self.experts


CASES = {
    "narrow rows": Case(rows=BF16, computes=BF16),
    "wide rows": Case(rows=FP64, computes=FP32),
    "wide rows of narrow experts": Case(experts=BF16, computes=BF16, travels=BF16),
    "rows of equal width": Case(experts=FP16, rows=BF16, computes=BF16, travels=FP16),
    "autocast": Case(autocast=BF16, computes=BF16),
    "autocast, narrow rows": Case(rows=BF16, autocast=BF16, computes=BF16),
    "autocast of float64": Case(
        experts=FP64, rows=FP64, autocast=BF16, computes=FP64, travels=FP64
    ),
    "to(bfloat16)": Case(rows=BF16, cast=BF16, computes=BF16),
    "to(bfloat16), wide rows": Case(cast=BF16, computes=BF16),
    "half()": Case(rows=FP16, cast=FP16, computes=FP16),
    "float()": Case(experts=BF16, cast=FP32, computes=FP32),
    "double()": Case(rows=FP64, cast=FP64, computes=FP64, travels=FP64),
    "chosen wire": Case(
        config=EPConfig(mode="normal", dispatch_dtype=WireDtype.BF16), computes=FP32, travels=BF16
    ),
    "chosen wire, narrow rows": Case(
        rows=BF16,
        config=EPConfig(mode="normal", dispatch_dtype=WireDtype.BF16),
        computes=BF16,
        travels=BF16,
    ),
    "static sizes": Case(
        rows=BF16,
        config=EPConfig(mode="normal", max_tokens_per_rank=32, max_recv_slots=256),
        computes=BF16,
    ),
    "reference, autocast": Case(
        autocast=BF16, config=EPConfig(mode="normal", runner="reference"), computes=BF16
    ),
}


class Spy:
    """A runner that records the dtypes in which experts compute and of the rows that they get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computed: set[torch.dtype] = set()
        self.travelled: set[torch.dtype] = set()
        for module, name in ((grouped_mm, "activate_slots"), (reference, "activate")):
            monkeypatch.setattr(module, name, self._noting(getattr(module, name)))

    def _noting(self, activate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def note(gate_up: Tensor, *others: object) -> Tensor:
            self.computed.add(gate_up.dtype)
            return activate(gate_up, *others)

        return note

    def watch(self, runner: ExpertRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        run = runner.run

        def note(dispatched: object, weights: object) -> object:
            self.travelled.add(dispatched.hidden_states.data.dtype)  # type: ignore[attr-defined]
            return run(dispatched, weights)  # type: ignore[call-overload]

        monkeypatch.setattr(runner, "run", note)


def rounded(batch: RankBatch, dtype: torch.dtype) -> RankBatch:
    return replace(batch, x=batch.x.to(dtype))


def check_layer(
    layer: ExpertParallelExperts,
    batch: RankBatch,
    expected: OracleResult,
    allowed: float,
    autocast: torch.dtype | None,
) -> None:
    """Compute y and all gradients of this rank, and check their dtypes."""
    rank, held = layer.group.rank, layer.weights.dtype
    x = batch.x.clone().requires_grad_()
    router_weights = batch.topk_weights.clone().requires_grad_()
    device_type = x.device.type
    with torch.autocast(device_type, dtype=autocast) if autocast else nullcontext():
        y = layer(x, TopKOutput(topk_ids=batch.topk_ids, topk_weights=router_weights))
    assert y.dtype is x.dtype
    y.backward(batch.dy.to(y.dtype))
    found = {"y": y, "dx": x.grad, "dw": router_weights.grad}
    wanted = {"y": expected.y[rank], "dx": expected.dx[rank], "dw": expected.dw[rank]}
    first = rank * layer.weights.num_experts
    for name, parameter in layer.expert_parameters().items():
        found[name] = parameter.grad
        wanted[name] = expected.weight_grads[name][first : first + layer.weights.num_experts]
        assert parameter.grad.dtype is held
    for name, tensor in found.items():
        assert tensor is not None, name
        error = relative_error(tensor, wanted[name])
        assert error <= allowed, f"{name} has an error of {error:.3g}, allowed {allowed:.3g}"
    assert x.grad.dtype is x.dtype


@pytest.mark.parametrize("name", CASES)
def test_table(name: str, monkeypatch: pytest.MonkeyPatch, group: EPGroup) -> None:
    case = CASES[name]
    spec = replace(SPEC, dtype=case.experts)
    weights = make_weights(spec, NUM_RANKS, device=group.device)
    # Tokens with all digits of the wider dtype, then in the caller's dtype.
    wide = replace(SPEC, dtype=FP64 if case.rows is FP64 else FP32)
    batches = [
        rounded(make_batch(wide, rank, NUM_RANKS).to(group.device), case.rows)
        for rank in range(NUM_RANKS)
    ]
    layer = ExpertParallelExperts(weights, group, case.config, top_k=TOP_K)
    if case.cast is not None:
        layer.to(case.cast)
    spy = Spy(monkeypatch)
    allowed = tolerance(case.experts, case.rows, case.held, case.travels, case.computes)
    check_layer(layer, batches[group.rank], run_oracle(batches, weights), allowed, case.autocast)
    assert spy.computed == {case.computes}
    spy.watch(layer.runner, monkeypatch)
    with torch.no_grad():
        layer(batches[group.rank].x, batches[group.rank].topk)
        spy.computed.clear()
        layer.idle(torch.zeros((), device=group.device))
    assert spy.travelled == {case.travels}
    # A rank without data computes the rows of others in the dtype of its experts.
    assert spy.computed == {case.held}
    assert f"combine {WireDtype.from_torch(case.travels)}" in layer.explain()


def test_each_rank_may_give_rows_of_its_own_dtype(group: EPGroup) -> None:
    """Check that the dtype on the wire does not depend on the dtypes that ranks pass."""
    weights = make_weights(SPEC, NUM_RANKS, device=group.device)
    layer = ExpertParallelExperts(weights, group, NORMAL, top_k=TOP_K)
    batches = [
        rounded(make_batch(SPEC, rank, NUM_RANKS).to(group.device), (FP32, BF16)[rank])
        for rank in range(NUM_RANKS)
    ]
    check_layer(layer, batches[group.rank], run_oracle(batches, weights), tolerance(BF16), None)


def test_float32_experts_of_odd_sizes_compute_narrow_rows_in_float32(
    monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    """Torch's grouped matmul needs rows in steps of 16 bytes; 12 bfloat16 numbers are 24."""
    spec = replace(SPEC, hidden_size=12)
    weights = make_weights(spec, NUM_RANKS, intermediate_size=20, device=group.device)
    layer = ExpertParallelExperts(weights, group, NORMAL, top_k=TOP_K)
    assert layer.plan.runner == "grouped_mm"
    batches = [
        rounded(make_batch(spec, rank, NUM_RANKS).to(group.device), BF16)
        for rank in range(NUM_RANKS)
    ]
    spy = Spy(monkeypatch)
    expected = run_oracle(batches, weights)
    check_layer(layer, batches[group.rank], expected, tolerance(BF16), None)
    assert spy.computed == {FP32}


class Tower(nn.Module):
    """A linear layer, routed experts, a linear layer."""

    def __init__(self, experts: ExpertParallelExperts, device: torch.device) -> None:
        super().__init__()
        self.first = nn.Linear(SPEC.hidden_size, SPEC.hidden_size, device=device)
        self.router = nn.Linear(SPEC.hidden_size, experts.num_experts, device=device)
        self.experts = experts
        self.last = nn.Linear(SPEC.hidden_size, SPEC.hidden_size, device=device)
        generator = torch.Generator().manual_seed(5)
        for linear in (self.first, self.router, self.last):
            for parameter in linear.parameters():
                values = torch.randn(parameter.shape, generator=generator) / 8
                parameter.data.copy_(values)

    def forward(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """Compute [T, H] from x [T, H] and the experts of each token."""
        x = self.first(x)
        scores = self.router(x).softmax(dim=-1).gather(1, topk_ids)
        return self.last(self.experts(x, TopKOutput(topk_ids=topk_ids, topk_weights=scores)))


def whole_model(model: Tower, policy: MixedPrecisionPolicy) -> None:
    fully_shard(model, ignored_params=set(sharded_parameters(model)), mp_policy=policy)


def each_layer(model: Tower, policy: MixedPrecisionPolicy) -> None:
    ignored = set(sharded_parameters(model))
    for part in model.children():
        fully_shard(part, ignored_params=ignored, mp_policy=policy)
    whole_model(model, policy)


WRAPPERS = {"one unit": whole_model, "each layer": each_layer, "autocast": None}


@pytest.mark.parametrize("name", WRAPPERS)
def test_float32_experts_train_beside_layers_in_bfloat16(
    name: str, monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    """Check y and expert gradients under FSDP2's param_dtype, and autocast after a linear layer."""
    weights = make_weights(SPEC, NUM_RANKS, device=group.device)
    batch = make_batch(SPEC, group.rank, NUM_RANKS).to(group.device)

    def make() -> Tower:
        layer = ExpertParallelExperts(weights, group, NORMAL, top_k=TOP_K)
        return Tower(layer, group.device)

    plain, model = make(), make()
    expected = plain(batch.x, batch.topk_ids)
    (expected * batch.dy).sum().backward()
    wrap = WRAPPERS[name]
    if wrap is not None:
        wrap(model, MixedPrecisionPolicy(param_dtype=BF16))
    spy = Spy(monkeypatch)
    device_type = group.device.type
    with torch.autocast(device_type, dtype=BF16, enabled=wrap is None):
        y = model(batch.x, batch.topk_ids)
    (y.float() * batch.dy).sum().backward()
    assert spy.computed == {BF16}
    # Linear layers before and after round as often as the experts do.
    allowed = 2 * tolerance(BF16)
    assert relative_error(y, expected) <= allowed
    mine, theirs = model.experts.expert_parameters(), plain.experts.expert_parameters()
    for field, tensor in mine.items():
        assert tensor.grad.dtype is FP32
        wanted = theirs[field].grad
        assert relative_error(tensor.grad, wanted) <= allowed, field


def test_dispatcher_casts_rows_weights_and_results(group: EPGroup) -> None:
    """Pass a dispatcher rows, router weights and results of other dtypes, without a layer."""
    spec = MoESpec(hidden_size=SPEC.hidden_size, num_experts=4, top_k=TOP_K, dtype=FP32)
    dispatcher = DeepEPNormalDispatcher(group, spec)
    batch = make_batch(SPEC, group.rank, NUM_RANKS).to(group.device)
    x = batch.x.half().requires_grad_()
    router_weights = batch.topk_weights.double().requires_grad_()
    topk = TopKOutput(topk_ids=batch.topk_ids, topk_weights=router_weights)
    out = dispatcher.dispatch(x, topk)
    assert out.hidden_states.data.dtype is FP32
    assert out.slot_weights.dtype is FP32
    slots = pack(out.hidden_states.data, out.index) * out.slot_weights.unsqueeze(1)
    y = dispatcher.combine(out.combine_input(slots.bfloat16()))
    assert y.dtype is FP16
    y.backward(batch.dy.half())
    assert (x.grad.dtype, router_weights.grad.dtype) == (FP16, FP64)
    total = batch.topk_weights.sum(dim=1, keepdim=True)
    dots = (batch.dy * batch.x).sum(dim=1, keepdim=True).expand(-1, TOP_K)
    assert relative_error(y, batch.x * total) <= tolerance(BF16)
    assert relative_error(x.grad, batch.dy * total) <= tolerance(BF16)
    assert relative_error(router_weights.grad, dots) <= tolerance(BF16)


def test_experts_that_a_cast_widens_are_noticed_without_a_mesh() -> None:
    """Without a mesh, parameters are plain tensors, which a cast writes in place."""
    with EPGroup(TorchDistCollectives(dist.group.WORLD)) as group, torch.no_grad():
        weights = make_weights(replace(SPEC, dtype=FP32), NUM_RANKS, device=group.device)
        layer = ExpertParallelExperts(weights, group, NORMAL, top_k=TOP_K)
        batch = make_batch(SPEC, group.rank, NUM_RANKS).to(group.device)
        before = layer(batch.x.float(), batch.topk)
        layer.to(FP64)
        assert layer.weights.dtype is FP64
        after = layer(batch.x.double(), batch.topk)
        assert after.dtype is FP64
        assert relative_error(before, after) <= tolerance(FP32)


FUSED = EPConfig(mode="fuseep", backend="fuseep_reference", max_tokens_per_rank=16)
EIGHT_BITS = {
    "fp8 codes": (Fp8BlockWeights, BF16, "gate_up_proj is torch.float8_e4m3fn", NORMAL),
    "int8 scales": (Int8ChannelWeights, FP16, "gate_up_scale is torch.float32", NORMAL),
    "fused int8": (Int8ChannelWeights, FP16, "gate_up_scale is torch.float32", FUSED),
}


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_codes_and_scales_are_not_cast(name: str, group: EPGroup) -> None:
    """A cast of the whole model is refused before it rounds anything; a move is not."""
    kind, dtype, text, config = EIGHT_BITS[name]
    spec = replace(SPEC, dtype=BF16)
    with torch.no_grad():
        plain = make_weights(spec, NUM_RANKS, device=group.device)
        weights = kind.from_unquantized(plain)
        layer = ExpertParallelExperts(weights, group, config, top_k=TOP_K)
        before = {role: tensor.clone() for role, tensor in layer.weights.tensors().items()}
        with pytest.raises(ConfigError, match=f"ExpertParallelExperts: {text} and would become"):
            layer.to(dtype)
        layer.to(group.device)
        for role, tensor in layer.weights.tensors().items():
            assert torch.equal(tensor.view(torch.uint8), before[role].view(torch.uint8)), role
        # y has the dtype of the rows.
        batch = make_batch(spec, group.rank, NUM_RANKS).to(group.device)
        y = layer(batch.x.float(), batch.topk)
        assert y.dtype is FP32
        assert torch.equal(y, layer(batch.x, batch.topk).float())
