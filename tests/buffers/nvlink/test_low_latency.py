"""The NVLink buffer between CPU ranks, whose kernels are interpreted: the contract, and long runs.

An interpreter takes a third of a second for a dispatch, so a case goes through several scenarios.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from epcomm import (
    DeepEPLowLatencyDispatcher,
    EPConfig,
    EPGroup,
    Mode,
    MoESpec,
    RowsDispatchOutput,
    TopKOutput,
)
from epcomm.buffers.base import Buffer, Dispatched
from epcomm.buffers.nvlink.low_latency import NVLinkLowLatencyBuffer
from epcomm.calls.call import DispatchCall
from epcomm.errors import BackendUnavailable, ConfigError, EPTimeout, HandleError, ShapeError
from epcomm.kernels import launch
from epcomm.kernels.nvlink.common.layout import SUM_FORMATS
from epcomm.platforms.machine import this_machine
from epcomm.protocol import BatchFlags
from epcomm.quantization import (
    FP8_FLOAT32_SCALES,
    FP8_POWER_OF_TWO_SCALES,
    INT8_PER_TOKEN,
    dequantize,
    quantize,
)
from epcomm.spec import Availability, BufferSpec
from epcomm.testing import buffer_suite
from epcomm.types import Int8Profile, RowsPer, WireDtype, WireFormat
from tests.cases.specs import buffer_spec

BufferT = TypeVar("BufferT", bound=Buffer)
BACKEND = "NVLinkLowLatencyBuffer"
MASKED = "NVLinkMaskedBuffer"
SCENARIOS = {
    "shapes": ("odd_hidden", "aligned_holes", "many_experts"),
    "batches": ("empty_rank", "more_in_flight"),
    "alone": ("stand_alone", "traffic"),
    "faults": ("faults",),
    "refusals": ("combine_faults",),
    "repeats": ("repeated_ids",),
}
QUANTIZED = {
    "fp8": FP8_FLOAT32_SCALES,
    "fp8_powers_of_two": FP8_POWER_OF_TWO_SCALES,
    "int8": INT8_PER_TOKEN,
}


MASKED_SCENARIOS = {
    "batches": ("empty_rank", "odd_hidden", "stand_alone", "traffic"),
    "repeats": ("repeated_ids",),
    "refusals": ("combine_faults",),
}


def env_of(group: EPGroup, backend: str = BACKEND, **options: Any) -> buffer_suite.BufferEnv:  # noqa: ANN401
    return buffer_suite.BufferEnv(
        group=group, backend=backend, mode=Mode.LOW_LATENCY, dtype=torch.bfloat16, **options
    )


# The most tokens that a rank sends in lines: with 2, some ranks of a batch send in lines and others
# in bulk.
IN_LINES, MIXED, IN_BULK = 8, 2, 0
ON_GPUS = (("refusals", IN_BULK), ("shapes", IN_BULK), ("alone", IN_LINES), ("alone", IN_BULK))


@pytest.fixture(autouse=True)
def usual_line_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send in bulk unless a test changes it: an interpreter takes twice as long for lines."""
    if launch.IS_INTERPRETED and request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(NVLinkLowLatencyBuffer, "line_tokens", IN_BULK)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("case", "line_tokens"),
    [
        ("batches", IN_BULK),
        ("faults", IN_BULK),
        ("repeats", MIXED),
        # An interpreter takes many seconds for these.
        pytest.param("batches", MIXED, marks=pytest.mark.slow),
        pytest.param("alone", MIXED, marks=pytest.mark.slow),
        pytest.param("shapes", MIXED, marks=pytest.mark.slow),
        pytest.param("faults", IN_LINES, marks=pytest.mark.slow),
        pytest.param("refusals", MIXED, marks=pytest.mark.slow),
        # MIXED covers the same cases; on a GPU these take no time.
        *(() if launch.IS_INTERPRETED else ON_GPUS),
    ],
)
def test_buffer_keeps_its_contract(
    case: str, line_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NVLinkLowLatencyBuffer, "line_tokens", line_tokens)
    with EPGroup() as group:
        for scenario in SCENARIOS[case]:
            buffer_suite.run_scenario(scenario, env_of(group))


