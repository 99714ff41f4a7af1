import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from epcomm import (
    DeepEPLowLatencyDispatcher,
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    ExpertWeights,
    HandleError,
    MaskedDispatchOutput,
    MoESpec,
    ShapeError,
    TopKOutput,
    WireDtype,
    interleave,
)
from epcomm.calls.side_stream import StreamTransfers
from epcomm.integrations.deep_ep.checks import Absent
from epcomm.testing.buffer_suite import BATCH_SPECS, check_batch
from fakes.deep_ep import install
from fakes.deep_ep.strict_v1 import buffer as strict_buffer
from fakes.deep_ep.strict_v1.buffer import Buffer as StandIn
from tests.buffers.deep_ep.test_deep_ep import CASES, buffer_env
from tests.calls.test_side_stream import Log, Order, imitate_streams
from tests.dispatchers.test_transfers import BATCH, Beside, Rank, gradients

NUM_RANKS = 2
pytestmark = pytest.mark.ranks(NUM_RANKS)
HIDDEN_SIZE, NUM_EXPERTS, TOP_K, MAX_TOKENS = 2048, 4, 2, 4
CONTRACTS = Path(__file__).parents[2] / "contracts"
CONFIG = EPConfig(mode="low_latency", backend="deep_ep_v1", max_tokens_per_rank=MAX_TOKENS)
SPEC = MoESpec(hidden_size=HIDDEN_SIZE, num_experts=NUM_EXPERTS, top_k=TOP_K)


@pytest.fixture(autouse=True)
def poison_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_buffer, "_check_torch_deterministic", lambda: None)


