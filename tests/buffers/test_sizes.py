from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor

from epcomm import EPConfig, EPGroup, MoESpec, TopKOutput, plan
from epcomm.buffers.sizes import CallShape
from epcomm.dispatchers.dispatcher import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    Dispatcher,
    StandardDispatcher,
)
from epcomm.ops.slots import slots_by_row
from epcomm.planning.plans import PhasePlan
from epcomm.records import Handle

NUM_RANKS = 2
MAX_TOKENS = 6


@dataclass(frozen=True)
class Case:
    """A buffer, given by the dispatcher and the configuration that select it."""

    dispatcher: type[Dispatcher]
    config: EPConfig

    @property
    def is_replicated(self) -> bool:
        return self.config.replicated


CONFIG = EPConfig(
    backend="collective", max_tokens_per_rank=MAX_TOKENS, combine_dtype_with_gradients=True
)
CASES = {
    "collective": Case(DeepEPNormalDispatcher, CONFIG),
    "budget": Case(DeepEPNormalDispatcher, replace(CONFIG, max_recv_slots=40)),
    "low_latency": Case(DeepEPLowLatencyDispatcher, CONFIG),
    "all_gather": Case(StandardDispatcher, CONFIG),
    "replicated": Case(StandardDispatcher, replace(CONFIG, replicated=True)),
}


def routing(
    source: int, num_tokens: int, num_experts: int, top_k: int, device: torch.device
) -> TopKOutput:
    """Return random distinct experts for each token; some entries are -1."""
    generator = torch.Generator().manual_seed(source)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    topk_ids = scores.topk(top_k, dim=1).indices
    topk_ids[::3, 0] = -1
    return TopKOutput(
        topk_ids=topk_ids.to(device), topk_weights=torch.ones(num_tokens, top_k).to(device)
    )


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("combine_dtype", [None, "mxfp8"])
@pytest.mark.parametrize("sum_groups", [None, 2, 6])
@pytest.mark.parametrize(
    ("name", "has_gradients"),
    [(name, False) for name in CASES] + [(name, True) for name in CASES if name != "low_latency"],
)
def test_plan_counts_the_bytes_that_leave_a_rank(
    name: str,
    has_gradients: bool,
    sum_groups: int | None,
    combine_dtype: str | None,
    group: EPGroup,
) -> None:
    case = CASES[name]
    with torch.set_grad_enabled(has_gradients):
        # Odd sizes: a row of 37 elements and 3 ids and weights has two gaps.
        spec = MoESpec(hidden_size=37, num_experts=6, top_k=3, dtype=torch.bfloat16)
        sources = [0 if case.is_replicated else rank for rank in range(NUM_RANKS)]
        topks = [routing(source, 3 + 2 * source, 6, 3, group.device) for source in sources]
        config = replace(case.config, sum_groups=sum_groups, combine_dtype=combine_dtype)
        config = replace(config, backward_dtype=combine_dtype if has_gradients else None)
        dispatcher = case.dispatcher(group, spec, config)
        assert dispatcher.plan.backend == "collective"
        mine = topks[group.rank]
        x = torch.zeros(
            len(mine.topk_ids),
            37,
            dtype=spec.dtype,
            device=group.device,
            requires_grad=has_gradients,
        )
        out = dispatcher.dispatch(x, mine)
        rows = torch.zeros(out.num_slots, 37, dtype=spec.dtype, device=group.device)
        y = dispatcher.combine(out.combine_input(rows * out.slot_weights[:, None].to(rows.dtype)))
        ids = [topk.topk_ids for topk in topks]
        group_size = None if sum_groups is None else 6 // sum_groups
        call = CallShape.of(ids, group.rank, num_local_experts=3, group_size=group_size)
        expected = dispatcher.plan.wire_bytes(call)
        assert expected.combine_bytes > 0
        if has_gradients:
            y.float().sum().backward()
            expected += dispatcher.plan.wire_bytes(call, backward=True)
        assert dispatcher.traffic() == expected


def tensors_of(record: object) -> Iterator[Tensor]:
    """Return all tensors in a record and in its nested records."""
    if isinstance(record, Tensor):
        yield record
    elif is_dataclass(record):
        for field in fields(record):
            yield from tensors_of(getattr(record, field.name))
    elif isinstance(record, Handle):
        yield from tensors_of(record.exchange_plan)


def owned_bytes(record: object) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors_of(record)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# The regions that a record of dispatch owns until its last use.
KEPT = {
    "collective": {"send order", "received rows", "slot index"},
    "budget": {"received rows", "slot index"},
    "low_latency": {"received rows", "slot index"},
    "all_gather": {"received rows", "padding map", "slot index"},
    "replicated": {"slot index"},
}