@pytest.mark.ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("sums", SUM_FORMATS, ids=str)
def test_quantised_sums_keep_the_contract(sums: WireFormat) -> None:
    with EPGroup() as group:
        env = env_of(group, hidden_size=300, combine=sums)
        on_gpus = group.device.type == "cuda"
        for scenario in buffer_suite.SCENARIOS if on_gpus else ("holes", "traffic"):
            buffer_suite.run_scenario(scenario, env)


@pytest.mark.ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", MASKED_SCENARIOS)
def test_masked_buffer_keeps_its_contract(case: str) -> None:
    with EPGroup() as group:
        for scenario in MASKED_SCENARIOS[case]:
            buffer_suite.run_scenario(scenario, env_of(group, MASKED))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("backend", "wire", "line_tokens"),
    [
        (BACKEND, "fp8_powers_of_two", IN_LINES),
        pytest.param(BACKEND, "int8", IN_LINES, marks=pytest.mark.slow),
        pytest.param(BACKEND, "fp8_powers_of_two", IN_BULK, marks=pytest.mark.slow),
        (MASKED, "fp8", IN_BULK),
        (MASKED, "int8", IN_BULK),
    ],
)
def test_kernels_quantize_as_torch_does(
    backend: str, wire: str, line_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NVLinkLowLatencyBuffer, "line_tokens", line_tokens)
    spec = buffer_suite.BATCH_SPECS["holes"]
    with EPGroup() as group:
        # Several blocks, the last one short.
        env = env_of(group, backend, wire=QUANTIZED[wire], hidden_size=300)
        buffer_suite.check_batch(env, spec)


@pytest.mark.ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "wire", "line_tokens"),
    [(BACKEND, "fp8", MIXED), (BACKEND, "int8", IN_BULK), (MASKED, "fp8_powers_of_two", MIXED)],
)
def test_rows_that_are_quantised_already_travel_as_they_are(
    backend: str, wire: str, line_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NVLinkLowLatencyBuffer, "line_tokens", line_tokens)
    with EPGroup() as group:
        # Several blocks with a short last one; rows of whole words, and rows with an incomplete
        # last word.
        for hidden_size in (300, 37):
            env = env_of(group, backend, wire=QUANTIZED[wire], hidden_size=hidden_size)
            buffer_suite.check_wire_tensors(env, buffer_suite.BATCH_SPECS["holes"])


def serve_any_device(
    monkeypatch: pytest.MonkeyPatch, kind: type[Buffer] = NVLinkLowLatencyBuffer
) -> None:
    """Let plans take the buffer for CPU ranks too."""
    (mode,) = kind.modes
    caps = replace(kind.caps(mode), device_types=None)
    monkeypatch.setattr(kind, "probe", lambda machine: Availability(ok=True))
    monkeypatch.setattr(kind, "caps", lambda mode: caps)


