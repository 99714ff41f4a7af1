from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, Int8ChannelWeights, WireDtype
from epcomm.fuseep.path import FuseEPPath
from epcomm.registry import class_names, fused_class
from fakes.ascend.deep_ep import Buffer
from tests.cases.fuseep_layers import OPERATORS, K, M, batch, experts, make_layer

pytestmark = pytest.mark.usefixtures("small_a3")


def load(layer: ExpertParallelExperts, new: dict[str, torch.Tensor]) -> None:
    """Load the experts of this rank in the form of its state_dict()."""
    layer.load_state_dict({name: layer.as_expert_tensor(tensor) for name, tensor in new.items()})


@torch.no_grad()
def copy(layer: ExpertParallelExperts, new: dict[str, torch.Tensor]) -> None:
    for name, tensor in new.items():
        layer.get_parameter(name).copy_(tensor)


@torch.inference_mode()
def copy_in_inference_mode(layer: ExpertParallelExperts, new: dict[str, torch.Tensor]) -> None:
    for name, tensor in new.items():
        layer.get_parameter(name).copy_(tensor)


def replace_data(layer: ExpertParallelExperts, new: dict[str, torch.Tensor]) -> None:
    for name, tensor in new.items():
        layer.get_parameter(name).data = tensor.clone()


def replace_one(layer: ExpertParallelExperts, new: dict[str, torch.Tensor]) -> None:
    """Load other parameters in place, and this one in new memory."""
    replace_data(layer, {"gate_up_scale": new["gate_up_scale"]})
    copy(layer, {name: new[name] for name in new if name != "gate_up_scale"})


def write_data(layer: ExpertParallelExperts, new: dict[str, torch.Tensor]) -> None:
    """Write through `.data`, which no version counter records."""
    for name, tensor in new.items():
        layer.get_parameter(name).data.copy_(tensor)
    assert isinstance(layer.path, FuseEPPath)
    layer.path.repack()


WRITES = (load, copy, copy_in_inference_mode, replace_data, replace_one, write_data)


def count_packs(patch: pytest.MonkeyPatch, operator: str) -> list[Int8ChannelWeights]:
    kind: Any = fused_class(class_names(operator)[0])
    real, packed = kind.pack, []

    def recorded(weights: Int8ChannelWeights) -> object:
        packed.append(weights)
        return real(weights)

    patch.setattr(kind, "pack", staticmethod(recorded))
    return packed


@pytest.mark.ranks(2)
@pytest.mark.parametrize("operator", OPERATORS)
def test_written_experts_are_packed_anew_once(
    operator: str, monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    packed = count_packs(monkeypatch, operator)
    layer, (x, topk) = make_layer(group, operator), batch(group.rank)
    before = layer(x, topk)
    for seed, write in enumerate(WRITES, start=1):
        new = experts(seed)
        expected = make_layer(group, operator, new)(x, topk)
        packed.clear()
        mine = {n: t.chunk(group.world_size)[group.rank] for n, t in new.tensors().items()}
        write(layer, mine)
        y = layer(x, topk)
        assert torch.equal(y, expected)
        assert not torch.equal(y, before)
        assert torch.equal(layer(x, topk), y)
        assert len(packed) == 1
        # state_dict() stays bit-equal to the checkpoint.
        saved = layer.state_dict()
        assert list(saved) == list(mine)
        for name, tensor in mine.items():
            assert saved[name].dtype is tensor.dtype
            assert torch.equal(saved[name].to_local(), tensor)
        before = y
    layer.check()


@pytest.mark.ranks(2)
def test_layers_share_an_operator_and_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of equal sizes share an operator; layers of one group do not affect each other."""
    opened: list[Buffer] = []
    real = Buffer.__init__

    @wraps(real)
    def recorded(buffer: Buffer, *arguments: Any, **named: Any) -> None:  # noqa: ANN401
        opened.append(buffer)
        real(buffer, *arguments, **named)

    monkeypatch.setattr(Buffer, "__init__", recorded)
    low_latency = EPConfig(
        mode="low_latency",
        backend="ascend",
        runner="ascend",
        dispatch_dtype=WireDtype.INT8,
        max_tokens_per_rank=M,
    )
    x, topk = batch(torch.distributed.get_rank())
    makers: list[Callable[[EPGroup], ExpertParallelExperts]] = [
        lambda group: make_layer(group, OPERATORS[0], experts(1)),
        lambda group: make_layer(group, OPERATORS[0], experts(2)),
        lambda group: make_layer(group, OPERATORS[1], experts(1)),
        lambda group: ExpertParallelExperts(experts(1), group, low_latency, top_k=K),
    ]
    alone = []
    for maker in makers:
        with EPGroup() as group, torch.no_grad():
            alone.append(maker(group)(x, topk))
    opened.clear()
    with EPGroup() as group, torch.no_grad():
        layers = [maker(group) for maker in makers]
        # The first two share an operator.
        assert len(opened) == 3
        for _ in range(2):
            for layer, expected in zip(layers, alone, strict=True):
                assert torch.equal(layer(x, topk), expected)
        traffic = [layer.stats().traffic for layer in layers]
        assert traffic[0] == traffic[1]
        assert [layer.stats().num_calls for layer in layers] == [2] * 4
        # A fused operator reports the same loads as other layers with this routing.
        loads = [layer.stats().num_tokens_per_expert for layer in layers]
        assert loads == [loads[3]] * 4
        assert sum(loads[3]) > 0
        for layer in layers:
            layer.check()
