import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from epcomm import (
    ConfigError,
    EPConfig,
    EPError,
    EPGroup,
    ExpertParallelExperts,
    ExpertParallelMoE,
    ExpertWeights,
    HandleError,
    ShapeError,
    idle_step,
    metrics,
)
from epcomm.records import TopKOutput
from epcomm.routing import RoutingSpec, record_routes, replay_routes, watch_gates
from epcomm.routing.gates import GateCall, choose, named_gates
from epcomm.testing.oracle import relative_error
from tests.placement.layers import any_placement
from tests.routing.cases import bias_for, every_spec, spread_logits
from tests.routing.oracle import cap, score, weigh

HIDDEN, NUM_EXPERTS, TOP_K, NUM_LAYERS = 8, 6, 3, 4
# Layers 0 and 2 are dense.
MOE_LAYERS = (1, 3)
SPEC = RoutingSpec(top_k=TOP_K, renormalize=True)
# Sums of float64 in another order.
SAME = 1e-12
pytestmark = pytest.mark.ranks(2)


class PlainMoE(nn.Module):
    """A MoE layer in one process, token by token, whose routes are given."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False, dtype=torch.float64)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        self.gate.weight.data = draw(NUM_EXPERTS, HIDDEN)
        self.gate_up_proj = nn.Parameter(draw(NUM_EXPERTS, 2 * HIDDEN, HIDDEN) / 3)
        self.down_proj = nn.Parameter(draw(NUM_EXPERTS, HIDDEN, HIDDEN) / 3)

    def forward(self, x: Tensor, routes: Tensor) -> Tensor:
        rows = []
        for token, given in zip(x, routes.tolist(), strict=True):
            probabilities = torch.softmax(self.gate(token), dim=-1)
            ids = with_live(given, probabilities.argsort(descending=True).tolist())
            total = sum(probabilities[e] for e in ids)
            rows.append(sum(self.expert(e, token) * probabilities[e] / total for e in ids))
        return torch.stack(rows) if rows else x * self.gate.weight.sum() * 0

    def expert(self, e: int, token: Tensor) -> Tensor:
        gate, up = (self.gate_up_proj[e] @ token).chunk(2)
        return self.down_proj[e] @ (nn.functional.silu(gate) * up)


def with_live(given: Sequence[int], ranked: Sequence[int]) -> list[int]:
    """Replace each -1 by the best expert that is not named."""
    others = [e for e in ranked if e not in given]
    return [others.pop(0) if e < 0 else e for e in given]


class Plain(nn.Module):
    """A plain model of four layers, two of them MoE."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList()
        for index in range(NUM_LAYERS):
            dense = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
            weight = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
            dense.weight.data = weight
            dense.bias.data.zero_()
            self.layers.append(PlainMoE(generator) if index in MOE_LAYERS else dense)

    def forward(self, x: Tensor, routes: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x + (layer(x, routes[:, index]) if index in MOE_LAYERS else layer(x).tanh())
        return x


class Model(nn.Module):
    """A model with the layers of Plain, or some of them, on epcomm.

    repeats: the argument use_reentrant of checkpoint() around each layer; None: no checkpoint.
    """

    def __init__(
        self,
        plain: Plain,
        group: EPGroup,
        config: EPConfig | None = None,
        *,
        repeats: bool | None = None,
        indices: Sequence[int] = range(NUM_LAYERS),
    ) -> None:
        super().__init__()
        self.repeats = repeats
        self.layers = nn.ModuleDict() if len(indices) < NUM_LAYERS else nn.ModuleList()
        for index in indices:
            layer = plain.layers[index]
            if isinstance(layer, PlainMoE):
                layer = moe_of(layer, group, config)
            if isinstance(self.layers, nn.ModuleDict):
                self.layers[str(index)] = layer
            else:
                self.layers.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        named = dict(self.layers.named_children())
        for layer in named.values():
            call = partial(_layer, layer)
            x = call(x) if self.repeats is None else checkpoint(call, x, use_reentrant=self.repeats)
        return x


def _layer(layer: nn.Module, x: Tensor) -> Tensor:
    return x + (layer(x).tanh() if isinstance(layer, nn.Linear) else layer(x))


def moe_of(plain: PlainMoE, group: EPGroup, config: EPConfig | None) -> ExpertParallelMoE:
    weights = ExpertWeights(gate_up_proj=plain.gate_up_proj, down_proj=plain.down_proj)
    experts = ExpertParallelExperts(weights, group, config or EPConfig(mode="normal"), top_k=TOP_K)
    return ExpertParallelMoE(routing=SPEC, experts=experts, parts={"gate": plain.gate})


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    x: Tensor
    routes: Tensor


def micro_batch(rank: int, number: int, num_tokens: int) -> MicroBatch:
    """Draw tokens and routes; a third of the entries are -1, and so are whole tokens."""
    numbers = random.Random(100 * rank + number)
    generator = torch.Generator().manual_seed(100 * rank + number)
    x = torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64)
    routes = torch.full((num_tokens, NUM_LAYERS, TOP_K), 77, dtype=torch.int16)
    for token in range(num_tokens):
        for layer in MOE_LAYERS:
            ids = numbers.sample(range(NUM_EXPERTS), TOP_K)
            drawn = [e if numbers.random() < 2 / 3 and token % 4 else -1 for e in ids]
            routes[token, layer] = torch.tensor(drawn)
    return MicroBatch(x=x.requires_grad_(), routes=routes)