@pytest.mark.ranks(2)
def test_int8_rows_are_made_as_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_any_device(monkeypatch)
    spec = MoESpec(hidden_size=64, num_experts=4, top_k=1)
    # Halves, which profiles round differently, with a scale of 1, and a row whose codes depend on
    # an epsilon of 1e-12.
    row = torch.arange(64) - 31.5
    row[-1] = 127
    tokens = torch.stack([row, row * 2.0**-40])
    with EPGroup() as group:
        # The ids of ranks 0 and 1; the first token goes to rank 0 and the second one to rank 1.
        theirs = torch.stack([tokens, -tokens]).to(group.device, torch.bfloat16)
        x = theirs[group.rank]
        ids = torch.tensor([[0], [2]], device=group.device)
        topk = TopKOutput(topk_ids=ids, topk_weights=torch.ones(2, 1, device=group.device))
        seen = set()
        # All profiles but that of the other tests.
        for profile in sorted({*Int8Profile} - {Int8Profile.RINT127}):
            config = EPConfig(
                backend="nvlink",
                dispatch_dtype=WireDtype.INT8,
                int8_profile=profile,
                max_tokens_per_rank=4,
            )
            dispatcher = DeepEPLowLatencyDispatcher(group, spec, config)
            out = dispatcher.dispatch(x, topk)
            assert isinstance(out, RowsDispatchOutput)
            # The rows from rank 0 and from rank 1.
            rows = out.index.row_of_slot[:2].tolist()
            wanted = quantize(theirs[:, group.rank], INT8_PER_TOKEN, profile=profile)
            assert torch.equal(out.hidden_states.data[rows], wanted.data), profile
            assert torch.equal(out.hidden_states.scales[rows], wanted.scales), profile
            seen.add((wanted.data.cpu().numpy().tobytes(), wanted.scales.cpu().numpy().tobytes()))
        assert len(seen) >= (3 if group.rank == 0 else 2), "these rows tell profiles apart"


class SingleReceiveBuffer(NVLinkLowLatencyBuffer):
    """A buffer in which every dispatch reuses the same memory, so that faults of reuse show."""

    num_buffers: ClassVar[int] = 1


class MixedSingleBuffer(SingleReceiveBuffer):
    """A single receive buffer; one rank sends in lines while the other sends in bulk."""

    line_tokens: ClassVar[int] = 1


class BulkSingleBuffer(SingleReceiveBuffer):
    """A single receive buffer; no rank sends in lines."""

    line_tokens: ClassVar[int] = 0


class ImpatientBuffer(NVLinkLowLatencyBuffer):
    """A buffer whose kernels give up after 200 polls, a fifth of a second of a GPU."""

    polls_per_s: ClassVar[Mapping[str, int]] = {"cpu": 2, "cuda": 2}


# Batches of which both of two ranks have tokens.
BUSY = (0, 2, 4)
HIDDEN, TOP_K, NUM_LOCAL, MAX_TOKENS = 16, 2, 2, 3


def spec_of() -> BufferSpec:
    return buffer_spec(HIDDEN, TOP_K, NUM_LOCAL, MAX_TOKENS)


@contextmanager
def opened(kind: type[BufferT], group: EPGroup, **changes: Any) -> Iterator[BufferT]:  # noqa: ANN401
    """Yield a buffer of spec_of() with changes, and close it."""
    buffer = kind(group.calls, replace(spec_of(), **changes))
    buffer.prepare()
    yield buffer
    buffer.close()


