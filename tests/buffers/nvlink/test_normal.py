"""Normal mode over NVLink between CPU ranks, or between GPUs.

CPU ranks run its kernels as the host compiles them, in a selection of the scenarios; GPUs run all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from epcomm import EPGroup, Mode
from epcomm.buffers.base import Buffer, Dispatched, RowTopkDispatched
from epcomm.buffers.nvlink.memory import region_rows
from epcomm.buffers.nvlink.normal import NVLinkBuffer, NVLinkStaticBuffer
from epcomm.calls.call import DispatchCall, RowTopkCall
from epcomm.dispatchers.autograd import Sending, combine_rows, dispatch_rows
from epcomm.errors import CapacityError, EPTimeout, HandleError
from epcomm.kernels.nvlink.common.layout import SUM_FORMATS
from epcomm.kernels.nvlink.common.plan_parts import NVLinkNormalExchangePlan
from epcomm.ops.slots import gather_rows, row_topk
from epcomm.protocol import BatchFlags
from epcomm.quantization import (
    FP8_FLOAT32_SCALES,
    FP8_POWER_OF_TWO_SCALES,
    INT8_PER_TOKEN,
    dequantize,
    quantize,
)
from epcomm.records import Handle, RowsCombineInput
from epcomm.testing import buffer_suite
from epcomm.testing.poison import poisoned_memory
from epcomm.types import GRADIENT_DTYPES, RowsPer, WireFormat
from tests.buffers.nvlink.test_low_latency import (
    HIDDEN,
    MAX_TOKENS,
    NUM_LOCAL,
    TOP_K,
    call_of,
    combine,
    compute,
    expected_sums,
    factor_of,
    opened,
    spec_of,
)

ON_CPUS = {
    "NVLinkBuffer": ("empty_rank", "more_in_flight", "traffic", "repeated_ids"),
    "NVLinkStaticBuffer": ("holes", "faults", "budget", "repeated_ids"),
}
# These scenarios are slow on CPUs, or run the same host code as those above.
SLOW = ("odd_hidden", "aligned_holes", "stand_alone", "ids_out_of_range", "combine_faults")
WIRES = {"fp8": FP8_FLOAT32_SCALES, "int8": INT8_PER_TOKEN}
NONE = BatchFlags.NONE
TRAINS = BatchFlags.GRAD_ENABLED | BatchFlags.INPUTS_NEED_GRAD | BatchFlags.EXPERTS_NEED_GRAD


def env_of(group: EPGroup, backend: str = "NVLinkBuffer", **options: Any) -> buffer_suite.BufferEnv:  # noqa: ANN401
    return buffer_suite.BufferEnv(
        group=group, backend=backend, mode=Mode.NORMAL, dtype=torch.bfloat16, **options
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "backend", ["NVLinkBuffer", pytest.param("NVLinkStaticBuffer", marks=pytest.mark.slow)]
)
def test_buffer_keeps_its_contract(backend: str) -> None:
    with EPGroup() as group:
        on_gpus = group.device.type == "cuda"
        for scenario in buffer_suite.SCENARIOS if on_gpus else ON_CPUS[backend]:
            buffer_suite.run_scenario(scenario, env_of(group, backend))


def gradients_of(wire: WireFormat | None) -> WireFormat | None:
    """Return the format in which gradients are sent beside sums: theirs, if they may have it."""
    return wire if wire is not None and wire.dtype in GRADIENT_DTYPES else None


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("scenario", SLOW)
def test_buffer_keeps_the_rest_of_its_contract(scenario: str) -> None:
    with EPGroup() as group:
        buffer_suite.run_scenario(scenario, env_of(group))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wire", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_quantized_rows_arrive_bit_equal(wire: str) -> None:
    with EPGroup() as group:
        # Several blocks, the last one short; and rows that the copy engine of a GPU moves.
        for hidden_size in (300, 528) if group.device.type == "cuda" else (300,):
            env = env_of(group, wire=WIRES[wire], hidden_size=hidden_size)
            buffer_suite.check_batch(env, buffer_suite.BATCH_SPECS["holes"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("scenario", "backend"),
    [
        ("holes", "NVLinkBuffer"),
        ("aligned_holes", "NVLinkStaticBuffer"),
        pytest.param("combine_faults", "NVLinkBuffer", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("sums", SUM_FORMATS, ids=str)
def test_quantised_sums_and_gradients_keep_the_contract(
    sums: WireFormat, scenario: str, backend: str
) -> None:
    with EPGroup() as group:
        env = env_of(group, backend, combine=sums, backward=gradients_of(sums), hidden_size=300)
        on_gpus = group.device.type == "cuda"
        for each in buffer_suite.SCENARIOS if on_gpus else (scenario,):
            buffer_suite.run_scenario(each, env)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_rows_that_are_quantised_already_travel_as_they_are() -> None:
    with EPGroup() as group:
        env = env_of(group, wire=FP8_POWER_OF_TWO_SCALES, hidden_size=300)
        buffer_suite.check_wire_tensors(env, buffer_suite.BATCH_SPECS["holes"])


@pytest.mark.ranks(2)
def test_scalars_return_to_a_rank_that_has_received_no_rows() -> None:
    with EPGroup() as group, poisoned_memory():
        buffer = group.open_buffer("NVLinkBuffer", spec_of())
        call = replace(call_of(1, group.rank, 2, group.device), flags=TRAINS)
        # All tokens go to rank 1, which sends its ids back; the ids of the second call are masked.
        ids = NUM_LOCAL + torch.arange(TOP_K, device=group.device).expand_as(call.topk_ids)
        for topk_ids in (ids, torch.full_like(ids, -1)):
            out = buffer.dispatch(replace(call, topk_ids=topk_ids.contiguous()))
            rows = out.rows.data
            assert len(rows) > 0 or group.rank == 0 or topk_ids is not ids
            scalars = 3 + torch.arange(TOP_K, device=group.device).float().repeat(len(rows), 1)
            _, found = buffer.combine(
                rows, out.exchange_plan, rows_per=RowsPer.ROW, row_scalars=scalars
            )
            expected = torch.where(topk_ids >= 0, 3 + topk_ids - NUM_LOCAL, 0)
            assert torch.equal(found, expected.float())


class SingleReceiveBuffer(NVLinkBuffer):
    """A buffer in which every dispatch reuses the same memory, so that faults of reuse show."""

    num_buffers: ClassVar[int] = 1


class SingleReceiveBufferStatic(NVLinkStaticBuffer):
    """The same buffer with static sizes, so that no host waits in between."""

    num_buffers: ClassVar[int] = 1


class ImpatientBuffer(NVLinkBuffer):
    """A buffer whose kernels give up after 200 polls, a fifth of a second of a GPU."""

    polls_per_s: ClassVar[Mapping[str, int]] = {"cpu": 2, "cuda": 2}


def run_rounds(buffer: Buffer, rounds: range, group: EPGroup) -> None:
    """Dispatch, compute and combine 0 to 2 times; some rank is late at times."""
    rank, world_size = group.rank, group.world_size
    for number in rounds:
        call = call_of(number, rank, world_size, group.device)
        if number % 3 == rank:
            time.sleep(0.02)
        out = buffer.dispatch(call)
        if number % 3 != rank:
            # Another rank may be in its next call, which must not write here yet.
            time.sleep(0.02)
        results = compute(out, rank)
        # Batches have no combine, one, and two, in turn.
        for _ in range(number % 3):
            y = combine(buffer, out, results)
            assert torch.equal(y, expected_sums(call, world_size)), f"round {number}, rank {rank}"
    buffer.check()


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [SingleReceiveBuffer, SingleReceiveBufferStatic])
def test_slots_are_used_again_and_again(kind: type[Buffer]) -> None:
    with EPGroup() as group, opened(kind, group) as buffer:
        run_rounds(buffer, range(6), group)


@pytest.mark.ranks(2)
def test_rows_that_a_replay_has_overwritten_are_not_combined() -> None:
    with EPGroup() as group, opened(SingleReceiveBufferStatic, group) as buffer:
        call = call_of(2, group.rank, group.world_size, group.device)
        out = buffer.dispatch(call)
        results = compute(out, group.rank)
        assert torch.equal(combine(buffer, out, results), expected_sums(call, group.world_size))
        # A replay takes the receive buffer, which no host learns.
        before = buffer._num_dispatches
        buffer.dispatch(call_of(3, group.rank, group.world_size, group.device))
        buffer._num_dispatches = before
        assert combine(buffer, out, results).isnan().all()
        with pytest.raises(HandleError, match="on ranks 0, 1"):
            buffer.check()
        run_rounds(buffer, range(2, 3), group)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("epoch", [2**31 - 3, 2**32 - 3])
def test_epochs_may_wrap(epoch: int) -> None:
    with EPGroup() as group, opened(SingleReceiveBuffer, group) as buffer:
        exchange, layout = buffer._exchange, buffer._layout
        words = buffer._block.view(torch.int32)
        # The state is as after earlier epochs, in which no item of sums was signalled.
        for name, amount in (
            ("dispatch_begin", 1),
            ("combine_begin", 1),
            ("counts_ready", exchange.peers.num_programs),
            ("rows_ready", exchange.peers.num_programs),
        ):
            begin = layout.offsets[name] // 4
            number = (epoch - 1) * amount
            words[begin : begin + group.world_size] = (number + 2**31) % 2**32 - 2**31
        exchange.state[:2] = (epoch - 1 + 2**31) % 2**32 - 2**31
        buffer._host_barrier()
        run_rounds(buffer, range(6), group)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_memory_grows_with_the_tokens_and_routes_outlive_it() -> None:
    world_tokens = 300
    with EPGroup() as group, opened(NVLinkBuffer, group, max_tokens_per_rank=None) as buffer:
        call = call_of(2, group.rank, group.world_size, group.device)
        early = buffer.dispatch(call)
        results = compute(early, group.rank)
        # Only the last rank has this many tokens.
        num_tokens = world_tokens if group.rank == group.world_size - 1 else 1
        ids = torch.zeros(num_tokens, TOP_K, dtype=torch.int64, device=group.device)
        ids[:, 1] = NUM_LOCAL * group.world_size - 1
        x = torch.arange(num_tokens, device=group.device).remainder(256).to(torch.bfloat16)
        large = DispatchCall(
            hidden_states=x.unsqueeze(1).expand(-1, HIDDEN).contiguous(),
            topk_ids=ids,
            topk_weights=torch.ones(num_tokens, TOP_K, device=group.device),
            flags=BatchFlags.NONE,
        )
        out = buffer.dispatch(large)
        y = buffer.combine(compute(out, group.rank), out.exchange_plan, rows_per=RowsPer.SLOT)[0]
        factors = factor_of(0) + factor_of(NUM_LOCAL * group.world_size - 1)
        assert torch.equal(y, large.unquantized * factors)
        assert torch.equal(combine(buffer, early, results), expected_sums(call, group.world_size))
        again = buffer.cached_dispatch(call.unquantized, early.exchange_plan)
        rows = early.index.row_of_slot.long()
        assert torch.equal(again[rows], early.rows.data[rows])


@pytest.mark.ranks(2)
def test_missing_rank_ends_the_wait_on_all_ranks() -> None:
    with EPGroup() as group, opened(ImpatientBuffer, group) as buffer:
        call = call_of(2, group.rank, group.world_size, group.device)
        if group.rank == 0:
            with pytest.raises(EPTimeout, match="rank 1 did not arrive in the beginning of disp"):
                buffer.dispatch(call)
        group.calls.gather_records({}, phase="rank 0 gave up")
        if group.rank == 1:
            with pytest.raises(EPTimeout, match="rank 0 gave up"):
                buffer.dispatch(call)
        buffer.close()
        # The process and the group continue.
        with opened(NVLinkBuffer, group) as again:
            run_rounds(again, range(1, 2), group)


@pytest.mark.ranks(2)
def test_rank_that_misses_a_combine_is_named() -> None:
    with EPGroup() as group, opened(ImpatientBuffer, group) as buffer:
        impatient = buffer._exchange
        # On CPUs the first kernel may be compiled for longer than a rank waits.
        buffer._exchange = replace(impatient, peers=replace(impatient.peers, max_polls=100_000))
        out = buffer.dispatch(call_of(2, group.rank, group.world_size, group.device))
        buffer._exchange = impatient
        results = compute(out, group.rank)
        if group.rank == 0:
            y = buffer.combine(results, out.exchange_plan, rows_per=RowsPer.SLOT)[0]
            with pytest.raises(EPTimeout, match="rank 1 did not arrive in the beginning of comb"):
                buffer.check()
            assert y.numel() > 0
            assert y.isnan().all()
        group.calls.gather_records({}, phase="rank 0 gave up")


class HastyBuffer(NVLinkBuffer):
    """A buffer whose kernels give up after 1000 polls, about a second, or 400 of a GPU, 0.4 s."""

    polls_per_s: ClassVar[Mapping[str, int]] = {"cpu": 10, "cuda": 4}


class HastyStaticBuffer(NVLinkStaticBuffer):
    """The same buffer with static sizes."""

    polls_per_s: ClassVar[Mapping[str, int]] = HastyBuffer.polls_per_s


DEAD = 1


def without_the_dead(call: DispatchCall) -> DispatchCall:
    """Replace the ids of experts of the dead rank by -1."""
    is_lost = call.topk_ids // NUM_LOCAL == DEAD
    return replace(call, topk_ids=torch.where(is_lost, -1, call.topk_ids))


def call_in_vain(buffer: Buffer, operation: str, call: DispatchCall, early: Dispatched) -> None:
    """Run an operation in which some rank is missing, and the check that reports it."""
    if operation == "dispatch":
        buffer.dispatch(call)
    else:
        assert combine(buffer, early, torch.zeros_like(early.rows.data)).isnan().all()
    buffer.check()


def rows_of_the_dead(buffer: NVLinkBuffer | NVLinkStaticBuffer) -> Tensor:
    """Return a copy of the bytes that the dead rank may write, in all receive buffers."""
    data = torch.stack([each.data for each in buffer.received_rows()])
    return data[:, DEAD * MAX_TOKENS : (DEAD + 1) * MAX_TOKENS].view(torch.uint8)


def check_new_exchange_plans(buffer: NVLinkBuffer, rounds: range, group: EPGroup) -> None:
    for number in rounds:
        call = call_of(number, group.rank, group.world_size, group.device)
        # The dead rank had other flags about gradients.
        out = buffer.dispatch(replace(call, flags=TRAINS))
        assert isinstance(out.exchange_plan, NVLinkNormalExchangePlan)
        assert out.exchange_plan.rows_from[DEAD] == 0
        y = combine(buffer, out, compute(out, group.rank))
        left, sums = without_the_dead(call), buffer._spec.combine_format
        assert torch.equal(y, expected_sums(left, group.world_size, sums))
    buffer.check()


def check_cached_exchange_plan(
    buffer: NVLinkBuffer | NVLinkStaticBuffer, early: Dispatched, call: DispatchCall
) -> None:
    """Check that rows are sent and sums returned as if the dead rank had never owned an expert."""
    exchange_plan = early.exchange_plan
    assert isinstance(exchange_plan, NVLinkNormalExchangePlan)
    if exchange_plan.owns_rows:
        for received in buffer.received_rows():
            # Stores of the rank that were in flight when it was excluded.
            received.data[DEAD * MAX_TOKENS : (DEAD + 1) * MAX_TOKENS] = 7
    rows = buffer.cached_dispatch(call.unquantized, exchange_plan)
    first, count = (int(exchange_plan.row_base[DEAD]), int(exchange_plan.rows_from[DEAD]))
    assert count > 0 or len(exchange_plan.rows_from) > 2, "the test is of something"
    assert not rows[first : first + count].any()
    is_left = without_the_dead(call).topk_ids >= 0
    scalars = torch.ones(len(rows), TOP_K, device=rows.device)
    y, sums = buffer.combine(rows, exchange_plan, rows_per=RowsPer.ROW, row_scalars=scalars)
    owners = torch.where(is_left, call.topk_ids // NUM_LOCAL, -1)
    num_ranks = sum((owners == rank).any(dim=1, keepdim=True).int() for rank in range(3))
    num_ranks = torch.as_tensor(num_ranks)
    assert torch.equal(sums, num_ranks.float().expand(-1, TOP_K))
    x, gradients = call.unquantized, buffer._spec.backward_format
    arrived = dequantize(quantize(x, gradients), x.dtype) if gradients else x
    # Quantising these again changes nothing.
    assert torch.equal(y, arrived * num_ranks)


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("wire", [None, *SUM_FORMATS], ids=str)
@pytest.mark.parametrize("missed", ["dispatch", "combine"])
def test_living_ranks_go_on_without_one_that_missed_a_call(
    num_ranks: int, missed: str, wire: WireFormat | None
) -> None:
    kind, flags = (HastyBuffer, TRAINS) if missed == "dispatch" else (HastyStaticBuffer, NONE)
    formats = {"combine_format": wire, "backward_format": gradients_of(wire)}
    with EPGroup() as group, opened(kind, group, **formats) as buffer:
        call = call_of(2, group.rank, num_ranks, group.device)
        # All ranks take part in this batch, whose exchange plan names the dead rank.
        early = buffer.dispatch(replace(call, flags=flags))
        results = compute(early, group.rank)
        scalars = torch.ones(early.rows.data.shape[0], TOP_K, device=group.device)
        # This combine leaves sums and scalars of the dead rank in memory.
        buffer.combine(
            early.rows.data, early.exchange_plan, rows_per=RowsPer.ROW, row_scalars=scalars
        )
        group.calls.gather_records({}, phase="all have combined")
        if group.rank == 0:
            # The other remaining ranks call exclude_ranks(), and have reached different numbers.
            with pytest.raises(EPTimeout, match=r"ranks? 1.* did not arrive"):
                call_in_vain(buffer, missed, call, early)
        group.calls.gather_records({}, phase="rank 0 has given up")
        if group.rank == 2:
            with pytest.raises(EPTimeout, match="too late: rank 0 gave up waiting for ranks 1, 2"):
                call_in_vain(buffer, missed, call, early)
        if group.rank != DEAD:
            for number in range(buffer._layout.num_buffers):
                # Scales that the dead rank may have sent in part.
                scales = region_rows(buffer._block, buffer._layout, number, "scales")
                scales[DEAD * MAX_TOKENS : (DEAD + 1) * MAX_TOKENS] = 0xFF
            buffer.exclude_ranks([DEAD])
            before = buffer.traffic()
            y = combine(buffer, early, results)
            assert torch.equal(y, expected_sums(without_the_dead(call), num_ranks, wire))
            check_cached_exchange_plan(buffer, early, call)
            check_new_exchange_plans(buffer, range(3, 5), group)
            assert (buffer.traffic() != before) == (num_ranks > 2), "nothing is sent to the dead"
        left = rows_of_the_dead(buffer)
        group.calls.gather_records({}, phase="the living have gone on")
        if group.rank == DEAD:
            # The excluded rank arrives late, learns that it is excluded, and disturbs no other
            # rank.
            with pytest.raises(EPTimeout, match="gave up waiting"):
                call_in_vain(buffer, "dispatch", call, early)
        else:
            if kind is HastyBuffer:
                large = call_of(2, 0, num_ranks, group.device)
                large = replace(
                    large,
                    hidden_states=large.unquantized.repeat(2, 1),
                    topk_ids=large.topk_ids.repeat(2, 1),
                    topk_weights=large.topk_weights.repeat(2, 1),
                )
                with pytest.raises(CapacityError, match=r"without rank 1 .* max_tokens_per_rank"):
                    buffer.dispatch(large)
            check_new_exchange_plans(buffer, range(5, 6), group)
        group.calls.gather_records({}, phase="the dead has heard of it")
        if group.rank != DEAD:
            assert torch.equal(rows_of_the_dead(buffer), left)


def gradients(buffer: Buffer, call: DispatchCall) -> list[Tensor]:
    """Return y, and the gradients of hidden states and router weights."""
    x = call.unquantized.clone().requires_grad_()
    weights = call.topk_weights.clone().requires_grad_()
    call = replace(call, hidden_states=x, topk_weights=weights, flags=TRAINS)
    out = dispatch_rows(buffer, call)
    rows, slot_weights = Sending(buffer=buffer, dtype=x.dtype).with_history(call, out)
    slots = gather_rows(rows.data, out.index)
    handle = Handle(owner=buffer, num_tokens=len(x))
    handle.open(out.exchange_plan, call=1, needs_backward=True)
    results = RowsCombineInput(
        hidden_states=3 * slots * slots,
        rows_per=RowsPer.SLOT,
        slot_weights=slot_weights,
        handle=handle,
    )
    y = combine_rows(buffer, results, torch.bfloat16)
    (y.float() * torch.arange(1, HIDDEN + 1, device=y.device)).sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [y.detach(), x.grad, weights.grad]


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["NVLinkBuffer", "NVLinkStaticBuffer"])
def test_calls_of_one_buffer_take_as_many_sms_as_they_say(backend: str) -> None:
    with EPGroup() as group:
        buffer = group.open_buffer(backend, spec_of())
        # Ranks may have different limits; 200 is more than the number of SMs.
        results = [
            gradients(
                buffer,
                RowTopkCall(
                    **vars(call_of(1, group.rank, group.world_size, group.device)),
                    num_sms=num_sms and num_sms + group.rank,
                ),
            )
            for num_sms in (None, 1, 5, 200, None)
        ]
        buffer.check()
        for found in results[1:]:
            for tensor, wanted in zip(found, results[0], strict=True):
                assert torch.equal(tensor, wanted)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["NVLinkBuffer", "NVLinkStaticBuffer"])
def test_experts_of_rows_come_with_them_as_the_index_has_them(backend: str) -> None:
    with EPGroup() as group:
        buffer = group.open_buffer(backend, spec_of())
        for flags in (BatchFlags.NONE, TRAINS):
            call = call_of(2, group.rank, group.world_size, group.device)
            out = buffer.dispatch(RowTopkCall(**{**vars(call), "flags": flags}))
            assert isinstance(out, RowTopkDispatched)
            wanted = row_topk(out.index, out.slot_weights)
            # Rows that were not received, if any, have no experts in either result.
            for found, each in zip(out.row_topk, wanted, strict=True):
                assert torch.equal(found, each)
        buffer.check()
