"""Whole models that transformers loads with epcomm: loss and all gradients equal to one process.

Batches of two ranks need 4 ranks; other tests have 2, each of which loads the model again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from epcomm import ConfigError, EPConfig, EPGroup, HandleError, decode_phase, idle_step
from epcomm.integrations.telemetry import metrics
from epcomm.integrations.transformers import ExpertParallelRegistration, register_expert_parallel
from epcomm.placement.recorder import LoadRecorder
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error
from epcomm.training.gradients import clip_grad_norm

NUM_RANKS, NUM_BATCHES, NUM_TOKENS, VOCABULARY = 2, 4, 9, 64
pytestmark = pytest.mark.ranks(NUM_RANKS)
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """A family: the names of its folder and classes, and changes of the tiny configuration."""

    folder: str
    prefix: str
    changes: Mapping[str, object] = field(default_factory=dict)

    def config(self) -> object:
        module = import_module(f"transformers.models.{self.folder}.configuration_{self.folder}")
        return getattr(module, f"{self.prefix}Config")(**{**TINY, **self.changes})

    def model_class(self) -> type[nn.Module]:
        module = import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")
        return getattr(module, f"{self.prefix}ForCausalLM")


KINDS = {
    "mixtral": ModelKind(folder="mixtral", prefix="Mixtral", changes={"num_local_experts": 8}),
    "qwen3_moe": ModelKind(
        folder="qwen3_moe",
        prefix="Qwen3Moe",
        changes={"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "deepseek_v3": ModelKind(
        folder="deepseek_v3",
        prefix="DeepseekV3",
        changes={
            "n_routed_experts": 8,
            "moe_intermediate_size": 16,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": ModelKind(folder="gpt_oss", prefix="GptOss", changes={"num_local_experts": 8}),
}
# In one_batch auto is standard with replicated tokens; normal shares the batch in slices.
CASES = [
    ("qwen3_moe", "own_batches", "auto"),
    ("mixtral", "one_batch", "auto"),
    ("deepseek_v3", "own_batches", "auto"),
    ("qwen3_moe", "one_batch", "normal"),
    ("qwen3_moe", "own_batches", "standard"),
    pytest.param("deepseek_v3", "one_batch", "auto", marks=pytest.mark.slow),
    pytest.param("gpt_oss", "own_batches", "auto", marks=pytest.mark.slow),
]


def sizes(layout: str) -> dict[str, int]:
    world_size = dist.get_world_size()
    ranks_of_batch = {"own_batches": 1, "one_batch": world_size, "batch_of_two_ranks": 2}[layout]
    found = {"tp_size": ranks_of_batch, "fsdp_size": world_size // ranks_of_batch}
    return {name: size for name, size in found.items() if size > 1} | {"ep_size": world_size}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder for all ranks, that of rank 0."""
    names = [str(tmp_path_factory.mktemp("models"))]
    dist.broadcast_object_list(names, src=0)
    return Path(names[0])


def saved(kind: str, folder: Path) -> Path:
    """Write a checkpoint with seeded weights; rank 0 writes it once."""
    path = folder / kind
    if dist.get_rank() == 0 and not path.exists():
        torch.manual_seed(0)
        model = KINDS[kind].model_class()(KINDS[kind].config())
        model.save_pretrained(path)  # type: ignore[operator]
    dist.barrier()
    return path


@contextmanager
def registered(config: EPConfig | None = None) -> Iterator[ExpertParallelRegistration]:
    registration = register_expert_parallel(config)
    try:
        yield registration
    finally:
        registration.close()


def load(path: Path, layout: str, implementation: str = "epcomm") -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    parallel = DistributedConfig.from_dict({**sizes(layout), "ep_implementation": implementation})
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, distributed_config=parallel
    )


def load_alone(kind: str, path: Path) -> nn.Module:
    return KINDS[kind].model_class().from_pretrained(path, dtype=torch.float32)  # type: ignore[attr-defined]