def call_of(
    number: int, rank: int, world_size: int, device: torch.device | None = None
) -> DispatchCall:
    """Return a call of odd 8-bit numbers to random experts; near batches share no number."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    # Two ranks have 1 and 3, 0 and 2, 3 and 1, 2 and 0 tokens, and then the same numbers again.
    num_tokens = (3 * number + 2 * rank + 1) % (MAX_TOKENS + 1)
    scores = torch.rand(num_tokens, NUM_LOCAL * world_size, generator=generator)
    ids = scores.argsort(dim=1)[:, :TOP_K].clone()
    ids[torch.rand(ids.shape, generator=generator) < 0.25] = -1
    places = torch.arange(num_tokens).unsqueeze(1) + 4 * (rank + world_size * (number % 4))
    values = 129 + 2 * places
    weights = torch.rand(ids.shape, generator=generator) + 0.1
    return DispatchCall(
        hidden_states=values.expand(-1, HIDDEN).to(device, torch.bfloat16).contiguous(),
        topk_ids=ids.to(device),
        topk_weights=weights.to(device),
        flags=BatchFlags.NONE,
    )


def factor_of(expert: int) -> int:
    """Return the factor of an expert, which is exact in bfloat16."""
    return expert % 2 + 1


def expected_sums(call: DispatchCall, world_size: int, sums: WireFormat | None = None) -> Tensor:
    """Return y to the bit: parts of ranks in k order, cast, and added in rank order, cast.

    sums: the format of parts.
    """
    x, ids, weights = call.unquantized.float(), call.topk_ids, call.topk_weights
    y = torch.zeros_like(x)
    for rank in range(world_size):
        part = torch.zeros_like(x)
        for k in range(TOP_K):
            is_there = (ids[:, k] >= 0) & (ids[:, k] // NUM_LOCAL == rank)
            share = torch.where(is_there, weights[:, k], 0)
            part += (x * (ids[:, k] % 2 + 1).unsqueeze(1)) * share.unsqueeze(1)
        part = part.to(torch.bfloat16)
        y += dequantize(quantize(part, sums), torch.float32) if sums else part.float()
    return y.to(torch.bfloat16)


def check_rows(out: Dispatched, number: int, rank: int, world_size: int) -> None:
    """Check that each row with a slot is that of its source and token."""
    slots_of_row = out.index.slots_of_row
    for row, slots in enumerate(slots_of_row.tolist()):
        if max(slots) >= 0:
            source, token = divmod(row, MAX_TOKENS)
            wanted = call_of(number, source, world_size, out.rows.data.device).unquantized[token]
            assert torch.equal(out.rows.data[row], wanted), f"round {number}, rank {rank}"


def compute(out: Dispatched, rank: int) -> Tensor:
    """Return the results of a rank's experts for their slots, [C, H], NaN elsewhere."""
    row_of_slot = out.index.row_of_slot
    results = out.rows.data.new_full((row_of_slot.numel(), HIDDEN), float("nan"))
    first = out.index.first_slot.tolist()
    for expert, count in enumerate(out.index.num_tokens_per_expert.tolist()):
        mine = slice(first[expert], first[expert] + count)
        rows = out.rows.data[row_of_slot[mine].long()]
        results[mine] = rows * factor_of(rank * NUM_LOCAL + expert)
    return results


def combine(buffer: Buffer, out: Dispatched, results: Tensor) -> Tensor:
    return buffer.combine(
        results, out.exchange_plan, rows_per=RowsPer.SLOT, slot_weights=out.slot_weights
    )[0]


def run_rounds(buffer: NVLinkLowLatencyBuffer, rounds: range, group: EPGroup) -> None:
    """Dispatch, compute and combine; every rank leaves every fifth batch uncombined."""
    rank, world_size = group.rank, group.world_size
    for number in rounds:
        call = call_of(number, rank, world_size, group.device)
        if number % 7 == rank:
            # The other ranks must wait.
            time.sleep(0.01)
        out = buffer.dispatch(call)
        if number % 5 == 1:
            if number % 2 != rank:
                # The other rank is at the next dispatch, which must not write here yet.
                time.sleep(0.5)
            check_rows(out, number, rank, world_size)
            continue
        results = compute(out, rank)
        y = combine(buffer, out, results)
        wanted = expected_sums(call, world_size, buffer._spec.combine_format)
        assert torch.equal(y, wanted), f"round {number}, rank {rank}"
    buffer.check()


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "kind",
    [
        SingleReceiveBuffer,
        MixedSingleBuffer,
        *(() if launch.IS_INTERPRETED else (BulkSingleBuffer,)),
    ],
)
def test_slots_are_used_again_and_again(kind: type[NVLinkLowLatencyBuffer]) -> None:
    with EPGroup() as group, opened(kind, group) as buffer:
        run_rounds(buffer, range(6), group)


def start_at(buffer: NVLinkLowLatencyBuffer, epoch: int) -> None:
    """Continue at `epoch`: of the earlier epochs, memory holds only the credit."""
    signed = (epoch + 2**31) % 2**32 - 2**31
    for number, receive_buffer in enumerate(buffer._receive_buffers):
        receive_buffer.exchange.state[0] = signed
        layout = buffer._layout
        begin = layout.buffer_offset(number) + layout.offsets["combined_lines"]
        lines = buffer._block[begin : begin + layout.regions["combined_lines"]].view(torch.int64)
        lines.fill_((signed - 1) << 32)
    # This runs before any rank sends.
    buffer._host_barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("epoch", [2**31 - 3, pytest.param(2**32 - 3, marks=pytest.mark.slow)])
