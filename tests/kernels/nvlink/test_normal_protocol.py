"""The protocol of normal mode in a weak memory model: kernels obey it, and faults are found.

Ranks are threads of this process, which run the kernels as the host's compiler makes them of their
CUDA C++. host_cuda.h delays what is weakly ordered, and runs threads of blocks in random order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import Structure
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from threading import Barrier

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from epcomm.buffers.nvlink.memory import received_rows
from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.kernels.nvlink.common.plan_parts import IndexSizes, NVLinkNormalExchangePlan, PlanBlock
from epcomm.kernels.nvlink.normal import combine, dispatch, program
from epcomm.kernels.nvlink.normal.exchange import NormalExchange, State, kernel_of
from epcomm.kernels.nvlink.normal.program import LoadedKernel, Program
from epcomm.quantization import dequantize, quantize
from epcomm.spec import BufferSpec
from epcomm.types import WireFormat
from tests.kernels.nvlink.host_cuda import HostKernel, build, compiler, source_of
from tests.kernels.nvlink.peers import peer_blocks

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU"),
    pytest.mark.skipif(compiler() is None, reason="no compiler of the host"),
]

CPU = torch.device("cpu")
WORLD_SIZE, MAX_TOKENS, TOP_K, NUM_LOCAL, NUM_BLOCKS = 2, 6, 2, 2, 2
# Rows of two pieces in combine.
HIDDEN = 1032
BF16 = WireFormat.of(torch.bfloat16)
# With one receive buffer, each dispatch reuses the memory of the last.
SPEC = BufferSpec(
    hidden_size=HIDDEN,
    top_k=TOP_K,
    num_local_experts=NUM_LOCAL,
    dispatch_format=BF16,
    hidden_format=BF16,
    max_tokens_per_rank=MAX_TOKENS,
    batches_in_flight=1,
)
QUANTIZED, SCALED_ROWS = (
    replace(SPEC, combine_format=combine.SUM_FORMATS[index]) for index in (0, 2)
)
# The polls of a wait, each of a millisecond.
POLLS = 10_000


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A change of the source of a kernel, the epoch at which rounds begin, and their buffers."""

    old: str
    new: str
    first_epoch: int = 0
    spec: BufferSpec = SPEC


NOTHING = Fault(old="", new="")
FAULTS = {
    "rows and metadata are signalled by relaxed additions": Fault(
        old="add_released(a.table[lane] + signals_at", new="add_relaxed(a.table[lane] + signals_at"
    ),
    "sums are signalled by a relaxed store": Fault(
        old="release(a.table[source] + SUMS_READY_AT",
        new="store_relaxed(a.table[source] + SUMS_READY_AT",
    ),
    "rows are signalled before they are stored": Fault(
        old="meet<3, 32 * WARPS>();\n        if (warp == 0) publish(a, ROWS_READY_AT);",
        new="if (warp == 0) publish(a, ROWS_READY_AT);\n        meet<3, 32 * WARPS>();",
    ),
    "rows are only read when they are signalled": Fault(old="await_stored();", new=""),
    "helpers do not meet before counts are signalled": Fault(
        old="helpers_meet();\n        if (blockIdx.x == gridDim.x - 1 && helper == 32)",
        new="if (blockIdx.x == gridDim.x - 1 && helper == 32)",
    ),
    "planners do not meet after they have marked tokens": Fault(
        old="* GROUP_WORDS + token / 32, bit);\n    }\n    planners_meet();",
        new="* GROUP_WORDS + token / 32, bit);\n    }",
    ),
    "blocks do not wait for the counts of earlier ones": Fault(
        old="acquired_here(a.counted + other) != mark_of(epoch)", new="false"
    ),
    "rows are sent before all ranks have begun": Fault(
        old="if (!wait(a, takes ? a.own + begun_at + 4 * lane : 0, epoch, phase)) return false;",
        new="",
    ),
    "signals of items are compared by order": Fault(
        old="EXACT ? (int)word != mark_of(epoch) :",
        new="EXACT ? (int)(word - (u32)mark_of(epoch)) < 0 :",
        # Compared with this epoch, words of 0 look newer.
        first_epoch=-(2**31) + 1,
    ),
    "codes are read before they are there": Fault(
        old="await_copies<STAGES_OF<From> - 1>();", new="", spec=QUANTIZED
    ),
    "lanes read before the copies of others are there": Fault(
        old="// The copies of all lanes are there.\n                __syncwarp();",
        new="",
        spec=QUANTIZED,
    ),
}


