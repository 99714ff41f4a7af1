"""Sums by group of experts: the same bits on any number of ranks, in every mode and backend.

The oracle adds entries one by one, for one token at a time and without any index. Every number of
ranks is compared with it, so all of them agree with one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from epcomm import EPConfig, EPGroup, ExpertWeights, MoESpec, TopKOutput, WireDtype, WireFormat
from epcomm.buffers.collective import all_to_all
from epcomm.dispatchers import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    Dispatcher,
    StandardDispatcher,
)
from epcomm.errors import EPError, ShapeError
from epcomm.ops import group_sums, slots
from epcomm.ops.slots import Members, pack
from epcomm.planning.plan import plan
from epcomm.quantization import dequantize, quantize
from epcomm.records import RowsDispatchOutput
from epcomm.spec import HostLayout
from epcomm.types import RowsPer

H, E, K, TOKENS, M = 64, 16, 6, 22, 22
REPLICAS = 8

NORMAL, LOW_LATENCY, STANDARD = (
    DeepEPNormalDispatcher,
    DeepEPLowLatencyDispatcher,
    StandardDispatcher,
)
WAYS = {
    "collective": (NORMAL, EPConfig(backend="collective")),
    "shared_memory": (NORMAL, EPConfig(backend="shared_memory")),
    "budget": (NORMAL, EPConfig(backend="collective", max_tokens_per_rank=M, max_recv_slots=256)),
    "replicated": (STANDARD, EPConfig(backend="collective", replicated=True)),
    "standard": (STANDARD, EPConfig(backend="collective")),
    "low latency": (LOW_LATENCY, EPConfig(backend="collective", max_tokens_per_rank=M)),
    "low latency, shared_memory": (LOW_LATENCY, EPConfig(backend="shared_memory")),
}
SUM_DTYPES = (WireDtype.FP8_E4M3, WireDtype.MXFP8, WireDtype.NVFP4)
QUANTIZED = [(way, SUM_DTYPES[number % 3]) for number, way in enumerate(WAYS)]
GRADIENTS = {way: SUM_DTYPES[number % 2] for number, way in enumerate(WAYS)}


@dataclass(frozen=True, eq=False)
class Batch:
    """All tokens of all ranks, and an elementwise expert: slope[e] * x."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    grad_y: Tensor
    slope: Tensor
    logical: Tensor

    @classmethod
    @cache
    def make(cls, dtype: torch.dtype) -> Batch:
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        ids = normal(TOKENS, E).argsort(dim=1)[:, :K]
        ids[normal(TOKENS, K) > 1] = -1
        ids[3] = -1
        sums = torch.float64 if dtype is torch.float64 else torch.float32
        return cls(
            x=normal(TOKENS, H).to(dtype),
            ids=ids,
            # Weights of masked entries are not read.
            weights=normal(TOKENS, K).to(sums).masked_fill(ids < 0, float("nan")),
            grad_y=normal(TOKENS, H).to(dtype),
            slope=normal(E).to(dtype),
            logical=torch.cat([normal(E).argsort(), normal(E).argsort()[:REPLICAS]]),
        )

    def entries(self, part: slice, *, placed: bool) -> TopKOutput:
        """Return the entries of some tokens; `placed`: each names one of its expert's replicas."""
        ids, weights = self.ids[part].clone(), self.weights[part].clone()
        if not placed:
            return TopKOutput(topk_ids=ids, topk_weights=weights)
        first = [(self.logical == expert).nonzero()[0] for expert in range(E)]
        last = [(self.logical == expert).nonzero()[-1] for expert in range(E)]
        odd = torch.arange(TOKENS)[part].unsqueeze(1) % 2 == 1
        physical = torch.where(odd, torch.cat(last)[ids], torch.cat(first)[ids])
        return TopKOutput(topk_ids=torch.where(ids < 0, -1, physical), topk_weights=weights)

    def part(self, rank: int, world_size: int) -> slice:
        """Return the tokens of a rank: contiguous, uneven, none on rank 1 of many."""
        borders = [0, 9, 9, 14, 17, 18, 20, 21, TOKENS]
        step = 8 // world_size
        return slice(borders[rank * step], borders[(rank + 1) * step])


def sum_in_groups(
    terms: list[tuple[int, Tensor]],
    groups: int,
    dtype: torch.dtype,
    sum_dtype: WireDtype | None = None,
) -> Tensor:
    """Return the sum of (expert, term in the sum dtype) by the definition."""
    total = torch.zeros(H, dtype=terms[0][1].dtype if terms else torch.float32)
    for group in range(groups):
        partial = torch.zeros_like(total)
        for expert, term in terms:
            if expert * groups // E == group:
                partial = partial + term
        partial = partial.to(dtype)
        if sum_dtype is not None:
            wire = quantize(partial.unsqueeze(0), WireFormat(dtype=sum_dtype))
            partial = dequantize(wire, total.dtype).squeeze(0)
        total = total + partial.to(total.dtype)
    return total.to(dtype)