def test_epochs_may_wrap(epoch: int) -> None:
    with EPGroup() as group, opened(MixedSingleBuffer, group) as buffer:
        # Batches in lines, then in bulk, with memory that was not used before.
        start_at(buffer, epoch)
        run_rounds(buffer, range(5), group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "kind", [MixedSingleBuffer, pytest.param(BulkSingleBuffer, marks=pytest.mark.slow)]
)
def test_a_batch_is_combined_until_its_memory_is_reused(kind: type[NVLinkLowLatencyBuffer]) -> None:
    with EPGroup() as group, opened(kind, group) as buffer:
        rank, world_size = group.rank, group.world_size
        call = call_of(2, rank, world_size, group.device)
        out = buffer.dispatch(call)
        results, wanted = compute(out, rank), expected_sums(call, world_size)
        early = None
        for factor in (1, 2, -4, 1):
            if factor % 4 == 2 * rank:
                # The other rank must not yet send sums where this one reads those before.
                time.sleep(0.05)
            pending = buffer.combine_async(
                results * factor,
                out.exchange_plan,
                rows_per=RowsPer.SLOT,
                slot_weights=out.slot_weights,
            )
            if factor != 2:
                # Else it is received when the next one is sent.
                assert torch.equal(pending.wait(), wanted * factor)
            else:
                early = pending
        assert torch.equal(early.wait(), wanted * 2)
        # One rank refuses to combine again: all hear of it, and may try once more.
        if rank == 0:
            error = ShapeError("bad rows here")
            buffer.combine(results[:0], out.exchange_plan, rows_per=RowsPer.ROW, error=error)
        else:
            y = buffer.combine(results, out.exchange_plan, rows_per=RowsPer.SLOT)[0]
            assert y.isnan().all()
        with pytest.raises(ShapeError, match="bad rows here" if rank == 0 else "rank 0"):
            buffer.check()
        assert torch.equal(combine(buffer, out, results), wanted)
        buffer.dispatch(call)
        with pytest.raises(HandleError, match="1 may be in flight"):
            buffer.combine(results, out.exchange_plan, rows_per=RowsPer.SLOT)
        buffer.check()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_rounds_that_load_all_kernels_leave_the_buffer_as_it_was() -> None:
    with EPGroup() as group, opened(SingleReceiveBuffer, group) as buffer:
        # Warm up as prepare() does on a GPU: in bulk, then in lines.
        buffer._warm_up()
        run_rounds(buffer, range(3), group)


@pytest.mark.ranks(2)
def test_missing_rank_ends_the_wait_on_all_ranks() -> None:
    with EPGroup() as group, opened(ImpatientBuffer, group) as buffer:
        call = call_of(1, group.rank, group.world_size, group.device)
        sent = buffer.dispatch_async(call) if group.rank == 0 else None
        if sent is not None:
            # Rank 1 does not arrive, so nothing is counted.
            assert sent.wait().index.num_tokens_per_expert.tolist() == [0] * NUM_LOCAL
            # A GPU has been warmed up by two rounds.
            number = 1 if group.device.type == "cpu" else 3
            with pytest.raises(
                EPTimeout, match=f"rank 1 did not arrive in dispatch, use {number} "
            ):
                buffer.check()
        group.calls.gather_records({}, phase="rank 0 gave up")
        if sent is None:
            # The kernels of this rank return immediately, and its host learns of the timeout.
            out = buffer.dispatch(call)
            assert out.index.num_tokens_per_expert.tolist() == [0] * NUM_LOCAL
            with pytest.raises(EPTimeout, match="this rank came too late: rank 0 gave up"):
                buffer.dispatch(call)
            # Clear the report, as if a graph were replayed, whose host reads no report.
            buffer._report.entries.zero_()
            rows = compute(out, group.rank)
            y, _ = buffer.combine(rows, out.exchange_plan, rows_per=RowsPer.SLOT)
            assert y.numel() > 0
            assert y.isnan().all()
        # The process and the group continue.
        with pytest.raises(EPTimeout):
            buffer.dispatch(call)
        buffer.close()
        with opened(NVLinkLowLatencyBuffer, group) as again:
            run_rounds(again, range(1), group)


