from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epcomm import (
    BackendUnavailable,
    EPConfig,
    EPGroup,
    ExpertWeights,
    Int8ChannelWeights,
    MoESpec,
    StandardDispatcher,
    TopKOutput,
    WireDtype,
    plan,
)
from epcomm.platforms.machine import this_machine
from epcomm.quantization import dequantize
from epcomm.registry import buffer_class, runner_class
from epcomm.spec import Availability
from epcomm.testing.data import BatchSpec, make_weights, random_ids
from fakes.deep_ep import install

pytestmark = pytest.mark.usefixtures("npu_operators")

NAME = "AscendStandardBuffer"
OPERATORS = (
    *("npu_moe_init_routing_v2", "npu_moe_finalize_routing", "npu_grouped_matmul"),
    *("npu_swiglu", "npu_dequant_swiglu_quant"),
)
LAYER = MoESpec(hidden_size=1024, num_experts=8, top_k=2)
CONFIG = EPConfig(mode="standard", backend="ascend")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the operators that were called, none of them with an empty tensor."""
    seen: list[str] = []

    def noting(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Tensor | list[Tensor], **options: object) -> object:
            seen.append(name)
            first = args[0] if isinstance(args[0], Tensor) else args[0][0]
            assert first.numel(), f"{name} of an empty tensor"
            return original(*args, **options)

        return call

    for name in OPERATORS:
        monkeypatch.setattr(torch.ops.npu, name, noting(name, getattr(torch.ops.npu, name)))
    return seen


def topk_of(ids: list[list[int]]) -> TopKOutput:
    topk_ids = torch.tensor(ids, dtype=torch.int64).view(-1, LAYER.top_k)
    return TopKOutput(topk_ids=topk_ids, topk_weights=torch.full(topk_ids.shape, 0.5))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (replace(LAYER, dtype=torch.float16), "multiplies bf16 and fp32 rows by weights, not fp16"),
        (replace(LAYER, num_experts=10240), "10240 experts, at most 10239"),
    ],
    ids=["float16", "experts"],
)
def test_plan_names_what_the_operators_do_not_take(layer: MoESpec, reason: str) -> None:
    with install("ascend"):
        chosen = plan(CONFIG, replace(LAYER, num_experts=10238, dtype=torch.float32), world_size=2)
        assert chosen.prefill.buffer == NAME
        with pytest.raises(BackendUnavailable, match=reason):
            plan(CONFIG, layer, world_size=2)


def test_operators_for_cpu_tensors_count_beside_the_stand_in_of_ascend_alone() -> None:
    adapter = buffer_class(NAME)
    missing = "npu_moe_init_routing_v2, npu_moe_finalize_routing not on npu; import torch_npu"
    for kind in (None, "v1", "v2"):
        if kind is None:
            verdict = adapter.probe(this_machine())
        else:
            with install(kind):
                verdict = adapter.probe(this_machine())
        assert not verdict.ok
        assert missing in verdict.reasons[0]
    with install("ascend"):
        assert adapter.probe(this_machine()).ok


@pytest.mark.ranks(1, 2)
def test_a_group_of_processors_is_not_served_by_a_device(
    monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    """Imitate a process that has imported torch_npu and made its group over gloo."""
    monkeypatch.setattr(
        buffer_class(NAME), "probe", classmethod(lambda cls, machine: Availability(ok=True))
    )
    with pytest.raises(BackendUnavailable, match="serves groups on npu, and this one is on cpu"):
        plan(CONFIG, LAYER, group)
    chosen = plan(EPConfig(mode="standard"), LAYER, group)
    assert chosen.prefill.backend == "collective"


def half_of(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows], 1)[:, : rows.shape[1]]


def of_inference(rows: Tensor) -> Tensor:
    """Return an argument that nothing may write to afterwards."""
    with torch.inference_mode():
        return rows.clone()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("wire", [None, WireDtype.INT8])
def test_results_are_read_and_stay_as_they_are(wire: WireDtype | None, calls: list[str]) -> None:
    """Use identity experts, two batches in flight, and ranks with fewer tokens."""
    with install("ascend"), EPGroup() as group, torch.no_grad():
        dispatcher = StandardDispatcher(group, LAYER, replace(CONFIG, dispatch_dtype=wire))
        topk = topk_of([[0, 7], [5, -1], [-1, -1], [3, 4]][: 4 - group.rank])
        sums = torch.tensor([1.0, 0.5, 0.0, 1.0])[: 4 - group.rank, None]
        x = torch.ones(4 - group.rank, LAYER.hidden_size, dtype=torch.bfloat16)
        for make in (half_of, of_inference, Tensor.clone):
            outs = [dispatcher.dispatch(scale * x, topk) for scale in (1.0, 3.0)]
            for out, scale in ((outs[1], 3.0), (outs[0], 1.0)):
                results = make(dequantize(out.hidden_states, torch.bfloat16))
                before = results.clone()
                y = dispatcher.combine(out.combine_input(results))
                assert torch.equal(y, (scale * sums * x).to(torch.bfloat16))
                assert torch.equal(results.view(torch.int16), before.view(torch.int16))
    assert set(calls) == set(OPERATORS[:2])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("is_int8", [False, True])
def test_no_operator_sees_an_empty_tensor(is_int8: bool, calls: list[str]) -> None:
    """Send no tokens, tokens without experts, and tokens for only one rank."""
    spec = BatchSpec(
        hidden_size=LAYER.hidden_size,
        num_local_experts=4,
        dtype=torch.bfloat16,
        tokens_of_rank=lambda rank, world_size: 0,
        choose_ids=random_ids,
    )
    runner = runner_class("ascend")()
    with install("ascend"), EPGroup() as group, torch.no_grad():
        layer = replace(LAYER, num_experts=4 * group.world_size)
        plain = make_weights(spec, group.world_size, intermediate_size=64)
        weights: ExpertWeights | Int8ChannelWeights = plain
        if is_int8:
            weights = Int8ChannelWeights.from_unquantized(plain)
        weights = weights.with_tensors(
            {n: t.chunk(group.world_size)[group.rank] for n, t in weights.tensors().items()}
        )
        wire = WireDtype.INT8 if is_int8 else None
        dispatcher = StandardDispatcher(group, layer, replace(CONFIG, dispatch_dtype=wire))
        for ids in ([], [[-1, -1]], [[1, 2]] if group.rank == 0 else []):
            topk = topk_of(ids)
            x = torch.ones(len(ids), layer.hidden_size, dtype=torch.bfloat16)
            y = dispatcher.combine(runner.run(dispatcher.dispatch(x, topk), weights))
            assert y.shape == x.shape
            assert bool(y.any()) == (ids == [[1, 2]])