@pytest.fixture
def weak_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Fault], None]]:
    """Run kernels of a faulty source in a weak memory model."""
    seeds = count(1)

    class WeakKernel(HostKernel):
        def launch(self, blocks: int, *arguments: Structure) -> None:
            self._seed = next(seeds)
            super().launch(blocks, *arguments)

    def load(fault: Fault, made: Program, device: torch.device) -> LoadedKernel:
        source = source_of(made)
        return WeakKernel(
            made, build(source.replace(fault.old, fault.new) if fault.old else source)
        )

    def use(fault: Fault) -> None:
        monkeypatch.setattr(program, "load_kernel", partial(load, fault))

    kernel_of.cache_clear()
    yield use
    kernel_of.cache_clear()


class Rank:
    """A rank with separate memory, which peers write."""

    def __init__(self, rank: int, blocks: list[Tensor], first_epoch: int, spec: BufferSpec) -> None:
        self.rank, self.sums = rank, spec.combine_format
        self.layout = NVLinkBuffer.layout_for(spec, WORLD_SIZE)
        self.peers = peer_blocks(
            rank, blocks, self.layout, num_programs=NUM_BLOCKS, max_polls=POLLS
        )
        self.exchange = NormalExchange.of(self.peers)
        self.rows = received_rows(blocks[rank], self.layout, 0, SPEC.hidden_format, HIDDEN).data
        self._begin_at(first_epoch, blocks[rank].view(torch.int32))
        num_rows = self.layout.num_rows
        self.sizes = IndexSizes(
            num_rows=num_rows, num_slots=num_rows * TOP_K, per_expert=None, is_dense=False
        )

    def _begin_at(self, epoch: int, words: Tensor) -> None:
        """Set the numbers of all signals that grow to those before an epoch."""
        if epoch == 0:
            return
        self.exchange.state[[State.DISPATCH_EPOCH, State.COMBINE_EPOCH]] = epoch - 1
        for name, amount in (
            ("dispatch_begin", 1),
            ("combine_begin", 1),
            ("counts_ready", NUM_BLOCKS),
            ("rows_ready", NUM_BLOCKS),
        ):
            begin = self.layout.offsets[name] // 4
            number = ((epoch - 1) * amount + 2**31) % 2**32 - 2**31
            words[begin : begin + WORLD_SIZE] = number

    def _has_rows(self, number: int, plan: NVLinkNormalExchangePlan) -> bool:
        """Return whether the tokens of all ranks for this one are here, in their order."""
        for source in range(WORLD_SIZE):
            x, ids, _ = batch_of(number, source)
            sent = x[(torch.where(ids < 0, -1, ids // NUM_LOCAL) == self.rank).any(dim=1)]
            first = source * MAX_TOKENS
            if int(plan.rows_from[source]) != len(sent):
                return False
            if not torch.equal(self.rows[first : first + len(sent)], sent):
                return False
        return True

    def run_round(self, number: int) -> bool:
        """Dispatch, multiply, and optionally combine; return whether rows and sums are correct."""
        x, ids, weights = batch_of(number, self.rank)
        num_tokens = len(x)
        block = PlanBlock.of(
            SPEC, WORLD_SIZE, CPU, num_tokens, self.sizes, has_budget=True, is_compact=False
        )
        dispatch.dispatch_rows(
            self.exchange,
            x,
            None,
            None,
            buffer_index=0,
            topk=(ids, weights),
            received=block,
            wanted_tokens=num_tokens,
        )
        plan = block.exchange_plan(self.sizes, topk_ids=ids)
        index = plan.index
        if number % 4 == self.rank:
            # The others may be at the next dispatch by now.
            time.sleep(0.003)
        assert index.slots_of_row is not None
        limits = (
            (plan.places, MAX_TOKENS),
            (plan.row_base, self.layout.num_rows),
            (index.slots_of_row, self.sizes.num_slots),
        )
        # With a wrong index, combine would access the memory of other ranks.
        has_rows = all(bool(((each >= -1) & (each < most)).all()) for each, most in limits)
        has_rows = has_rows and self._has_rows(number, plan)
        if number % 3 == 0 or not has_rows:
            return has_rows and not self.peers.report.any()
        results = torch.zeros(self.sizes.num_slots, HIDDEN, dtype=torch.bfloat16)
        for expert in range(NUM_LOCAL):
            first = int(index.first_slot[expert])
            slots = slice(first, first + int(index.num_tokens_per_expert[expert]))
            sources = index.row_of_slot[slots].long().clamp(0, self.layout.num_rows - 1)
            results[slots] = self.rows[sources] * factor_of(self.rank * NUM_LOCAL + expert)
        y = combine.combine_rows(
            self.exchange,
            results,
            plan,
            slot_weights=plan.slot_weights,
            buffer_index=0,
            sums=self.sums,
        )
        expected = torch.zeros(x.shape)
        for rank in range(WORLD_SIZE):
            is_there = (ids >= 0) & (ids // NUM_LOCAL == rank)
            factors = (factor_of(ids) * weights * is_there).sum(dim=1, keepdim=True)
            sent = quantize((x.float() * factors).bfloat16(), self.sums or BF16)
            expected += dequantize(sent, torch.float32)
        return torch.equal(y, expected.bfloat16()) and not self.peers.report.any()


def batch_of(number: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, ids and weights of a rank: small integers, and powers of two."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    num_tokens = int(torch.randint(0, MAX_TOKENS + 1, (), generator=generator))
    num_experts = WORLD_SIZE * NUM_LOCAL
    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(TOP_K).indices
    ids[torch.rand(num_tokens, TOP_K, generator=generator) < 0.2] = -1
    weights = 2.0 ** torch.randint(-1, 2, (num_tokens, TOP_K), generator=generator)
    tokens = torch.randint(1, 16, (num_tokens, 1), generator=generator).float()
    return (tokens + torch.arange(HIDDEN) % 4).bfloat16(), ids, weights


def factor_of(expert: Tensor | int) -> Tensor | int:
    return expert % 3 + 1


def first_wrong_round(fault: Fault, num_rounds: int, spec: BufferSpec = SPEC) -> int | None:
    """Run rounds until one is wrong on some rank; return its number, or None."""
    num_bytes = NVLinkBuffer.layout_for(spec, WORLD_SIZE).num_bytes
    blocks = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(WORLD_SIZE)]

    def run(rank: int) -> int | None:
        mine = Rank(rank, blocks, fault.first_epoch, spec)
        begun.wait()
        for number in range(num_rounds):
            if not mine.run_round(number):
                # This word ends the waits of all ranks.
                for block in blocks:
                    block.view(torch.int32)[0] = rank + 1
                return number
        return None

    begun = Barrier(WORLD_SIZE)
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        found = [number for number in pool.map(run, range(WORLD_SIZE)) if number is not None]
    return min(found, default=None)


@pytest.mark.parametrize("first_epoch", [0, -(2**31) + 1, 2**31 - 3])
def test_kernels_keep_the_protocol_in_a_weak_memory(
    first_epoch: int, weak_kernels: Callable[[Fault], None]
) -> None:
    weak_kernels(NOTHING)
    assert first_wrong_round(Fault(old="", new="", first_epoch=first_epoch), 12) is None


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(replace(SPEC, sum_groups=WORLD_SIZE * NUM_LOCAL), id="sums of groups"),
        pytest.param(QUANTIZED, id="quantised sums"),
        pytest.param(SCALED_ROWS, id="sums with a scale of the row"),
    ],
)
def test_other_sums_keep_the_protocol(
    spec: BufferSpec, weak_kernels: Callable[[Fault], None]
) -> None:
    weak_kernels(NOTHING)
    assert first_wrong_round(NOTHING, 24, spec) is None


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_protocol_are_found(name: str, weak_kernels: Callable[[Fault], None]) -> None:
    fault = FAULTS[name]
    weak_kernels(fault)
    assert first_wrong_round(fault, 100, fault.spec) is not None


def test_each_fault_changes_a_kernel() -> None:
    layout = NVLinkBuffer.layout_for(SPEC, WORLD_SIZE)
    rows = dispatch.RowForm(
        row_bytes=2 * HIDDEN, scale_bytes=0, scale_unit=16, alignment=1, is_planned=True
    )
    sums = combine.SumForm(torch.bfloat16, HIDDEN)
    sources = [
        source_of(each)
        for each in (dispatch.program_of(layout, rows), combine.program_of(layout, sums))
    ]
    for name, fault in FAULTS.items():
        assert any(fault.old in source for source in sources), name