def batches_of(rank: int) -> list[MicroBatch]:
    sizes = [(5, 3, 4), (2, 6, 0)][rank]
    return [micro_batch(rank, number, size) for number, size in enumerate(sizes)]


@cache
def expected_gradients(number: int = 3) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    """Return the gradients of one process by name, and those of all ranks' inputs.

    number: micro-batches of each rank.
    """
    plain, inputs = Plain(), []
    for rank in range(2):
        batches = batches_of(rank)[:number]
        for batch in batches:
            plain(batch.x, batch.routes).square().sum().backward()
        inputs.append([batch.x.grad for batch in batches])
    return {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}, inputs


def check_gradients(model: nn.Module, expected: dict[str, Tensor], rank: int) -> None:
    names = {"experts.gate_up_proj": "gate_up_proj", "experts.down_proj": "down_proj"}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        short = next((name.replace(k, v) for k, v in names.items() if name.endswith(k)), name)
        wanted = expected[short]
        if short != name:
            found = parameter.grad.to_local()  # type: ignore[operator]
            wanted = wanted.chunk(2)[rank]
        else:
            found = parameter.grad.clone()
            dist.all_reduce(found)
        assert relative_error(found, wanted) <= SAME, name


@pytest.mark.parametrize("repeats", [None, False, True])
@pytest.mark.parametrize("order", ["first_last", "last_first", "together"])
def test_micro_batches_equal_one_process_with_forced_ids(
    repeats: bool | None, order: str, group: EPGroup
) -> None:
    expected, inputs = expected_gradients()
    model = Model(Plain(), group, repeats=repeats)
    batches = batches_of(group.rank)
    routes = torch.cat([batch.routes for batch in batches])
    with replay_routes(model, routes):
        losses = [model(batch.x).square().sum() for batch in batches]
        if order == "together":
            losses = [torch.stack(losses).sum()]
        for loss in reversed(losses) if order == "last_first" else losses:
            loss.backward()
    for batch, wanted in zip(batches, inputs[group.rank], strict=True):
        assert batch.x.shape[0] == 0 or relative_error(batch.x.grad, wanted) <= SAME
    check_gradients(model, expected, group.rank)


