import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epcomm import (
    BackendUnavailable,
    CapacityError,
    ConfigError,
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    MoESpec,
    ShapeError,
    TopKOutput,
    WireDtype,
    plan,
)
from epcomm.buffers.ascend.calls import slot_bytes
from epcomm.buffers.ascend.packed import AscendBuffer
from epcomm.dispatchers.dispatcher import Dispatcher
from epcomm.planning.plans import EPPlan
from epcomm.quantization import INT8_PER_TOKEN, dequantize
from epcomm.registry import buffer_class
from fakes.ascend import limits
from fakes.deep_ep import install
from tests.cases.specs import BF16, buffer_spec
from tests.cli.test_diagnosis import write_package

NORMAL, LOW_LATENCY = "AscendNormalBuffer", "AscendLowLatencyBuffer"
BOTH = (NORMAL, LOW_LATENCY)
DISPATCHERS: dict[str, Callable[..., Dispatcher[Any, Any]]] = {
    NORMAL: DeepEPNormalDispatcher,
    LOW_LATENCY: DeepEPLowLatencyDispatcher,
}
HIDDEN = 1024
LAYER = MoESpec(hidden_size=HIDDEN, num_experts=8, top_k=2)
ROUNDS = {"DEEPEP_NORMAL_LONG_SEQ_ROUND": "1", "DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS": "32"}
A2_LAYER = replace(LAYER, hidden_size=7168)