@pytest.fixture
def receipts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log what the imitation receives, in order: `dispatch` or `combine` and its number."""
    log: list[str] = []

    def logged(name: str) -> Callable[..., tuple[Any, ...]]:
        original, numbers = getattr(StandIn, f"low_latency_{name}"), count(1)

        def call(*args: object, **options: object) -> tuple[Any, ...]:
            *results, hook = original(*args, **options)
            text = f"{name} {next(numbers)}"

            def receive() -> None:
                hook()
                log.append(text)

            return (*results, receive)

        return call

    for name in ("dispatch", "combine"):
        monkeypatch.setattr(StandIn, f"low_latency_{name}", logged(name))
    return log


@dataclass(frozen=True, kw_only=True)
class Batch:
    """x [T, H], its routing, and the y of experts that return their input."""

    x: Tensor
    topk: TopKOutput

    @property
    def y(self) -> Tensor:
        return self.x * self.topk.topk_weights.sum(1, keepdim=True)


def make_batch(group: EPGroup, number: int) -> Batch:
    x = torch.full((3, HIDDEN_SIZE), 1.0 + 4 * number + group.rank, dtype=torch.bfloat16)
    x[:, 0] = torch.arange(3)
    ids = torch.tensor([[0, 3], [2, 1], [3, 2]]).roll(number, 0)
    return Batch(x=x, topk=TopKOutput(topk_ids=ids, topk_weights=torch.full((3, TOP_K), 0.25)))


@contextmanager
def dispatcher_of(
    group: EPGroup, config: EPConfig = CONFIG
) -> Iterator[DeepEPLowLatencyDispatcher]:
    with torch.no_grad():
        yield DeepEPLowLatencyDispatcher(group, SPEC, config)


@contextmanager
def opened(config: EPConfig = CONFIG) -> Iterator[tuple[EPGroup, DeepEPLowLatencyDispatcher]]:
    with install("v1"), EPGroup() as group, dispatcher_of(group, config) as dispatcher:
        yield group, dispatcher


def identity(out: object) -> Any:  # noqa: ANN401 - the input of combine, whose kind out knows
    assert isinstance(out, MaskedDispatchOutput)
    return out.combine_input(out.hidden_states.data)


def test_micro_batches_decode_in_turn(receipts: list[str]) -> None:
    with install("v1"), EPGroup() as group, torch.no_grad():
        torch.manual_seed(0)
        weights = ExpertWeights(
            gate_up_proj=torch.randn(NUM_EXPERTS, 32, HIDDEN_SIZE, dtype=torch.bfloat16) / 64,
            down_proj=torch.randn(NUM_EXPERTS, HIDDEN_SIZE, 16, dtype=torch.bfloat16) / 8,
        )
        layer = ExpertParallelExperts(weights, group, CONFIG, top_k=TOP_K)
        batches = [make_batch(group, number) for number in range(2)]
        expected = [layer(each.x, each.topk, decode=True) for each in batches]
        receipts.clear()
        ys = interleave(*(layer.steps(each.x, each.topk, decode=True) for each in batches))
        assert all(map(torch.equal, ys, expected))
        # One batch after the other would combine the first before it dispatches the second.
        assert receipts == [
            f"{name} {number}" for name in ("dispatch", "combine") for number in (3, 4)
        ]


def test_nothing_is_received_before_wait(receipts: list[str]) -> None:
    with opened() as (group, dispatcher), torch.profiler.profile() as profiler:
        batch = make_batch(group, 0)
        pending = dispatcher.dispatch_async(batch.x, batch.topk)
        assert receipts == []
        out = pending.wait()
        assert receipts == ["dispatch 1"]
        pending_y = dispatcher.combine_async(identity(out))
        assert receipts == ["dispatch 1"]
        assert torch.equal(pending_y.wait(), batch.y)
        assert receipts == ["dispatch 1", "combine 1"]
    shown = {event.key for event in profiler.key_averages() if event.key.startswith("epcomm::")}
    halves = ("dispatch_begin", "dispatch_wait", "combine_begin", "combine_wait")
    assert shown == {f"epcomm::{half}" for half in halves}


def test_logfmt_is_the_packages_and_rounds_parts_below_1() -> None:
    with opened(replace(CONFIG, combine_dtype=WireDtype.LOGFMT10)) as (group, dispatcher):
        # Half of each row has elements from 1 on, and is sent as it is.
        x = torch.linspace(1, 1.9, HIDDEN_SIZE).bfloat16().repeat(3, 1)
        x[:, : HIDDEN_SIZE // 2] /= -16
        x[:, ::128] = 0.0
        y = dispatcher.combine(identity(dispatcher.dispatch(x, make_batch(group, 0).topk)))
        assert torch.equal(y[:, HIDDEN_SIZE // 2 :], x[:, HIDDEN_SIZE // 2 :] / 2)
        assert not y[x == 0].any()
        rounded, exact = y[:, x[0] < 0].float(), x[:, x[0] < 0].float() / 2
        error = ((rounded - exact) / exact).abs().max()
        # 511 magnitudes span 32 binades in a block with a zero; then bfloat16 rounds.
        most = (2 ** (32 / 510) - 1) / 2
        assert most / 2 < error <= most + 2.0**-8


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "the other way round"])
def test_a_send_receives_the_call_before_it(order: tuple[int, int], receipts: list[str]) -> None:
    with opened() as (group, dispatcher):
        batches = [make_batch(group, number) for number in range(2)]
        pending = [dispatcher.dispatch_async(each.x, each.topk) for each in batches]
        # deep_ep clears the counts of the first batch while it sends the second.
        assert receipts == ["dispatch 1"]
        outs = {place: pending[place].wait() for place in order}
        assert receipts == ["dispatch 1", "dispatch 2"], "each is received once"
        pending_ys = {place: dispatcher.combine_async(identity(outs[place])) for place in order}
        assert receipts[2:] == ["combine 1"]
        for place in reversed(order):
            assert torch.equal(pending_ys[place].wait(), batches[place].y)
        assert receipts[2:] == ["combine 1", "combine 2"]


def test_weights_may_be_overwritten_after_dispatch() -> None:
    with opened() as (group, dispatcher):
        batch = make_batch(group, 0)
        expected = batch.y
        out = dispatcher.dispatch(batch.x, batch.topk)
        batch.topk.topk_weights.fill_(7)
        batch.topk.topk_ids.fill_(0)
        assert torch.equal(dispatcher.combine(identity(out)), expected)


@pytest.mark.parametrize("waits", [True, False])
def test_batch_that_the_third_dispatch_ended_names_the_remedy(waits: bool) -> None:
    with opened() as (group, dispatcher):
        batches = [make_batch(group, number) for number in range(3)]
        pending = [dispatcher.dispatch_async(batches[0].x, batches[0].topk)]
        first = pending[0].wait() if waits else None
        pending += [dispatcher.dispatch_async(each.x, each.topk) for each in batches[1:]]
        # The send of the third dispatch overwrites the memory, before any wait().
        with pytest.raises(HandleError, match="before the second dispatch after it"):
            pending[0].wait() if first is None else dispatcher.combine(identity(first))
        for batch, each in zip(batches[1:], pending[1:], strict=True):
            assert torch.equal(dispatcher.combine(identity(each.wait())), batch.y)


@pytest.mark.parametrize("backend", CASES)
def test_topk_of_any_strides_is_served(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with install(CASES[backend].package), EPGroup() as group:
        env = buffer_env(backend, group, "bf16")
        original = type(env).batches

        def strided(self: object, spec: Any, number: int = 0) -> list[Any]:  # noqa: ANN401
            return [
                replace(
                    batch,
                    topk_ids=batch.topk_ids.T.contiguous().T,
                    topk_weights=batch.topk_weights.repeat_interleave(2, dim=1)[:, ::2],
                )
                for batch in original(env, spec, number)
            ]

        monkeypatch.setattr(type(env), "batches", strided)
        check_batch(env, BATCH_SPECS["uneven"])


def recorded_signature(package: str, method: str) -> inspect.Signature:
    contract = json.loads((CONTRACTS / f"deep_ep_{package}_signatures.json").read_text("utf-8"))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        # Arguments are only bound, so the source text of a default can replace its value.
        inspect.Parameter(each["name"], kind, default=each.get("default", inspect.Parameter.empty))
        for each in contract["methods"][method]["parameters"]
    ]
    return inspect.Signature(parameters)


def record_calls(
    package: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch, note: Callable[[str], None]
) -> None:
    """Note the calls of every public method, and bind each to the recorded signature."""
    kind = module.Buffer if package == "v1" else module.ElasticBuffer

    def noted(method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = recorded_signature(package, method)

        def call(*args: object, **options: object) -> Any:  # noqa: ANN401
            signature.bind(*args, **options)
            note(method)
            return function(*args, **options)

        return call

    contract = json.loads((CONTRACTS / f"deep_ep_{package}_signatures.json").read_text("utf-8"))
    for method, described in contract["methods"].items():
        found = inspect.getattr_static(kind, method, None)
        if found is None or isinstance(found, Absent):
            continue
        call = noted(method, found.__func__ if described["static"] else found)
        monkeypatch.setattr(kind, method, staticmethod(call) if described["static"] else call)


@pytest.mark.parametrize("wire", ["bf16", "fp8_powers_of_two"])
@pytest.mark.parametrize("backend", CASES)
def test_every_call_binds_to_the_recorded_signature(
    backend: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, called = CASES[backend].package, list[str]()
    with install(package) as module, monkeypatch.context() as patch:
        record_calls(package, module, patch, called.append)
        with EPGroup() as group:
            check_batch(buffer_env(backend, group, wire), BATCH_SPECS["uneven"])
        prefix = "low_latency_" if backend == "DeepEPV1LowLatencyBuffer" else ""
        assert {f"{prefix}dispatch", f"{prefix}combine"} <= set(called)
        assert called.count("__init__") == called.count("destroy") == 1


@contextmanager
def begun(package: str, log: Log, patch: pytest.MonkeyPatch, **changes: int) -> Iterator[Rank]:
    """Yield a rank that begins calls as on a GPU, with imitations of streams."""
    with install(package) as module, EPGroup() as group:
        record_calls(package, module, patch, log.add)
        group.calls.transfers = StreamTransfers(group.where, group.device, Order(log))
        spec = replace(BATCH, hidden_size=256, dtype=torch.bfloat16)
        rank = Rank(group, f"deep_ep_{package}", spec, **changes)
        assert not rank.dispatcher.is_asynchronous
        plan = rank.dispatcher.plan
        buffer = group.open_buffer(plan.buffer, plan.buffer_spec)
        patch.setattr(buffer, "_device", torch.device("cuda"))
        buffer.prepare()
        yield rank


def launched(log: Log) -> list[str]:
    """Return and clear the transfers and products, by stream."""
    names = (": dispatch", ": combine", ": product")
    found, log.lines[:] = [line for line in log.lines if line.endswith(names)], []
    return found


@pytest.mark.parametrize("package", ["v1", "v2"])
@pytest.mark.parametrize("changes", [{}, {"max_recv_slots": 256}], ids=["exact", "static"])
def test_begun_calls_run_on_the_side_stream_beside_products(
    package: str, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = imitate_streams(monkeypatch)
    product, leaf = partial(log.add, "product"), torch.ones(1, requires_grad=True)
    expected = ["side: dispatch", "caller: product", "side: combine", "caller: product"]
    with begun(package, log, monkeypatch, **changes) as rank:

        def run(x: Tensor, topk: TopKOutput) -> Tensor:
            rows = rank.dispatcher.dispatch_async(x, topk, experts_need_grad=True)
            beside = Beside.apply(leaf, product)
            product()
            sums = rank.dispatcher.combine_async(rank.results(rows.wait()))
            beside = beside + Beside.apply(leaf, product)
            product()
            y = sums.wait()
            # With exact sizes deep_ep makes the host wait, so the product is launched first.
            assert launched(log) == (expected if changes else [*expected[1::-1], *expected[2:]])
            return y + 0 * beside

        found = gradients(rank, rank.batch, run)
        assert launched(log) == expected
        assert all(map(torch.equal, found, gradients(rank, rank.batch, rank.layer)))


@pytest.mark.parametrize("package", ["v1", "v2"])
def test_errors_of_begun_calls_are_raised_on_all_ranks(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = imitate_streams(monkeypatch)
    with begun(package, log, monkeypatch, check_calls=True) as rank, torch.no_grad():
        x, topk = rank.batch.x, rank.batch.topk
        wrong = replace(topk, topk_ids=topk.topk_ids + 99 * rank.group.rank)
        pending = rank.dispatcher.dispatch_async(x, wrong)
        with pytest.raises(ShapeError, match="rank 1"):
            pending.wait()
        rank.check_usable()
        pending = rank.dispatcher.dispatch_async(x, topk)
        if rank.group.rank == 0:
            pending.wait()
        del pending
        with pytest.raises(HandleError, match="begun and never waited for"):
            rank.dispatcher.dispatch_async(x, topk).wait()
        rank.check_usable()