class Same(torch.autograd.Function):
    """A Function that returns its input, and makes a node also under no_grad, as kernels do."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def in_halves(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(Same.apply(half)) for half in x.chunk(2)])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("forward", [nn.Module.__call__, in_halves], ids=["whole", "in_halves"])
def test_one_checkpoint_repeats_several_layers_and_calls(
    forward: Callable[[nn.Module, Tensor], Tensor], reentrant: bool, group: EPGroup
) -> None:
    expected, _ = expected_gradients(2)
    model, batches = Model(Plain(), group), batches_of(group.rank)[:2]
    others = micro_batch(group.rank, 9, 3)
    routes = torch.cat([others.routes, *(batch.routes for batch in batches)])
    with replay_routes(model, routes):
        with torch.no_grad():
            model(others.x)
        call = partial(forward, model)
        outs = [checkpoint(call, batch.x, use_reentrant=reentrant) for batch in batches]
        for y in outs if reentrant else reversed(outs):
            y.square().sum().backward()
    check_gradients(model, expected, group.rank)
    # Backward runs after the context has ended, whatever nodes forward made before the layer.
    with replay_routes(model, batches[0].routes):
        y = checkpoint(call, batches[0].x, use_reentrant=reentrant)
    with pytest.raises(HandleError, match="whose context has ended"):
        y.sum().backward()


def test_wrapped_block_has_one_gate_and_inference_leaves_it_usable(group: EPGroup) -> None:
    model, batch = Model(Plain(), group), micro_batch(group.rank, 0, 4)
    model.layers[1] = checkpoint_wrapper(model.layers[1])  # type: ignore[index]
    assert len(named_gates(model)) == len(MOE_LAYERS)
    for mode in (torch.inference_mode(), nullcontext()):
        with mode, replay_routes(model, batch.routes):
            model(batch.x)
    with record_routes(model) as record:
        idle_step(model, backward=False)
    assert record.routes().shape == (0, NUM_LAYERS, TOP_K)


def test_two_pipeline_stages_take_their_layers_of_the_same_routes(group: EPGroup) -> None:
    expected, _ = expected_gradients()
    plain = Plain()
    stages = [Model(plain, group, repeats=False, indices=each) for each in ((0, 1), (2, 3))]
    batches = batches_of(group.rank)
    routes = torch.cat([batch.routes for batch in batches])
    with replay_routes(stages[0], routes), replay_routes(stages[1], routes):
        # One forward, one backward: the backward of a batch follows the forward of the next.
        sent: list[tuple[Tensor, Tensor, Tensor]] = []

        def backward() -> None:
            out, received, loss = sent.pop(0)
            loss.backward()
            out.backward(received.grad)

        for batch in batches:
            out = stages[0](batch.x)
            received = out.detach().requires_grad_()
            sent.append((out, received, stages[1](received).square().sum()))
            if len(sent) == 2:
                backward()
        backward()
    both = nn.ModuleDict({"layers": nn.ModuleDict()})
    for stage in stages:
        both["layers"].update(dict(stage.layers.items()))  # type: ignore[operator]
    check_gradients(both, expected, group.rank)


def test_recorded_routes_are_replayed_after_the_router_has_changed(group: EPGroup) -> None:
    model, batches = Model(Plain(), group, repeats=False), batches_of(group.rank)
    with record_routes(model) as record, watch_gates(model) as gates:
        torch.stack([model(batch.x).square().sum() for batch in batches]).sum().backward()
    calls = record.calls()
    assert [len(routes) for routes in calls] == [len(batch.x) for batch in batches]
    routes = record.routes()
    assert routes.dtype is torch.int16
    assert routes.shape == (sum(map(len, calls)), NUM_LAYERS, TOP_K)
    assert bool((routes[:, [0, 2]] == -1).all())
    recorded = [gate.topk_ids for gate in gates]
    with torch.no_grad():
        for index in MOE_LAYERS:
            model.layers[index].gate.weight.neg_()  # type: ignore[union-attr,operator]
    with replay_routes(model, routes), watch_gates(model) as gates:
        for batch in batches:
            model(batch.x)
    for gate, ids in zip(gates, recorded, strict=True):
        assert torch.equal(gate.topk_ids, ids)
        assert len(ids) == 0 or not torch.equal(gate.live_topk_ids, ids)


def test_experts_moved_and_copied_are_replayed_by_the_ids_of_the_model(group: EPGroup) -> None:
    expected, _ = expected_gradients()
    config = EPConfig(mode="normal", redundant_experts=2)
    model, batches = Model(Plain(), group, config), batches_of(group.rank)
    for index in MOE_LAYERS:
        experts = model.layers[index].experts  # type: ignore[union-attr]
        assert isinstance(experts, ExpertParallelExperts)
        experts.rebalance(any_placement(experts, seed=index))
    plain = Plain()
    with replay_routes(model, torch.cat([batch.routes for batch in batches])):
        for batch in batches:
            y, x = model(batch.x), batch.x.detach()
            if len(x):
                assert relative_error(y, plain(x, batch.routes)) <= SAME
            y.square().sum().backward()
    for name, parameter in model.named_parameters():
        if "gate.weight" in name:
            dist.all_reduce(parameter.grad)
            assert relative_error(parameter.grad, expected[name]) <= SAME


def test_disagreement_is_that_counted_by_hand_and_in_the_metrics(group: EPGroup) -> None:
    model, batch = Model(Plain(), group, repeats=False), micro_batch(group.rank, 0, 9)
    with replay_routes(model, batch.routes) as replay, watch_gates(model) as gates:
        model(batch.x).sum().backward()
    for gate, index in zip(gates, MOE_LAYERS, strict=True):
        rows = batch.routes[:, index].tolist()
        live = gate.live_topk_ids.tolist()
        given = [[e for e in row if e >= 0] for row in rows]
        differ = [sum(e not in own for e in row) for row, own in zip(given, live, strict=True)]
        counts = replay.disagreement()[index]
        assert counts.num_tokens == sum(map(bool, given))
        assert counts.num_tokens_that_differ == sum(map(bool, differ)) > 0
        assert counts.num_entries == sum(map(len, given))
        assert counts.num_entries_that_differ == sum(differ)
        assert counts.entry_share == sum(differ) / sum(map(len, given))
    name = "epcomm_replayed_tokens_that_differ_total"
    found = {m.labels["layer"]: m.value for m in metrics(model) if m.name == name}
    expected = {i: replay.disagreement()[i].num_tokens_that_differ for i in MOE_LAYERS}
    assert found == {f"layers.{index}": value for index, value in expected.items()}


@pytest.mark.parametrize("repeats", [None, False])
def test_rank_without_tokens_stays_in_step(repeats: bool | None, group: EPGroup) -> None:
    model, batch = Model(Plain(), group, repeats=repeats), micro_batch(0, 0, 5)
    plain = Plain()
    plain(batch.x, batch.routes).square().sum().backward()
    x = batch.x.detach().requires_grad_()
    if group.rank == 0:
        with replay_routes(model, batch.routes):
            model(x).square().sum().backward()
        assert relative_error(x.grad, batch.x.grad) <= SAME
    else:
        with replay_routes(model, batch.routes[:0]):
            one_token = None if repeats is None else partial(model, x[:1])
            idle_step(model, run_token=one_token)


def test_layer_takes_ids_from_its_caller(group: EPGroup) -> None:
    plain = Plain().layers[1]
    assert isinstance(plain, PlainMoE)
    x = torch.randn(2, 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 4, 2], [-1, 5, -1], [-1, -1, -1], [3, 2, 1]])
    y = plain(x.view(4, HIDDEN), ids)
    expected = torch.autograd.grad(y.square().sum(), [x, plain.gate.weight])
    moe = moe_of(plain, group, None)
    found = moe(x, topk_ids=ids.view(2, 2, TOP_K))
    assert relative_error(found.view(4, HIDDEN), y) <= SAME
    for each, wanted in zip(
        torch.autograd.grad(found.square().sum(), [x, plain.gate.weight]), expected, strict=True
    ):
        assert relative_error(each, wanted) <= SAME
    with pytest.raises(ShapeError, match=r"topk_ids is torch.int64 \[4, 2\], expected integers"):
        moe(x, topk_ids=ids[:, :2])
    with (
        pytest.raises(ConfigError, match="layer 0 is called with topk_ids"),
        replay_routes(moe, ids.unsqueeze(1)),
    ):
        moe(x, topk_ids=ids)
    wrong = partial(moe, x, topk_ids=ids if group.rank else ids + 4)
    raises_everywhere(group, wrong, "topk_ids out of range|topk_ids")
    moe(x)


def raises_everywhere(group: EPGroup, call: Callable[[], object], text: str) -> None:
    with pytest.raises(EPError, match=text):
        call()
    group.calls.agree({}, what="the group is usable")


def enter(model: nn.Module, routes: object) -> None:
    with replay_routes(model, routes):
        raise AssertionError("the context was entered")


BAD = {
    "another K": (lambda r: r[:, :, :2], "routes of layer 1: 2 experts a token, expected 3"),
    "layers": (lambda r: r[:, 1:], "routes has 3 layers, expected 4"),
    "out of range": (
        lambda r: r.clamp(min=NUM_EXPERTS),
        "routes of layer 1: ids from 6 to 6, expected -1 to 5",
    ),
    "twice": (lambda r: r.clamp(max=2, min=2), "routes of layer 1: an expert twice for a token"),
    "dtype": (lambda r: r.float(), r"routes is torch.float32 \[4, 4, 3\], expected int16"),
    "uint16": (lambda r: r.clamp(min=0).to(torch.uint16), "routes is torch.uint16 "),
    "device": (lambda r: r.to("meta"), "routes is on meta, expected cpu; call .to"),
    "no tensor": (lambda r: None, "routes is None, expected int16"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_routes_of_one_rank_are_refused_on_all(name: str, group: EPGroup) -> None:
    change, text = BAD[name]
    model, batch = Model(Plain(), group), micro_batch(group.rank, 0, 4)
    routes = change(batch.routes) if group.rank == 1 else batch.routes
    text = rf"replay_routes: {text}.*rank 1 of 2"
    raises_everywhere(group, partial(enter, model, routes), text)
    with replay_routes(model, batch.routes):
        model(batch.x)


def test_context_inside_another_one_is_refused(group: EPGroup) -> None:
    model, batch = Model(Plain(), group), micro_batch(group.rank, 0, 4)
    again = partial(enter, model, batch.routes)
    with replay_routes(model, batch.routes):
        raises_everywhere(group, again, "inside another replay_routes")
        model(batch.x)


def test_another_number_of_tokens_is_reported_on_all_ranks(group: EPGroup) -> None:
    model, batch = Model(Plain(), group), micro_batch(group.rank, 0, 4)
    routes = batch.routes[: 3 if group.rank else 4]
    text = "layer 1 is called with 4 tokens, but routes have 3 left of 3 .rank 1 of 2"
    with (
        pytest.raises(EPError, match=text if group.rank else "rank 1"),
        replay_routes(model, routes),
    ):
        model(batch.x)
    with (
        pytest.raises(ShapeError, match="routes have 4 tokens, but the calls of layer 1 took 3"),
        replay_routes(model, batch.routes),
    ):
        model(batch.x[:3])
    model(batch.x)


def test_backward_that_repeats_calls_of_another_context_is_refused(group: EPGroup) -> None:
    model, batch = Model(Plain(), group, repeats=False), micro_batch(group.rank, 0, 4)
    with replay_routes(model, batch.routes):
        loss = model(batch.x).sum()
    with pytest.raises(HandleError, match="repeats a call whose context has ended"):
        loss.backward()
    loss = model(batch.x).sum()
    with (
        pytest.raises(HandleError, match="repeats a call of layer 3 from before the context"),
        replay_routes(model, batch.routes),
    ):
        loss.backward()
    model(batch.x).sum().backward()

    def after_half_a_forward() -> None:
        with replay_routes(model, torch.cat([batch.routes, batch.routes])):
            model.layers[1](batch.x)  # type: ignore[operator]
            model(batch.x)

    with pytest.raises(HandleError, match="layer 1 is called again, but the previous"):
        after_half_a_forward()


def test_auxiliary_losses_may_take_live_or_replayed_routes(group: EPGroup) -> None:
    model, batch = Model(Plain(), group), micro_batch(group.rank, 0, 6)
    with watch_gates(model) as alone:
        model.layers[1](batch.x)  # type: ignore[operator]
    with watch_gates(model) as gates, replay_routes(model, batch.routes):
        model(batch.x)
    gate, index = gates[0], MOE_LAYERS[0]
    ranked = torch.softmax(gate.logits, dim=-1).argsort(dim=1, descending=True).tolist()
    rows = zip(batch.routes[:, index].tolist(), ranked, strict=True)
    assert gate.topk_ids.tolist() == [with_live(given, order) for given, order in rows]
    assert gate.live_topk_ids.tolist() == [order[:TOP_K] for order in ranked]
    assert len(alone) == 1
    assert torch.equal(alone[0].topk_ids, alone[0].live_topk_ids)


def test_blocks_without_an_index_of_their_own_are_refused_by_name(group: EPGroup) -> None:
    plain = Plain()
    moe = [moe_of(layer, group, None) for layer in plain.layers if isinstance(layer, PlainMoE)]
    model = nn.ModuleDict({"first": moe[0], "second": moe[1]})
    with pytest.raises(ConfigError, match="expected a separate index"), record_routes(model):
        pass
    for layers in ({"first": 1, "second": -1}, {"first": 1, "second": 2, "third": 3}):
        with (
            pytest.raises(ConfigError, match="expected a separate index for each of"),
            record_routes(model, layers=layers),
        ):
            pass
    with record_routes(model, layers={"first": 1, "second": 3}) as record:
        x = torch.randn(2, HIDDEN, dtype=torch.float64)
        moe[1](moe[0](x))
    assert record.routes().shape == (2, NUM_LAYERS, TOP_K)
    assert list(named_gates(model)) == ["first", "second"]
    with (
        pytest.raises(ConfigError, match="Linear has no MoE layer"),
        record_routes(plain.layers[0]),
    ):
        pass


# A single process returns the weights of the given experts.


def call_of(spec: RoutingSpec, logits: Tensor, bias: Tensor | None) -> GateCall:
    ids = torch.arange(spec.top_k).expand(len(logits), -1)
    live = TopKOutput(topk_ids=ids, topk_weights=torch.zeros(ids.shape, dtype=logits.dtype))
    return GateCall(
        logits=logits, live=live, chosen=live, routing=spec, correction_bias=bias, repeats=None
    )


@every_spec
def test_weights_of_given_experts_equal_the_oracle_and_have_gradients(spec: RoutingSpec) -> None:
    num_experts = 8
    logits = spread_logits(5, num_experts).double().requires_grad_()
    bias = bias_for(spec, num_experts)
    bias = None if bias is None else bias.double()
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(num_experts, generator=generator) for _ in logits])
    ids = ids[:, : spec.top_k]

    def weights(logits: Tensor) -> Tensor:
        return choose(call_of(spec, logits, bias), ids, has_live=False).chosen.topk_weights

    inner = [0.0] * num_experts
    if bias is not None and spec.correction_bias == "score":
        inner = bias.tolist()
    for row, chosen, found in zip(logits.tolist(), ids.tolist(), weights(logits), strict=True):
        adjusted = [cap(z, spec.softcap) + b for z, b in zip(row, inner, strict=True)]
        scores = score(adjusted, spec)
        wanted = weigh([scores[e] for e in chosen], spec)
        assert found.tolist() == pytest.approx(wanted, rel=SAME)
    assert torch.autograd.gradcheck(weights, (logits,))