@pytest.fixture(autouse=True)
def machine(npu_operators: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HCCL_BUFFSIZE", "4000")
    with install("ascend"):
        yield


def config_of(backend: str, **changes: object) -> EPConfig:
    config = EPConfig(mode="normal", backend="ascend")
    if backend == LOW_LATENCY:
        config = replace(config, mode="low_latency", max_tokens_per_rank=16)
    return replace(config, **changes)


@dataclass(frozen=True)
class Side:
    """What is asked of a plan: a layer, changes of the configuration, and ranks."""

    layer: MoESpec = LAYER
    changes: Mapping[str, object] = field(default_factory=dict)
    world_size: int = 2


@dataclass(frozen=True)
class Limit:
    """A limit: a case that is served, one just beyond it, and the reason of its refusal."""

    reason: str
    served: Side
    refused: Side
    backends: tuple[str, ...] = BOTH
    chip: str = "A3"
    variables: Mapping[str, str] = field(default_factory=dict)


def experts(top_k: int) -> Side:
    return Side(replace(LAYER, num_experts=32, top_k=top_k))


def hidden(size: int) -> Side:
    return Side(replace(LAYER, hidden_size=size))


def configured(**changes: object) -> Side:
    return Side(changes=changes)


def tokens(number: int | None, **changes: object) -> Side:
    return configured(max_tokens_per_rank=number, **changes)


IN_INT8 = {"dispatch_dtype": WireDtype.INT8}
LIMITS = [
    Limit("top_k is 17, at most 16", experts(16), experts(17)),
    Limit("is 1023, expected 1024 to", hidden(1024), hidden(1023)),
    Limit(
        "hidden_size is 7169, expected 1024 to 7168 on A3", hidden(7168), hidden(7169), (NORMAL,)
    ),
    Limit("hidden_size is 7136, expected 7168 on A2", hidden(7168), hidden(7136), (NORMAL,), "A2"),
    Limit("expected a multiple of 32 on A2", hidden(1056), hidden(1040), (LOW_LATENCY,), "A2"),
    Limit(
        "max_tokens_per_rank is 33, at most 32", tokens(32), tokens(33), (NORMAL,), variables=ROUNDS
    ),
    Limit("max_tokens_per_rank is 513, at most 512", tokens(512), tokens(513), (LOW_LATENCY,)),
    Limit("serves 2 to", Side(), Side(world_size=1)),
    Limit(
        "serves 2 to 8 ranks on A2, not 16",
        Side(A2_LAYER, world_size=8),
        Side(replace(A2_LAYER, num_experts=16), world_size=16),
        chip="A2",
    ),
    Limit("has static sizes; set max_tokens_per_rank", Side(), tokens(None), (LOW_LATENCY,)),
    Limit(
        "carries ['bf16', 'int8'], not fp8_e4m3",
        configured(**IN_INT8),
        configured(dispatch_dtype=WireDtype.FP8_E4M3),
    ),
    # INT8 rows take as much as bfloat16: 2 * 16 * (8 * 2560 + 2 * 2048) B are 0.75 MiB, and for 22
    # tokens 1.03.
    Limit(
        "needs a window of 2 MiB, but DEEPEP_HCCL_BUFFSIZE is 1",
        tokens(21, **IN_INT8),
        tokens(22, **IN_INT8),
        (LOW_LATENCY,),
        variables={"DEEPEP_HCCL_BUFFSIZE": "1"},
    ),
]


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.reason)
def test_plan_serves_up_to_the_limit_and_names_it_beyond(
    limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limit.variables.items():
        monkeypatch.setenv(name, value)

    def plan_of(side: Side, backend: str) -> EPPlan:
        return plan(config_of(backend, **side.changes), side.layer, world_size=side.world_size)

    for backend in limit.backends:
        with limits.soc(limit.chip):
            assert plan_of(limit.served, backend).prefill.buffer == backend
            with pytest.raises(BackendUnavailable, match=re.escape(limit.reason)):
                plan_of(limit.refused, backend)


def test_without_a_chip_the_widest_limits_hold_and_ascend_is_a_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = sys.modules["deep_ep"]
    monkeypatch.setattr(package, "cpu_device_name", lambda: None)
    config = EPConfig(backend="ascend", max_tokens_per_rank=512)
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AIV")
    chosen = plan(config, LAYER, world_size=16 // 2)
    assert chosen.prefill.buffer == NORMAL
    assert chosen.decode.buffer == LOW_LATENCY
    # Prefill has no limit from the configuration, but the package has one.
    assert chosen.prefill.limits()["tokens a rank"] == "at most 8192"
    assert chosen.decode.limits()["tokens a rank"] == "at most 512"


SPECS = {NORMAL: buffer_spec(HIDDEN, 2, 4)}
SPECS[LOW_LATENCY] = replace(SPECS[NORMAL], max_tokens_per_rank=16)
# Environment variables of one rank, and the message on all ranks.
SET_ON_RANK_1 = [
    (BOTH, {"DEEP_USE_MODE": "ops"}, "rank 1: DEEP_USE_MODE is ops, expected default; unset it"),
    (BOTH, {"DEEPEP_HCCL_BUFFSIZE": "1"}, "but DEEPEP_HCCL_BUFFSIZE is 1; set it to"),
    ((NORMAL,), {"DEEP_NORMAL_MODE_USE_INT8_QUANT": "1"}, "the wire format is bf16"),
    ((NORMAL,), {"DEEPEP_NORMAL_LONG_SEQ_ROUND": "2"}, "set both or neither"),
    ((NORMAL,), ROUNDS, "ranks disagree on tokens of a round: 8192 on rank 0, 32 on rank 1"),
]


@pytest.mark.ranks(2)
def test_buffers_opened_without_a_plan_look_at_the_variables_too(group: EPGroup) -> None:
    cases = [
        (backend, variables, wanted)
        for backends, variables, wanted in SET_ON_RANK_1
        for backend in backends
    ]
    # More than the 21 tokens that low latency has capacity for in 1 MiB, and no two alike: an
    # open buffer is not opened again.
    for number, (backend, variables, wanted) in enumerate(cases, start=22):
        spec = replace(SPECS[backend], max_tokens_per_rank=number)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                if group.rank == 1:
                    patch.setenv(name, value)
            with pytest.raises((BackendUnavailable, ConfigError)) as caught:
                group.open_buffer(backend, spec)
        assert wanted in str(caught.value)
        assert f"this is rank {group.rank} of 2" in str(caught.value)
        # Nothing was opened, and the group is unchanged.
        group.open_buffer(backend, spec)


@pytest.mark.ranks(2)
def test_a_package_without_a_parameter_is_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    package: Any = sys.modules["deep_ep"]

    class Older(package.Buffer):
        """A release without quant_mode and flags."""

        def dispatch(self, x: object, **others: object) -> object:
            return super().dispatch(x, **others)

        def low_latency_dispatch(self, x: object, **others: object) -> object:
            return super().low_latency_dispatch(x, **others)

    if group.rank == 1:
        monkeypatch.setattr(package, "Buffer", Older)
    for backend, method in ((NORMAL, "dispatch"), (LOW_LATENCY, "low_latency_dispatch")):
        with pytest.raises(BackendUnavailable) as caught:
            group.open_buffer(backend, SPECS[backend])
        wanted = f"Older.{method} of the installed package has no parameter use_mxfp8"
        assert wanted in str(caught.value)
        assert "cannot be opened, rank 1: " in str(caught.value)


REAL = """
class Buffer:
    def __init__(self, group, num_nvl_bytes=0, low_latency_mode=False):
        self.group = group

    def get_dispatch_layout(self, topk_idx, num_experts): ...

    def dispatch(
        self, x, num_tokens_per_rank=None, is_token_in_rank=None, num_tokens_per_expert=None,
        topk_idx=None, topk_weights=None, quant_mode=None,
    ): ...

    def combine(self, x, handle): ...

    def fused_deep_moe(self): ...
"""


@pytest.mark.ranks(2)
def test_an_installed_package_needs_torch_npu_and_no_cuda(tmp_path: Path) -> None:
    write_package(tmp_path / "deep_ep", {"__init__.py": REAL})
    npu = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "Ascend910_9392")
    with pytest.MonkeyPatch.context() as patch, EPGroup() as group:
        # The test installs this module instead of the imitation.
        patch.delitem(sys.modules, "deep_ep")
        patch.delitem(sys.modules, "deep_ep.buffer")
        patch.syspath_prepend(tmp_path)
        with pytest.raises(BackendUnavailable, match="ranks 0, 1: torch_npu is not imported"):
            group.open_buffer(NORMAL, SPECS[NORMAL])
        patch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))
        buffer = group.open_buffer(NORMAL, SPECS[NORMAL])
        assert isinstance(buffer, AscendBuffer)
        assert buffer._buffer.group is group.collectives.process_group
        npu.get_device_name = lambda: "Ascend910B2"
        with pytest.raises(BackendUnavailable, match="hidden_size is 2048, expected 7168 on A2"):
            group.open_buffer(NORMAL, replace(SPECS[NORMAL], hidden_size=2048))