@pytest.mark.ranks(2)
def test_nobody_lets_go_of_memory_before_all_have_come() -> None:
    with EPGroup() as group, opened(NVLinkLowLatencyBuffer, group) as buffer:
        begin = time.monotonic()
        if group.rank == 1:
            time.sleep(0.5)
        buffer.close()
        assert time.monotonic() - begin >= 0.4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["close", "abandon"])
def test_end_does_not_wait_for_a_rank_that_is_gone(way: str) -> None:
    with EPGroup() as group:
        buffer = ImpatientBuffer(group.calls, spec_of())
        buffer.prepare()
        begin = time.monotonic()
        if group.rank == 0:
            getattr(buffer, way)()
        # 200 polls of an interpreter, 0.2 s of a GPU.
        assert time.monotonic() - begin < 10
        group.calls.gather_records({}, phase="rank 0 has closed")


class HastyBuffer(NVLinkLowLatencyBuffer):
    """A buffer whose kernels give up after 3000 polls, 3 s, or 400 of a GPU, 0.4 s."""

    polls_per_s: ClassVar[Mapping[str, int]] = {"cpu": 30, "cuda": 4}


def run_without(buffer: NVLinkLowLatencyBuffer, dead: int, rounds: range, group: EPGroup) -> None:
    """Run rounds among the remaining ranks; ids of experts of the dead rank count as -1."""
    rank, world_size = group.rank, group.world_size
    for number in rounds:
        call = call_of(number, rank, world_size, group.device)
        out = buffer.dispatch(call)
        row_of_slot = out.index.row_of_slot
        sources = {row // MAX_TOKENS for row in row_of_slot.tolist() if row >= 0}
        assert dead not in sources
        check_rows(out, number, rank, world_size)
        y = combine(buffer, out, compute(out, rank))
        is_lost = call.topk_ids // NUM_LOCAL == dead
        left = replace(call, topk_ids=torch.where(is_lost, -1, call.topk_ids))
        wanted = expected_sums(left, world_size, buffer._spec.combine_format)
        assert torch.equal(y, wanted), f"round {number}, rank {rank}"
        if world_size > 2 and len(call.unquantized) > 1:
            assert (~is_lost & (call.topk_ids >= 0)).any(), "some entries are left"
    buffer.check()


@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize("sums", [None, *SUM_FORMATS], ids=str)
def test_living_ranks_go_on_without_a_dead_one(num_ranks: int, sums: WireFormat | None) -> None:
    dead = 1
    with EPGroup() as group, opened(HastyBuffer, group, combine_format=sums) as buffer:
        # All ranks take part in this batch, which leaves rows and words of the dead rank in memory.
        run_rounds(buffer, range(1), group)
        is_dead = group.rank == dead
        call = call_of(2, group.rank, num_ranks, group.device)
        exchange_plan = None
        if not is_dead:
            exchange_plan = buffer.dispatch(call).exchange_plan
            with pytest.raises(EPTimeout, match="rank 1 did not arrive"):
                buffer.check()
            with pytest.raises(ConfigError, match="expected other ranks from 0 to"):
                buffer.exclude_ranks([group.rank])
        group.calls.gather_records({}, phase="the living have given up")
        if exchange_plan is not None:
            buffer.exclude_ranks([dead])
            with pytest.raises(HandleError, match="dispatch again"):
                buffer.combine(torch.zeros(1, HIDDEN), exchange_plan, rows_per=RowsPer.ROW)
            run_without(buffer, dead, range(3, 5), group)
            before = buffer.traffic()
            buffer.dispatch(call)
            assert buffer.traffic().control_bytes > before.control_bytes
        group.calls.gather_records({}, phase="the living have gone on")
        if is_dead:
            # The excluded rank arrives late, learns that it is excluded, and disturbs no other
            # rank.
            buffer.dispatch(call)
            with pytest.raises(EPTimeout, match="gave up waiting"):
                buffer.check()
        else:
            run_without(buffer, dead, range(5, 6), group)


@pytest.mark.ranks(2)
def test_receiver_waits_for_a_late_sender_and_calls_may_be_finished_late() -> None:
    with EPGroup() as group, opened(NVLinkLowLatencyBuffer, group) as buffer:
        calls = [call_of(number, group.rank, group.world_size, group.device) for number in BUSY]
        homes = []
        for call in calls:
            if group.rank == 1:
                time.sleep(0.05)
            sent = buffer.dispatch_async(call)
            out = sent.wait()
            rows = compute(out, group.rank)
            # The third dispatch needs the receive buffer whose sums no rank has received.
            homes.append(
                buffer.combine_async(
                    rows, out.exchange_plan, rows_per=RowsPer.SLOT, slot_weights=out.slot_weights
                )
            )
        for call, home in zip(calls, homes, strict=True):
            wanted = expected_sums(call, group.world_size)
            assert wanted.any()
            assert torch.equal(home.wait(), wanted)


@pytest.mark.ranks(2)
def test_refused_combine_is_of_the_batch_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_any_device(monkeypatch)
    config = EPConfig(backend="nvlink", max_tokens_per_rank=MAX_TOKENS)
    with EPGroup() as group:
        dispatcher = DeepEPLowLatencyDispatcher(
            group, MoESpec(hidden_size=HIDDEN, num_experts=4, top_k=TOP_K), config
        )
        calls = [call_of(number, group.rank, 2, group.device) for number in BUSY[1:]]
        outs = [
            dispatcher.dispatch(
                call.hidden_states,
                TopKOutput(topk_ids=call.topk_ids, topk_weights=call.topk_weights),
            )
            for call in calls
        ]
        inputs = []
        for out in outs:
            assert isinstance(out, RowsDispatchOutput)
            results = torch.zeros(
                len(out.index.row_of_slot), HIDDEN, dtype=torch.bfloat16, device=group.device
            )
            first = out.index.first_slot.tolist()
            for expert, count in enumerate(out.index.num_tokens_per_expert.tolist()):
                mine = slice(first[expert], first[expert] + count)
                rows = out.hidden_states.data[out.index.row_of_slot[mine].long()]
                results[mine] = rows * factor_of(expert)
            inputs.append(out.combine_input(results))
        # The later batch first; rank 1 passes rows of a wrong width.
        if group.rank == 1:
            wrong = replace(inputs[1], hidden_states=inputs[1].hidden_states[:, :-1])
            with pytest.raises(ShapeError, match="hidden_states is"):
                dispatcher.combine(wrong)
        else:
            assert dispatcher.combine(inputs[1]).isnan().all()
            with pytest.raises(ShapeError, match="rank 1"):
                dispatcher.check()
        y = dispatcher.combine(inputs[0])
        assert torch.equal(y, expected_sums(calls[0], 2))
        dispatcher.check()


@pytest.mark.ranks(2)
def test_cpu_ranks_are_refused_without_interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "IS_INTERPRETED", False)
    with EPGroup() as group:
        if group.device.type == "cuda":
            group.open_buffer(BACKEND, spec_of())
            return
        with pytest.raises(BackendUnavailable, match="use backend="):
            group.open_buffer(BACKEND, spec_of())


def test_plans_on_a_cpu_do_not_take_it() -> None:
    verdict = NVLinkLowLatencyBuffer.probe(this_machine())
    if not torch.cuda.is_available():
        assert verdict.reasons == ("there is no CUDA device",)
    assert NVLinkLowLatencyBuffer.caps(Mode.LOW_LATENCY).device_types == {"cuda"}