def batches(layout: str) -> tuple[Tensor, ...]:
    """All token ids [4, T], one part for each group of ranks that shares a batch."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (NUM_BATCHES, NUM_TOKENS), generator=generator)
    return ids.chunk(sizes(layout).get("fsdp_size", 1))


def train(model: nn.Module, ids: Tensor) -> Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return whole gradients by name, gathering sharded ones. Collective."""
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            gradients[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad  # type: ignore[operator]
    return gradients


def check_gradients(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert max(errors.values()) <= FP32_TOLERANCE, errors


@pytest.mark.parametrize(("kind", "layout", "mode"), CASES)
def test_model_trains_like_one_process(kind: str, layout: str, mode: str, folder: Path) -> None:
    check_training(kind, layout, mode, folder)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_loaded_model_of_four_ranks_trains_like_one_process_and_like_all_to_all(
    kind: str, folder: Path
) -> None:
    layout = "batch_of_two_ranks"
    gradients = check_training(kind, layout, "auto", folder)
    theirs = load(saved(kind, folder), layout, "all_to_all")
    train(theirs, batches(layout)[dist.get_rank() // 2])
    check_gradients(gradients, whole_gradients(theirs))


def check_training(kind: str, layout: str, mode: str, folder: Path) -> dict[str, Tensor]:
    """Compare the loss and all gradients with one process; return the gradients."""
    path, parts, world_size = saved(kind, folder), batches(layout), dist.get_world_size()
    part = dist.get_rank() * len(parts) // world_size
    alone = load_alone(kind, path)
    # FSDP takes the mean over batches.
    losses = [train(alone, ids) / len(parts) for ids in parts]
    expected = {n: p.grad / len(parts) for n, p in alone.named_parameters() if p.grad is not None}
    with registered(EPConfig(mode=mode)) as registration:
        model = load(path, layout)
        loss = train(model, parts[part])
        plan = registration.explain()
    assert relative_error(loss, losses[part] * len(parts)) <= FP32_TOLERANCE
    gradients = whole_gradients(model)
    check_gradients(gradients, expected)
    buffer = "AllGatherBuffer" if mode == "standard" else "SharedMemoryBuffer"
    buffer = "ReplicatedBuffer" if (layout, mode) == ("one_batch", "auto") else buffer
    assert f"({buffer}), {world_size} ranks with {8 // world_size} experts each" in plan
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["own_batches", "one_batch"])
def test_compiled_model_trains_like_an_eager_one(layout: str, num_ranks: int, folder: Path) -> None:
    """Each rank compiles by itself, which takes it seconds; the eager model is tested on more."""
    path, parts = saved("qwen3_moe", folder), batches(layout)
    ids = parts[dist.get_rank() * len(parts) // num_ranks]
    with registered():
        eager, model = load(path, layout), load(path, layout)
        expected = train(eager, ids)
        torch._dynamo.reset()
        loss = train(torch.compile(model, backend="eager"), ids)
        assert relative_error(loss, expected) <= FP32_TOLERANCE
        check_gradients(whole_gradients(model), whole_gradients(eager))


@pytest.mark.parametrize("layout", ["own_batches", "one_batch"])
def test_clip_takes_the_norm_of_a_loaded_model(layout: str, folder: Path) -> None:
    path, parts = saved("qwen3_moe", folder), batches(layout)
    with registered():
        model = load(path, layout)
        train(model, parts[dist.get_rank() * len(parts) // NUM_RANKS])
        before = {name: grad.clone() for name, grad in whole_gradients(model).items()}
        wanted = torch.stack([gradient.norm() for gradient in before.values()]).norm()
        norm = clip_grad_norm(model, None, float(wanted) / 2)
        assert relative_error(norm, wanted) <= FP32_TOLERANCE
        check_gradients(whole_gradients(model), {n: g / 2 for n, g in before.items()})


def test_rank_without_data_takes_part_in_training_by_an_idle_step(folder: Path) -> None:
    path, parts = saved("qwen3_moe", folder), batches("own_batches")
    busy = [0]
    alone = load_alone("qwen3_moe", path)
    alone.config.output_router_logits = True  # type: ignore[union-attr]
    for rank in busy:
        train(alone, parts[rank])
    expected = {n: p.grad / NUM_RANKS for n, p in alone.named_parameters() if p.grad is not None}
    with registered():
        model = load(path, "own_batches")
        # The loss of the router comes first in what the model returns, and passes by the experts.
        model.config.output_router_logits = True  # type: ignore[union-attr]
        if dist.get_rank() in busy:
            train(model, parts[dist.get_rank()])
        else:
            idle_step(model)
        check_gradients(whole_gradients(model), expected)
        # The tokens of the batch and one of the idle step, each computed by two experts somewhere.
        names = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        found = [one for one in metrics(model) if one.name == "epcomm_expert_tokens_total"]
        for name in names:
            computed = torch.tensor(sum(m.value for m in found if m.labels["layer"] == name))
            dist.all_reduce(computed)
            assert computed.item() == 2 * (parts[0].numel() + 1)
        with torch.no_grad():
            if dist.get_rank() in busy:
                model(input_ids=parts[dist.get_rank()])
            else:
                one_token = torch.zeros(1, 1, dtype=torch.int64)
                idle_step(model, run_token=lambda: model(input_ids=one_token))


def test_loaded_model_decodes_in_low_latency(folder: Path) -> None:
    path, parts = saved("qwen3_moe", folder), batches("own_batches")
    ids = parts[dist.get_rank()]
    alone = load_alone("qwen3_moe", path).eval()
    with registered(EPConfig(max_tokens_per_rank=ids.numel())) as registration, torch.no_grad():
        model = load(path, "own_batches").eval()
        with decode_phase(model):
            logits = model(input_ids=ids).logits
        registration.check()
        assert relative_error(logits, alone(input_ids=ids).logits) <= FP32_TOLERANCE
        assert "mode low_latency on backend" in registration.explain()


def test_uncounted_load_unlimited_decoding_and_calls_after_close_are_refused(folder: Path) -> None:
    path, ids = saved("qwen3_moe", folder), batches("own_batches")[0]
    with registered() as registration, torch.no_grad():
        model, unused = (load(path, "own_batches").eval() for _ in range(2))
        with pytest.raises(ConfigError, match="record_load is False"):
            registration.load_tables(model)
        with decode_phase(model), pytest.raises(ConfigError, match=r"set EPConfig\.max_tokens_per"):
            model(input_ids=ids)
        registration.close()
        for each, text in ((model, "EPGroup is closed"), (unused, "registration is closed")):
            with pytest.raises(HandleError, match=text):
                each(input_ids=ids)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "mode"), [("one_batch", "normal"), ("one_batch", "auto")])
def test_tokens_that_chose_an_expert_are_counted(layout: str, mode: str, folder: Path) -> None:
    path, parts = saved("qwen3_moe", folder), batches(layout)
    alone = load_alone("qwen3_moe", path)
    ids = torch.cat(parts)
    logits = alone(input_ids=ids, output_router_logits=True).router_logits
    expected = [each.topk(2).indices.flatten().bincount(minlength=8).tolist() for each in logits]
    with registered(EPConfig(mode=mode, record_load=True)) as registration:
        model = load(path, layout)
        recorder = LoadRecorder(registration.load_tables(model))
        train(model, parts[dist.get_rank() * len(parts) // NUM_RANKS])
        recorder.end_window()
        with EPGroup() as group:
            load_ = recorder.gather(group.calls)
        assert list(load_.windows_by_layer) == [f"model.layers.{n}.mlp.experts" for n in range(2)]
        # Replicated tokens are counted on each rank.
        times = NUM_RANKS if (layout, mode) == ("one_batch", "auto") else 1
        expected = [[times * count for count in counts] for counts in expected]
        assert [list(windows[0]) for windows in load_.windows_by_layer.values()] == expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (EPConfig(router="reference"), "router is reference, expected auto, because"),
        (EPConfig(router="ascend"), "router is ascend, expected auto, because"),
        (EPConfig(redundant_experts=4), "redundant_experts is 4, expected None, because transf"),
        (EPConfig(sum_groups=8), "sum_groups is 8, expected None, because the bits of the model's"),
    ],
)
def test_what_the_models_own_parts_cannot_do_is_refused(config: EPConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        register_expert_parallel(config)