def topk_of(ids: list[list[int]]) -> TopKOutput:
    topk_ids = torch.tensor(ids)
    return TopKOutput(topk_ids=topk_ids, topk_weights=torch.full(topk_ids.shape, 0.5))


def rows(num_tokens: int) -> torch.Tensor:
    return torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("check_calls", [True, False])
def test_more_tokens_than_the_rounds_hold_are_refused(
    check_calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ROUNDS.items():
        monkeypatch.setenv(name, value)
    with EPGroup() as group, torch.no_grad():
        config = config_of(NORMAL, check_calls=check_calls)
        dispatcher = DeepEPNormalDispatcher(group, LAYER, config)
        many = 33 if group.rank == 1 else 32
        topk = topk_of([[0, 5]] * many)
        own = "hidden_states has 33 tokens, expected at most 32, the limit of the backend"
        wanted = own if group.rank == 1 else "more tokens than max_tokens_per_rank on rank 1"
        if group.rank == 1 or check_calls:
            with pytest.raises(CapacityError, match=wanted):
                dispatcher.dispatch(rows(many), topk)
        else:
            # Rank 1 took part without tokens, so it sent one dummy token to its own experts.
            out = dispatcher.dispatch(rows(many), topk)
            assert out.index.host_num_tokens_per_expert == (32, 0, 0, 0)
        # The number of tokens is exactly the capacity of the rounds.
        out = dispatcher.dispatch(rows(32), topk_of([[0, 5]] * 32))
        y = dispatcher.combine(out.combine_input(out.hidden_states.data))
        assert torch.equal(y, rows(32))


@pytest.mark.ranks(2)
def test_an_expert_twice_in_a_row_is_refused_on_all_ranks(group: EPGroup) -> None:
    with torch.no_grad():
        ids = [[3, 1], [-1, -1], [4, 4]] if group.rank == 1 else [[3, 1], [-1, 0], [4, 5]]
        normal, low_latency = (
            DISPATCHERS[backend](group, LAYER, config_of(backend, check_calls=True))
            for backend in BOTH
        )
        own = "names expert 4 twice for token 2, expected distinct experts in a row .rank 1 of 2"
        wanted = own if group.rank == 1 else "an expert twice in a row of topk_ids on rank 1"
        with pytest.raises(ShapeError, match=wanted):
            normal.dispatch(rows(3), topk_of(ids))
        out = low_latency.dispatch(rows(3), topk_of(ids))
        with pytest.raises(ShapeError, match="an expert twice in a row of topk_ids on rank 1"):
            low_latency.combine(out.combine_input(torch.zeros_like(out.hidden_states.data)))
        for dispatcher in (normal, low_latency):
            out = dispatcher.dispatch(rows(2), topk_of([[3, 1], [-1, 0]]))
            y = dispatcher.combine(out.combine_input(out.hidden_states.data))
            assert torch.equal(y[0], rows(1)[0])
            assert torch.equal(y[1], 0.5 * rows(1)[0])


Calls = list[tuple[str, dict[str, Any]]]


@contextmanager
def recorded_calls(backend: str) -> Iterator[tuple[EPGroup, type[AscendBuffer], Calls]]:
    """Yield a group, the buffer, and a list of the names and arguments of the package's calls."""
    package: Any = sys.modules["deep_ep"]
    adapter, seen = buffer_class(backend), Calls()
    assert issubclass(adapter, AscendBuffer)

    def noting(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: object, **arguments: object) -> object:
            # A positional argument is a TypeError here.
            seen.append((method, arguments))
            return original(self, **arguments)

        return call

    with pytest.MonkeyPatch.context() as patch, EPGroup() as group, torch.no_grad():
        for method in adapter.calls.keys() - {"__init__"}:
            original = getattr(package.Buffer, method)
            noted = noting(method, original)
            noted.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
            patch.setattr(package.Buffer, method, noted)
        yield group, adapter, seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BOTH)
