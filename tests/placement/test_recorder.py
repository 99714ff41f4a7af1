from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from epcomm import ConfigError, EPConfig, EPGroup, ExpertParallelMoE
from epcomm.placement.recorder import ExpertLoad, LoadRecorder, load_table, loads_of_ranks
from tests.cases.blocks import HIDDEN, NUM_EXPERTS, qwen3_moe

NUM_RANKS = 2
CPU = torch.device("cpu")
# The reference, and the gate kernel in the interpreter.
ROUTERS = ["reference", "triton"]


def tokens(rank: int, call: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * call + rank)
    return torch.randn(3 + rank, HIDDEN, generator=generator).to(device)


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("router", ROUTERS)
def test_windows_of_all_ranks_hold_what_was_routed(router: str, group: EPGroup) -> None:
    if router == "triton":
        pytest.importorskip("triton")
    config = EPConfig(mode="normal", router=router, record_load=True)
    moe = ExpertParallelMoE.from_transformers(qwen3_moe().to(group.device), group, config)
    recorder = LoadRecorder({"block": moe.load_table}, max_windows=2)
    expected = []
    for call in range(3):
        x = tokens(group.rank, call, group.device).requires_grad_()
        y = moe(x) if call else checkpoint(moe, x, use_reentrant=False)
        # Recomputes the first call, and counts it once.
        y.square().sum().backward()  # type: ignore[union-attr]
        recorder.end_window()
        seen: list[list[int] | None] = [None] * NUM_RANKS
        dist.all_gather_object(seen, moe.route(x)[1].topk_ids.flatten().tolist())
        counts = Counter(expert for ids in seen for expert in ids or ())
        expected.append(tuple(counts[expert] for expert in range(NUM_EXPERTS)))
    moe(tokens(group.rank, 3, group.device))
    load = recorder.gather(group.calls)
    # The first window was dropped, and the last has not ended.
    assert load == ExpertLoad(num_ranks=NUM_RANKS, windows_by_layer={"block": tuple(expected[1:])})
    assert load.total("block") == tuple(map(sum, zip(*expected[1:], strict=True)))
    assert ExpertLoad.from_json(load.as_json()) == load


@pytest.mark.ranks(NUM_RANKS)
def test_stats_tell_the_imbalance_of_ranks_and_only_where_load_is_recorded(group: EPGroup) -> None:
    block = qwen3_moe().to(group.device)
    moe = ExpertParallelMoE.from_transformers(block, group, EPConfig(record_load=True))
    assert moe.stats().rank_imbalance == 1.0
    x = tokens(group.rank, 0, group.device)
    moe(x)
    ranks = moe.route(x)[1].topk_ids.flatten() // (NUM_EXPERTS // NUM_RANKS)
    counts = torch.bincount(ranks, minlength=NUM_RANKS)
    stats = moe.stats()
    assert stats.rank_load.tolist() == counts.tolist()
    assert stats.rank_imbalance == counts.max().item() * NUM_RANKS / counts.sum().item()

    silent = ExpertParallelMoE.from_transformers(block, group)
    silent(x)
    assert silent.stats().rank_load is None
    with pytest.raises(ConfigError, match=r"record_load is False .* set EPConfig\(record_load"):
        _ = silent.load_table


@pytest.mark.ranks(NUM_RANKS)
def test_ranks_with_other_windows_are_refused_on_all(group: EPGroup) -> None:
    recorder = LoadRecorder({"block": load_table(4, CPU)})
    assert recorder.gather(group.calls).windows_by_layer == {"block": ()}
    for _ in range(group.rank):
        recorder.end_window()
    with pytest.raises(ConfigError, match="windows"):
        recorder.gather(group.calls)


@pytest.mark.ranks(NUM_RANKS)
def test_tables_that_were_zeroed_are_refused_on_all_ranks(group: EPGroup) -> None:
    table = load_table(4, group.device)
    recorder = LoadRecorder({"block": table})
    table += 5
    recorder.end_window()
    if group.rank == 1:
        table.zero_()
    recorder.end_window()
    with pytest.raises(ConfigError, match="counts of a window are below 0"):
        recorder.gather(group.calls)


def test_copies_share_the_load_of_their_expert() -> None:
    load = torch.tensor([6, 3, 2, 1])
    assert loads_of_ranks(load, num_ranks=2).tolist() == [9.0, 3.0]
    placed = loads_of_ranks(load, num_ranks=2, physical_to_logical=torch.tensor([0, 1, 3, 0, 2, 0]))
    assert placed.tolist() == [2.0 + 3.0 + 1.0, 2.0 + 2.0 + 2.0]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "tables is empty, expected the load of a layer"),
        ({"block": torch.zeros(4)}, "the table of 'block' is Tensor, expected an int64 tensor"),
    ],
)
def test_what_is_no_table_is_refused(tables: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadRecorder(tables)
    with pytest.raises(ConfigError, match="max_windows is 0, expected at least 1"):
        LoadRecorder({"block": load_table(4, CPU)}, max_windows=0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"ranks": 2, "layers": {}}',
        '{"format": "epcomm expert load 1", "ranks": 0, "layers": {}}',
        '{"format": "epcomm expert load 1", "ranks": 2, "layers": {"a": [[1, -1]]}}',
        '{"format": "epcomm expert load 1", "ranks": 2, "layers": {"a": [[1], [1, 2]]}}',
        '{"format": "epcomm expert load 1", "ranks": 2, "layers": {"a": [1]}}',
    ],
)
def test_text_that_is_no_load_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the text is not the load of experts, expected what"):
        ExpertLoad.from_json(text)
