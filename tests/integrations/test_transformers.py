import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from epcomm import ConfigError, EPConfig, EPGroup, ExpertParallelMoE
from epcomm.blocks import chosen_by_router
from epcomm.integrations.transformers.reading import read_block
from epcomm.routing import RoutingSpec, route
from epcomm.sharding.shards import ExpertShard, cut_share, is_expert_tensor
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error
from epcomm.training.checkpoints import gather_state_dict, load_full_state_dict
from tests.cases.blocks import BLOCKS, HIDDEN, MODEL_SIZES, NUM_EXPERTS, VARIANTS, seeded

pytestmark = pytest.mark.ranks(2)
# Tokens of each rank: uneven, and one has none.
NUM_TOKENS = (5, 0)

every_variant = pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)


def tokens(rank: int, device: torch.device) -> Tensor:
    """Make the tokens of a rank, [1, T, H]."""
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(1, NUM_TOKENS[rank], HIDDEN, generator=generator)
    return x.to(device).requires_grad_()


def run(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Run a block on x [1, T, H]; return y with tokens first, and scores if there are any."""
    result = module(x)
    y, *scores = result if isinstance(result, tuple) else (result,)
    assert y.shape == x.shape
    return [y[0], *scores]


def run_one_process(block: nn.Module, inputs: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return the outputs of each rank from one batch; a block without tokens has no graph."""
    outputs = run(block, torch.cat(inputs, dim=1))
    counts = [x.shape[1] for x in inputs]
    return list(zip(*(output.split(counts) for output in outputs), strict=True))


def backward(*outputs: Tensor) -> None:
    torch.stack([output.square().sum() for output in outputs]).sum().backward()


def shard(group: EPGroup) -> ExpertShard:
    num_local = NUM_EXPERTS // group.world_size
    return ExpertShard(
        first_expert=group.rank * num_local, num_local_experts=num_local, num_experts=NUM_EXPERTS
    )


def check(pairs: Mapping[str, tuple[Tensor | None, Tensor | None]]) -> None:
    errors = {}
    for name, (actual, expected) in pairs.items():
        assert (actual is None) == (expected is None), name
        if actual is not None and expected is not None:
            errors[name] = relative_error(actual, expected)
    assert max(errors.values()) <= FP32_TOLERANCE, errors


def check_outputs(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    pairs = enumerate(zip(actual, expected, strict=True))
    check({f"output {place}": pair for place, pair in pairs})


def summed_gradient(parameter: Tensor) -> Tensor | None:
    """Sum a gradient over ranks for replicated parameters, whose loss is of each rank's tokens."""
    if is_expert_tensor(parameter) or parameter.grad is None:
        return parameter.grad
    total = parameter.grad.clone()
    dist.all_reduce(total)
    return total


def parameter_gradients(
    moe: nn.Module, block: nn.Module, group: EPGroup
) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Return gradients of a layer over ranks with the gradients expected here. Collective."""
    theirs, pairs = dict(block.named_parameters()), {}
    for name, parameter in moe.named_parameters():
        wanted = theirs.pop(name).grad
        if is_expert_tensor(parameter) and wanted is not None:
            wanted = cut_share(wanted, shard(group))
        pairs[name] = (summed_gradient(parameter), wanted)
    assert not theirs, "a parameter got lost"
    return pairs


@every_variant
def test_block_gradients_and_state_equal_those_of_one_process(
    make: Callable[[], nn.Module], group: EPGroup
) -> None:
    block = make().to(group.device)
    config = EPConfig(mode="normal")
    moe = ExpertParallelMoE.from_transformers(make().to(group.device), group, config)
    inputs = [tokens(each, group.device) for each in range(group.world_size)]
    expected = run_one_process(block, inputs)
    backward(*(output for outputs in expected for output in outputs))

    x = tokens(group.rank, group.device)
    outputs = run(moe, x)
    backward(*outputs)

    check_outputs(outputs, expected[group.rank])
    dx = (x.grad, inputs[group.rank].grad)
    check({"dx": dx, **parameter_gradients(moe, block, group)})
    check_state(moe, block, group)


def check_state(moe: nn.Module, block: nn.Module, group: EPGroup) -> None:
    gathered, source = gather_state_dict(moe, group), block.state_dict()
    assert set(gathered) == set(source)
    for name, tensor in source.items():
        assert torch.equal(gathered[name], tensor), name
    trained = {name: one.requires_grad for name, one in block.named_parameters()}
    assert {name: one.requires_grad for name, one in moe.named_parameters()} == trained


# Shared experts and routed scaling, a pair of outputs, and a latent space around the experts.
@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "nemotron_h"])
def test_low_latency_output_equals_that_of_one_process(kind: str, group: EPGroup) -> None:
    make = BLOCKS[kind]
    with torch.no_grad():
        block = make().to(group.device)
        config = EPConfig(mode="low_latency", max_tokens_per_rank=max(NUM_TOKENS))
        moe = ExpertParallelMoE.from_transformers(make().to(group.device), group, config)
        inputs = [tokens(rank, group.device) for rank in range(group.world_size)]
        expected = run_one_process(block, inputs)
        # Run two batches, because the second must not depend on the first.
        for _ in range(2):
            check_outputs(run(moe, inputs[group.rank]), expected[group.rank])


MODEL = {**MODEL_SIZES, "num_hidden_layers": 2}
# The layers of one model unpack a tuple, and the router of the other needs a batch dimension.
MODELS = {
    "GptOss": {**MODEL, "num_local_experts": NUM_EXPERTS},
    "Afmoe": {
        **MODEL,
        "num_experts": NUM_EXPERTS,
        "moe_intermediate_size": 8,
        "num_dense_layers": 1,
    },
}


def make_model(name: str) -> nn.Module:
    library = import_module("transformers")
    config = getattr(library, f"{name}Config")(**MODELS[name])
    return seeded(getattr(library, f"{name}ForCausalLM")(config)).eval()


@pytest.mark.parametrize("name", MODELS)
def test_model_goes_on_working_and_recording_router_logits(name: str, group: EPGroup) -> None:
    with torch.no_grad():
        model, spread = (make_model(name).to(group.device) for _ in range(2))
        for layer in spread.get_submodule("model.layers").children():
            block = layer.get_submodule("mlp")
            if hasattr(block, "experts"):
                layer.add_module("mlp", ExpertParallelMoE.from_transformers(block, group))
        generator = torch.Generator().manual_seed(group.rank)
        ids = torch.randint(1, 32, (2, 3 + group.rank), generator=generator).to(group.device)
        actual, expected = (
            one(input_ids=ids, output_router_logits=True) for one in (spread, model)
        )
        assert relative_error(actual.logits, expected.logits) <= FP32_TOLERANCE
        pairs = zip(actual.router_logits, expected.router_logits, strict=True)
        assert max(relative_error(*pair) for pair in pairs) <= FP32_TOLERANCE


def add_child(block: nn.Module) -> None:
    block.add_module("norm", nn.LayerNorm(HIDDEN))


def add_identity_expert(block: nn.Module) -> None:
    block.get_submodule("experts").add_module("identity_expert", nn.Identity())


def with_other_code(module: nn.Module) -> None:
    """Return a block that uses the same parts under the same names in a different computation."""
    kind = type(module)

    class Doubled(kind):
        def forward(self, *args: Tensor) -> Tensor:
            return 2 * super().forward(*args)

    module.__class__ = Doubled
    Doubled.forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]


def with_detached_tokens(block: nn.Module) -> None:
    """Return a block with the same outputs and different gradients."""

    class Detached(type(block)):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states.detach())

    block.__class__ = Detached


Change = Callable[[nn.Module], object]
# Blocks that epcomm would compute differently: the kind, arguments of its configuration or a change
# of the block, and the message.
REFUSALS: list[tuple[str, Mapping[str, object] | Change, str]] = [
    (
        "qwen2_moe",
        {"hidden_act": "gelu"},
        "act_fn of Qwen2MoeExperts is GELUActivation, expected SiLUActivation",
    ),
    (
        "minimax_m2",
        {"router_jitter_noise": 0.1},
        "router jitter of MiniMaxM2SparseMoeBlock is 0.1, expected 0",
    ),
    (
        "deepseek_v2",
        {"topk_method": "noaux_tc"},
        "DeepseekV2Moe cannot be run on a few random tokens: UnboundLocalError",
    ),
    ("qwen3_moe", add_child, "Qwen3MoeSparseMoeBlock has norm, an unknown part"),
    (
        "mixtral",
        add_identity_expert,
        "MixtralExperts has identity_expert, .* known parts; keep the model's own block",
    ),
    (
        "qwen3_moe",
        lambda block: setattr(block, "gain", 2.0),
        "gain of Qwen3MoeSparseMoeBlock is 2.0, an unknown attribute",
    ),
    (
        "mixtral",
        lambda block: setattr(block, "experts", None),
        "MixtralSparseMoeBlock has no experts",
    ),
    # Facts that names do not show.
    (
        "qwen2_moe",
        with_other_code,
        "Doubled computes something else than its parts say .*: output 0 differs by 0.",
    ),
    (
        "qwen3_moe",
        lambda block: with_other_code(block.get_submodule("experts")),
        "experts of Qwen3MoeSparseMoeBlock compute something else .*: y differs",
    ),
    (
        "qwen3_moe",
        with_detached_tokens,
        "Detached computes something else .*: the gradient of x differs",
    ),
    (
        "deepseek_v3",
        lambda block: block.add_module("shared_experts", None),
        "DeepseekV3MoE cannot be run on a few random tokens: .*not callable",
    ),
]


@pytest.mark.parametrize(("kind", "change", "message"), REFUSALS)
def test_block_that_computes_something_else_is_refused(
    kind: str, change: Mapping[str, object] | Change, message: str, group: EPGroup
) -> None:
    if callable(change):
        block = BLOCKS[kind]()
        change(block)
    else:
        block = BLOCKS[kind](**change)
    with pytest.raises(ConfigError, match=message):
        ExpertParallelMoE.from_transformers(block, group)


def test_refusal_of_one_rank_reaches_the_others(group: EPGroup) -> None:
    block = BLOCKS["mixtral"](router_jitter_noise=0.1 if group.rank else 0.0)
    with pytest.raises(ConfigError, match="router jitter of Mixtral"):
        ExpertParallelMoE.from_transformers(block, group)
    ExpertParallelMoE.from_transformers(BLOCKS["mixtral"](), group)


class CubedRouter(nn.Module):
    """A router with weights that no RoutingSpec describes, under an unknown attribute."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.weight = gate.get_parameter("weight")
        self.power = 3

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(tokens, self.weight)
        weights, ids = logits.softmax(-1).topk(2)
        return logits, weights**self.power, ids


def test_router_that_no_preset_describes_goes_on_choosing(group: EPGroup) -> None:
    def make() -> nn.Module:
        block = BLOCKS["qwen3_moe"]()
        block.add_module("gate", CubedRouter(block.get_submodule("gate")))
        return block.to(group.device)

    with torch.no_grad():
        moe = ExpertParallelMoE.from_transformers(make(), group)
        assert moe.routing.custom_function is chosen_by_router
        assert "routing by the block's own router" in moe.explain()
        inputs = [tokens(rank, group.device) for rank in range(group.world_size)]
        expected = run_one_process(make(), inputs)
        check_outputs(run(moe, inputs[group.rank]), expected[group.rank])


def test_choice_of_a_router_cannot_be_told_from_logits() -> None:
    spec = RoutingSpec(top_k=2, custom_function=chosen_by_router)
    with pytest.raises(ConfigError, match="chosen_by_router: called with logits"):
        route(torch.zeros(1, 4), spec)


def test_reading_changes_neither_the_block_nor_the_state_of_random_numbers() -> None:
    block = BLOCKS["deepseek_v3"]()
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    state = torch.get_rng_state()
    with torch.no_grad(), torch.device("meta"):
        read_block(block)
    assert torch.equal(torch.get_rng_state(), state)
    assert block.training
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_block_built_on_meta_is_filled_tensor_by_tensor_and_trains(group: EPGroup) -> None:
    whole = BLOCKS["deepseek_v3"]()
    with torch.device("meta"):
        block = BLOCKS["deepseek_v3"]()
    moe = ExpertParallelMoE.from_transformers(block, group)
    assert all(tensor.is_meta for tensor in moe.state_dict().values())
    experts = moe.experts.weights.tensors().values()
    assert {each.shape[0] for each in experts} == {NUM_EXPERTS // group.world_size}
    assert moe.routing == read_block(BLOCKS["deepseek_v3"]())[-1]
    moe.to_empty(device=group.device)
    with torch.no_grad():
        for tensor in [*moe.parameters(), *moe.buffers()]:
            tensor.fill_(torch.nan)
    for name, tensor in whole.state_dict().items():
        load_full_state_dict(moe, {name: tensor}, strict=False)
    inputs = [tokens(rank, group.device) for rank in range(group.world_size)]
    expected = run_one_process(whole.to(group.device), inputs)
    actual = run(moe, inputs[group.rank])
    check_outputs(actual, expected[group.rank])
    backward(*(output for outputs in expected for output in outputs))
    backward(*actual)
    check(parameter_gradients(moe, whole, group))