# Weights of slots are float64 for such rows, with exact and static sizes.
OWNED = [(name, torch.bfloat16) for name in CASES]
OWNED += [(name, torch.float64) for name in ("collective", "low_latency")]


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize(("name", "dtype"), OWNED)
def test_regions_are_what_the_record_of_the_largest_call_owns(
    name: str, dtype: torch.dtype, group: EPGroup
) -> None:
    case = CASES[name]
    with torch.no_grad():
        # With one expert per rank and K = W, every token is sent to every rank, which is the
        # largest call.
        spec = MoESpec(hidden_size=37, num_experts=NUM_RANKS, top_k=NUM_RANKS, dtype=dtype)
        dispatcher = case.dispatcher(group, spec, case.config)
        x = torch.zeros(MAX_TOKENS, 37, dtype=spec.dtype, device=group.device)
        topk_ids = torch.arange(NUM_RANKS, device=group.device).repeat(MAX_TOKENS, 1)
        out = dispatcher.dispatch(
            x,
            TopKOutput(
                topk_ids=topk_ids, topk_weights=torch.ones(topk_ids.shape, device=group.device)
            ),
        )
        regions = {region.name: region.max_bytes for region in dispatcher.plan.regions()}
        kept = sum(regions[region] or 0 for region in KEPT[name])
        # Combine makes the slots of each row. Replicated rows are the caller's tensor.
        owned = owned_bytes(out) + owned_bytes(slots_by_row(out.index))
        assert owned - (x.nbytes if case.is_replicated else 0) == kept


def phase_of(case: Case, **changes: int | str) -> PhasePlan:
    """Plan with W = 4, H = 64, K = 2, L = 2.

    A row of dispatch is 64 elements of 2 B, 2 ids and 2 weights: 144 B.
    """
    spec = MoESpec(hidden_size=64, num_experts=8, top_k=2)
    config = {"max_tokens_per_rank": 16, **changes}
    mode = case.dispatcher.mode
    return plan(
        EPConfig(mode=mode, backend="collective", replicated=case.is_replicated, **config),
        spec,
        world_size=4,
    ).prefill


# One token on each rank, and the most on one rank: R = 64 rows, C = 128 slots.
REGIONS = {
    "collective": {
        # 4 headers sent and 4 received, of 139 words.
        "headers": (None, 8896),
        "send order": (40, 648),
        "sent rows": (288, 4608),
        "received rows": (288, 9216),
        # A row: 2 x 4 + 8; a slot: 4 + 4 + 8; tables: 32 B. Total: 64 x 16 + 128 x 16 + 32.
        "slot index": (64, 3104),
        "packed slots": (288, 18432),
        "expert results": (256, 16384),
        "partial sums": (256, 8192),
        "returned rows": (256, 4096),
    },
    # R = 68 rows: 16 rows and a header from each rank.
    "low_latency": {
        "sent message": (None, 2448),
        "received rows": (None, 9792),
        # 68 x 16 + 128 x 16 + 32, plus an extra slot, an extra offset and a flag.
        "slot index": (None, 3181),
        "packed slots": (None, 18432),
        "expert results": (None, 16384),
        "partial sums": (None, 8704),
        "returned rows": (None, 8704),
    },
}


@pytest.mark.parametrize("name", REGIONS)
def test_memory_by_region(name: str) -> None:
    found = {
        region.name: (region.bytes_per_token, region.max_bytes)
        for region in phase_of(CASES[name]).regions()
    }
    assert found == REGIONS[name]


def test_quantised_sums_take_memory_before_and_after_the_exchange() -> None:
    phase = phase_of(CASES["low_latency"], combine_dtype="mxfp8")
    # 68 rows of 64 elements, 2 scales, and a gap to a multiple of 16 B; of 64 elements of 4 B.
    quantised = {"quantised sums": 5440, "returned rows": 5440, "dequantised sums": 17408}
    plain = {name: most for name, (_, most) in REGIONS["low_latency"].items()}
    assert {region.name: region.max_bytes for region in phase.regions()} == plain | quantised


def test_budget_bounds_the_slots() -> None:
    regions = {r.name: r.max_bytes for r in phase_of(CASES["budget"], max_recv_slots=40).regions()}
    assert regions["packed slots"] == 40 * 144
    assert regions["expert results"] == 40 * 128
    # 68 rows x 16 + 40 slots x 16 + 32 + 13: the host reserves no more members than slots.
    assert regions["slot index"] == 1773