@cache
def expected(
    batch: Batch,
    groups: int,
    combine_dtype: WireDtype | None = None,
    backward_dtype: WireDtype | None = None,
    *,
    sends_dy: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, dx and the gradients of the router weights; combine_dtype changes y alone.

    sends_dy: the gradients of y are sent to the experts.
    """
    grads = batch.grad_y
    if backward_dtype is not None and sends_dy:
        grads = dequantize(quantize(grads, WireFormat(dtype=backward_dtype)), grads.dtype)
    dtype, sums = batch.x.dtype, batch.weights.dtype
    y, dx, dw = (torch.zeros_like(each) for each in (batch.x, batch.x, batch.weights))
    for token in range(TOKENS):
        forward, backward = [], []
        for k, expert in enumerate(batch.ids[token].tolist()):
            if expert < 0:
                continue
            weight, result = batch.weights[token, k], batch.x[token] * batch.slope[expert]
            forward.append((expert, weight * result.to(sums)))
            of_result = (grads[token].to(sums) * weight).to(dtype)
            backward.append((expert, (of_result * batch.slope[expert]).to(sums)))
            dw[token, k] = (grads[token].to(sums) * result.to(sums)).sum()
        y[token] = sum_in_groups(forward, groups, dtype, combine_dtype)
        dx[token] = sum_in_groups(backward, groups, dtype, backward_dtype)
    return y, dx, dw


def compute(out: RowsDispatchOutput, slope: Tensor) -> Tensor:
    """Return the result of each slot; that of padding is NaN."""
    rows = pack(out.hidden_states.data, out.index)
    slots = torch.arange(rows.shape[0], device=rows.device)
    starts, counts = out.index.first_slot, out.num_tokens_per_expert
    expert = torch.searchsorted(starts[1:].contiguous(), slots, right=True)
    expert = expert.clamp(max=len(counts) - 1)
    is_used = slots - starts[expert] < counts[expert]
    return torch.where(is_used.unsqueeze(1), rows * slope[expert].unsqueeze(1), float("nan"))


def run(
    dispatcher: Dispatcher,
    batch: Batch,
    part: slice,
    rank: int,
    *,
    trains: bool,
    groups: int | None = None,
) -> list[Tensor]:
    """Return y of some tokens, and with `trains` the gradients of x and of the router weights.

    groups: the number of groups where experts are placed and have replicas.
    """
    placed = groups is not None
    topk = batch.entries(part, placed=placed)
    logical = batch.logical if placed else torch.arange(E)
    if placed:
        topk = replace(topk, topk_groups=logical[topk.topk_ids] * groups // E)
    x, weights = batch.x[part].clone().requires_grad_(trains), topk.topk_weights
    weights.requires_grad_(trains)
    local = dispatcher.plan.buffer_spec.num_local_experts
    with torch.set_grad_enabled(trains):
        out = dispatcher.dispatch(x, topk)
        # Combine does not read the tensors of the caller.
        for each in (topk.topk_ids, topk.topk_weights.detach(), topk.topk_groups):
            if each is not None:
                each.zero_()
        results = compute(out, batch.slope[logical[rank * local :][:local]])
        y = dispatcher.combine(out.combine_input(results))
        if trains:
            y.backward(batch.grad_y[part])
    dispatcher.check()
    return [y.detach(), x.grad, weights.grad] if trains else [y]  # type: ignore[list-item]


# The number of groups, and that where experts are placed, which may be below the number of ranks.
GROUPS = {
    torch.bfloat16: (8, 2),
    torch.float16: (4, 2),
    torch.float32: (16, 8),
    torch.float64: (8, 2),
}
CASES = [(way, dtype) for way in WAYS for dtype in (torch.bfloat16, torch.float32)]


@pytest.mark.ranks(1, 2, 4, slow=(8,))
@pytest.mark.parametrize(("way", "dtype"), [*CASES, ("collective", torch.float64)], ids=str)
def test_bits_are_those_of_the_definition(group: EPGroup, way: str, dtype: torch.dtype) -> None:
    kind, config = WAYS[way]
    check_bits(group, kind, config, dtype)


@pytest.mark.ranks(1, 2, 4)
def test_four_groups_have_the_bits_of_the_definition(group: EPGroup) -> None:
    check_bits(group, NORMAL, EPConfig(backend="shared_memory"), torch.float16)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(("way", "combine_dtype"), QUANTIZED, ids=str)
def test_quantised_sums_have_the_bits_of_the_definition(
    group: EPGroup, way: str, combine_dtype: WireDtype
) -> None:
    kind, config = WAYS[way]
    # Low latency over collectives has no gradients.
    backward_dtype = None if way == "low latency" else GRADIENTS[way]
    config = replace(config, combine_dtype=combine_dtype, backward_dtype=backward_dtype)
    check_bits(group, kind, config, torch.bfloat16)


def check_bits(
    group: EPGroup, kind: type[Dispatcher], config: EPConfig, dtype: torch.dtype
) -> None:
    """Compare y and gradients of this rank with the oracle, with experts in order and placed."""
    batch, rank = Batch.make(dtype), group.rank
    config = replace(config, combine_dtype_with_gradients=True)
    part = slice(0, TOKENS) if config.replicated else batch.part(rank, group.world_size)
    # The sums of placed experts are not quantised.
    is_quantized = bool(config.combine_dtype or config.backward_dtype)
    for is_placed, groups in enumerate(GROUPS[dtype][: 1 if is_quantized else None]):
        redundant = REPLICAS if is_placed else 0
        dispatcher = kind(
            group,
            MoESpec(hidden_size=H, num_experts=E + redundant, top_k=K, dtype=dtype),
            replace(config, sum_groups=groups, redundant_experts=redundant or None),
        )
        formats = config.combine_dtype, config.backward_dtype
        found = expected(batch, groups, *formats, sends_dy=not config.replicated)
        wanted = [each[part] for each in found]
        for trains in (False, True)[: 1 + dispatcher.plan.caps.trainable]:
            found = run(
                dispatcher, batch, part, rank, trains=trains, groups=groups if is_placed else None
            )
            for name, mine, theirs in zip(("y", "dx", "dw"), found, wanted, strict=False):
                assert torch.equal(mine, theirs), f"{name}, {groups} groups, placed: {is_placed}"


@pytest.mark.ranks(4, slow=(8,))
@pytest.mark.parametrize("combine_dtype", [None, WireDtype.NVFP4], ids=str)
@pytest.mark.parametrize("hosts", ["neighbours", "apart"])
def test_bits_do_not_depend_on_hosts(hosts: str, combine_dtype: WireDtype | None) -> None:
    """2 hosts of 2 or 4 ranks; ranks of a host are neighbours, or take turns."""
    world_size = torch.distributed.get_world_size()
    host_of_rank = [
        rank * 2 // world_size if hosts == "neighbours" else rank % 2 for rank in range(world_size)
    ]
    with EPGroup() as group:
        # As of a two-dimensional DeviceMesh, which has only the first of the two orders.
        group.hosts = HostLayout.of(host_of_rank)
        config = EPConfig(backend="hierarchical", combine_dtype=combine_dtype)
        if combine_dtype is not None:
            config = replace(config, backward_dtype=WireDtype.MXFP8)
        check_bits(group, NORMAL, config, torch.bfloat16)


def in_steps(sums: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Round the sum of the groups after each addition."""

    def mutant(rows: Tensor, members: Members, weights: Tensor | None = None) -> Tensor:
        if rows.dtype is not torch.bfloat16:
            return sums(rows, members, weights)
        totals = []
        for first, end in zip(
            members.offsets[:-1].tolist(), members.offsets[1:].tolist(), strict=True
        ):
            total = torch.zeros(rows.shape[1], dtype=rows.dtype)
            for member in members.flat[first:end].tolist():
                total = total + rows[member]
            totals.append(total)
        return torch.stack(totals)

    return mutant


def of_rounded_products(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mutant(rows: Tensor, members: Members, weights: Tensor | None) -> Tensor:
        products = rows if weights is None else (rows * weights.unsqueeze(1)).to(rows.dtype)
        return slots.reduce_rows(products, members)

    return mutant


def of_flipped(make: Callable[..., Members]) -> Callable[..., Members]:
    def mutant(*args: object, **options: object) -> Members:
        flipped = (each.flip(1) if isinstance(each, Tensor) else each for each in args)
        return make(*flipped, **options)

    return mutant


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """What is replaced where, and by what it is replaced.

    is_placed: found where experts have replicas, so that the source rank sums.
    """

    owner: object
    name: str
    change: Callable[[Any], Any]
    is_placed: bool = False


MUTANTS = {
    "groups by rank": Mutant(
        owner=all_to_all.SumGroups,
        name="of",
        change=lambda of: lambda *args: replace(of(*args), num_columns=1),
    ),
    "another order of k": Mutant(owner=slots, name="slots_by_row", change=of_flipped),
    "another order of groups": Mutant(owner=all_to_all, name="as_members", change=of_flipped),
    "sums rounded after each group": Mutant(owner=all_to_all, name="reduce_rows", change=in_steps),
    "weights applied before rounding": Mutant(
        owner=group_sums, name="sum_weighted", change=of_rounded_products
    ),
    "another order at the source": Mutant(
        owner=slots, name="as_members", change=of_flipped, is_placed=True
    ),
    "one group at the source": Mutant(
        owner=group_sums,
        name="SourceSums",
        change=lambda make: (
            lambda num_groups, groups, **rest: make(
                num_groups=1, groups=torch.zeros_like(groups), **rest
            )
        ),
        is_placed=True,
    ),
    "groups of physical experts": Mutant(
        owner=group_sums,
        name="SourceSums",
        change=lambda make: (
            lambda entries, groups, **rest: make(entries=entries, groups=groups.flip(1), **rest)
        ),
        is_placed=True,
    ),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_a_fault_of_the_sums_is_found(mutant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Mutant(owner=slots, name="pack", change=lambda same: same)
    if mutant is not None:
        found = MUTANTS[mutant]
        monkeypatch.setattr(found.owner, found.name, found.change(getattr(found.owner, found.name)))
    is_equal, whole = [], slice(0, TOKENS)
    redundant = REPLICAS if found.is_placed else 0
    with EPGroup() as group:
        # In bfloat16, few sums show the order of their float32 additions.
        for dtype in (torch.bfloat16, torch.float32):
            spec = MoESpec(hidden_size=H, num_experts=E + redundant, top_k=K, dtype=dtype)
            config = EPConfig(backend="collective", sum_groups=4)
            dispatcher = NORMAL(group, spec, replace(config, redundant_experts=redundant or None))
            batch, groups = Batch.make(dtype), 4 if found.is_placed else None
            (y,) = run(dispatcher, batch, whole, 0, trains=False, groups=groups)
            is_equal.append(torch.equal(y, expected(batch, 4)[0]))
    assert all(is_equal) is (mutant is None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["collective", "low latency"])
def test_sums_of_rows_are_refused_on_every_rank(group: EPGroup, way: str) -> None:
    kind, config = WAYS[way]
    spec, batch = MoESpec(hidden_size=H, num_experts=E, top_k=K), Batch.make(torch.bfloat16)
    dispatcher, part = kind(group, spec, replace(config, sum_groups=4)), batch.part(group.rank, 2)
    out = dispatcher.dispatch(batch.x[part], batch.entries(part, placed=False))
    results = out.combine_input(compute(out, batch.slope))
    if group.rank == 0:
        rows = out.hidden_states.data
        results = replace(results, hidden_states=rows, rows_per=RowsPer.ROW, slot_weights=None)
    reason = "on rank 0" if group.rank else "ROW but combine sums slots by group .*; pass one row"

    def combine() -> None:
        dispatcher.combine(results)
        dispatcher.check()

    with pytest.raises(ShapeError, match=reason):
        combine()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (EPConfig(sum_groups=3), "sum_groups is 3, expected a divisor of the 16 experts"),
        (EPConfig(sum_groups=1), "sum_groups is 1, expected a multiple of the 2 ranks"),
        (EPConfig(sum_groups=4, backend="deep_ep"), "sums the results itself, in an order that"),
        (EPConfig(sum_groups=4, runner="grouped_mm"), "the bits of a row may depend on other rows"),
        (
            EPConfig(sum_groups=4, backend="nvlink", mode="normal", redundant_experts=4),
            "sum_groups with redundant_experts needs a row for each slot",
        ),
    ],
    ids=["experts", "ranks", "backend", "runner", "placement"],
)
def test_what_cannot_sum_by_group_is_refused_on_every_rank(
    group: EPGroup, config: EPConfig, reason: str
) -> None:
    num_experts = E + (config.redundant_experts or 0)
    spec = MoESpec(hidden_size=H, num_experts=num_experts, top_k=K)
    weights = ExpertWeights(
        gate_up_proj=torch.zeros(num_experts // 2, 16, H, dtype=torch.bfloat16),
        down_proj=torch.zeros(num_experts // 2, H, 8, dtype=torch.bfloat16),
    )
    with pytest.raises(EPError, match=reason) as caught:
        plan(config, spec, group, weights=weights)
    assert "\n" not in str(caught.value)
