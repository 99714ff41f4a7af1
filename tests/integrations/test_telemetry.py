import logging
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor, nn

from epcomm import EPConfig, EPGroup, ExpertParallelMoE
from epcomm.integrations.telemetry import Metric, as_prometheus_text, metrics
from epcomm.platforms import tracing as profiling
from epcomm.platforms.tracing import ranged
from tests.cases.blocks import HIDDEN, qwen3_moe

NUM_RANKS = 2


def make_moe(group: EPGroup, backend: str = "collective") -> ExpertParallelMoE:
    config = EPConfig(mode="normal", backend=backend)
    return ExpertParallelMoE.from_transformers(qwen3_moe().to(group.device), group, config)


def tokens(group: EPGroup, num_tokens: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(group.rank)
    return torch.randn(num_tokens, HIDDEN, generator=generator).to(group.device)


@pytest.mark.ranks(NUM_RANKS)
def test_profiler_shows_every_phase_once(group: EPGroup) -> None:
    moe = make_moe(group)
    with torch.profiler.profile() as profiler:
        moe(tokens(group)).sum().backward()
    counts = {event.key: event.count for event in profiler.key_averages()}
    ranges = {name: count for name, count in counts.items() if name.startswith("epcomm::")}
    # On the thread of the caller, which begins each exchange and waits for it.
    halves = [f"{call}_{half}" for call in ("dispatch", "combine") for half in ("begin", "wait")]
    once = {f"epcomm::{phase}": 1 for phase in ("route", "experts", *halves)}
    assert ranges == once | {"epcomm::backward_wait": 2}


def test_range_is_of_nvtx_where_only_that_may_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    nvtx = SimpleNamespace(rangePushA=said.append, rangePop=lambda: said.append("end"))
    monkeypatch.setattr(profiling, "_nvtx", nvtx)

    @ranged("phase")
    def divide(number: int, *, by: int) -> int:
        said.append("inside")
        return number // by

    assert divide(6, by=2) == 3
    # A range that stays open would enclose all later ranges.
    with pytest.raises(ZeroDivisionError):
        divide(6, by=0)
    assert said == ["epcomm::phase", "inside", "end"] * 2
    with torch.profiler.profile() as profiler:
        divide(6, by=2)
    # The range must not appear twice: emit_nvtx() makes an NVTX range of each record_function.
    assert said[6:] == ["inside"]
    assert "epcomm::phase" in {event.key for event in profiler.key_averages()}


def test_range_costs_no_record_function_if_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_nvtx", None)
    monkeypatch.delattr(profiling, "record_function")
    assert ranged("phase")(lambda: 3)() == 3


@pytest.mark.ranks(NUM_RANKS)
def test_log_tells_choices_once_and_growth(caplog: pytest.LogCaptureFixture) -> None:
    with EPGroup() as group, caplog.at_level(logging.DEBUG, logger="epcomm"):
        moe, same = (make_moe(group, "shared_memory") for _ in range(2))
        chosen = [record for record in caplog.records if record.name.startswith("epcomm.")]
        assert [record.levelname for record in chosen] == ["INFO"]
        text = chosen[0].getMessage()
        assert text.startswith(f"{group.where}: {moe.explain().splitlines()[0]}")
        make_moe(group)
        assert "on backend collective (" in caplog.messages[-1]

        caplog.clear()
        moe(tokens(group))
        grown = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert ("DEBUG", f"rank {group.rank}: rows now has {2**20} B per receive buffer") in grown
        caplog.clear()
        for _ in range(3):
            same(tokens(group)).sum().backward()
        assert not caplog.records
    # A library prints nothing unless logging is configured.
    assert not logging.getLogger("epcomm").handlers


class _Model(nn.Module):
    def __init__(self, group: EPGroup) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make_moe(group), make_moe(group)])


@pytest.mark.ranks(NUM_RANKS)
def test_prometheus_reads_what_stats_say(group: EPGroup) -> None:
    model = _Model(group)
    model.layers[1](tokens(group))
    text = as_prometheus_text(metrics(model))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.documentation for family in families.values())
    assert Counter(family.type for family in families.values()) == {"counter": 5, "gauge": 2}
    shared = {"group": "0", "rank": str(group.rank)}
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, ExpertParallelMoE)
        stats = layer.stats()
        of_layer = {**shared, "layer": f"layers.{number}.experts"}
        read = {
            family.name: [
                sample.value
                for sample in family.samples
                if of_layer.items() <= sample.labels.items()
            ]
            for family in families.values()
        }
        assert read == {
            "epcomm_calls": [number],
            "epcomm_tokens": [stats.num_tokens],
            "epcomm_rows": [stats.num_rows],
            "epcomm_expert_tokens": list(stats.num_tokens_per_expert),
            "epcomm_expert_imbalance": [stats.imbalance],
            "epcomm_max_slots": [stats.max_slots],
            "epcomm_sent_bytes": [],
        }
    # One buffer serves both layers, so its bytes are counted once.
    sent = {
        sample.labels["direction"]: sample.value
        for sample in families["epcomm_sent_bytes"].samples
        if sample.labels.items() >= {**shared, "backend": "collective"}.items()
    }
    traffic = model.layers[1].stats().traffic  # type: ignore[operator]
    assert len(families["epcomm_sent_bytes"].samples) == 3
    assert sent == {
        "dispatch": traffic.dispatch_bytes,
        "combine": traffic.combine_bytes,
        "control": traffic.control_bytes,
    }


def test_prometheus_reads_labels_with_quotes() -> None:
    odd = 'a "quoted" \\ back\nslash'
    metric = Metric(name="number", labels={"layer": odd}, value=1e20, help="One.")
    text = as_prometheus_text([metric, replace(metric, labels={"layer": ""})])
    (family,) = text_string_to_metric_families(text)
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"layer": odd}, 1e20),
        ({"layer": ""}, 1e20),
    ]