def test_a_bf16_draft_beside_an_int8_model_on_one_group(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each dispatcher has its own format, which every call passes; calls interleave."""
    # The default of the package, and the flag's name in the other package, mean INT8.
    monkeypatch.setenv("DEEP_NORMAL_MODE_USE_INT8_QUANT", "0")
    with recorded_calls(backend) as (group, adapter, seen):
        configs = (config_of(backend, dispatch_dtype=WireDtype.INT8), config_of(backend))
        layers = [DISPATCHERS[backend](group, LAYER, config) for config in configs]
        ids = [[3, 4], [7, 0], [2, 6]]
        outs = [layer.dispatch(rows(3), topk_of(ids)) for layer in layers]
        found = [out.hidden_states.format for out in outs]
        assert found == [INT8_PER_TOKEN, BF16]
        for layer, out in zip(layers, outs, strict=True):
            data = dequantize(out.hidden_states, torch.bfloat16)
            y = layer.combine(out.combine_input(data))
            # The experts are the identity, with weights of 0.5 twice. If weights were applied
            # twice, y would be a half of x.
            assert torch.equal(y, rows(3))
    formats = [arguments["quant_mode"] for _, arguments in seen if "quant_mode" in arguments]
    assert formats == ["int8", "bf16"]
    assert {method for method, _ in seen} == adapter.calls.keys() - {"__init__"}
    of_formats = {"dispatch": {"quant_mode"}, "low_latency_dispatch": {"quant_mode", "use_fp8"}}
    for method, arguments in seen:
        assert set(arguments) == {*adapter.calls[method], *of_formats.get(method, ())}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BOTH)
def test_a_rank_without_tokens_sends_one_to_itself(backend: str) -> None:
    """Releases of the package keep in their Buffer that the newest batch was empty."""
    empty = TopKOutput(topk_ids=torch.empty(0, 2).long(), topk_weights=torch.empty(0, 2))
    with recorded_calls(backend) as (group, _, seen):
        dispatcher = DISPATCHERS[backend](group, LAYER, config_of(backend))
        mine = [empty, topk_of([[1, 6]])]
        if group.rank == 0:
            mine = [topk_of([[0, 5], [2, 5]]), empty]
        outs, sent_before = [], -1
        for topk in mine:
            outs.append(dispatcher.dispatch(rows(len(topk.topk_ids)), topk))
            if topk is empty:
                sent_before = dispatcher._buffer.traffic().dispatch_bytes
        # The tokens include that of each rank for its own first two experts.
        counts = [out.num_tokens_per_expert.tolist() for out in outs]
        wanted = ([[1, 0, 1, 0], [1, 2, 0, 0]], [[1, 3, 0, 0], [0, 0, 1, 0]])
        assert counts == wanted[group.rank]
        for out, topk in zip(reversed(outs), reversed(mine), strict=True):
            y = dispatcher.combine(out.combine_input(out.hidden_states.data))
            assert torch.equal(y, rows(len(topk.topk_ids)))
        dispatcher.check()
    tensors = [arguments.get(name) for _, arguments in seen for name in ("x", "topk_idx")]
    assert all(len(tensor) for tensor in tensors if tensor is not None)
    sent = 2 * slot_bytes(SPECS[backend])[0]
    assert sent_before == (sent if group.rank == 0 else 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BOTH)
def test_rows_of_another_format_than_asked_for_are_an_error(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imitate a package that drops quant_mode before it calls the operator."""
    package: Any = sys.modules["deep_ep"]
    method = "dispatch" if backend == NORMAL else "low_latency_dispatch"
    original = getattr(package.Buffer, method)

    def forgetful(self: object, *, quant_mode: str | None = None, **arguments: object) -> object:
        return original(self, **arguments | {"quant_mode": "bf16"})

    forgetful.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(package.Buffer, method, forgetful)
    with EPGroup() as group, torch.no_grad():
        dispatcher = DISPATCHERS[backend](
            group, LAYER, config_of(backend, dispatch_dtype=WireDtype.INT8)
        )
        wanted = "ascend: received torch.bfloat16 rows with no scales, expected int8"
        with pytest.raises(BackendUnavailable, match=wanted):
            dispatcher.dispatch(rows(2), topk_of([[0, 7], [5, 2]]))
