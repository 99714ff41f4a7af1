"""Ranks plan alike: what one of them lacks, or got wrong, every rank hears of in one exchange."""

from __future__ import annotations

import pytest
import torch

from epcomm import ConfigError, EPConfig, EPGroup, ExpertWeights, Mode, MoESpec, plan
from epcomm.buffers.base import Availability
from epcomm.buffers.collective import CollectiveBuffer
from epcomm.runners.grouped_mm import GroupedMMRunner

NUM_RANKS = 2
SPEC = MoESpec(hidden_size=16, num_experts=8, top_k=2, dtype=torch.float32)


def weights() -> ExpertWeights:
    return ExpertWeights(
        gate_up_proj=torch.empty(8, 32, 16, device="meta"),
        down_proj=torch.empty(8, 16, 16, device="meta"),
    )


def lacking(*reasons: str) -> Availability:
    return Availability(ok=not reasons, reasons=reasons)


@pytest.mark.ranks(NUM_RANKS)
def test_backend_that_one_rank_lacks_is_rejected_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with EPGroup() as group:
        reasons = ("no cable", "no driver") if group.rank == 1 else ()
        monkeypatch.setattr(CollectiveBuffer, "probe", lambda environment: lacking(*reasons))
        with pytest.raises(ConfigError) as caught:
            plan(EPConfig(mode="normal"), SPEC, group)
        assert "collective: rank 1: no cable; rank 1: no driver; collective_static: has static" in (
            str(caught.value)
        )


@pytest.mark.ranks(NUM_RANKS)
def test_reason_that_all_ranks_share_names_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with EPGroup() as group:
        monkeypatch.setattr(CollectiveBuffer, "probe", lambda environment: lacking("no cable"))
        with pytest.raises(ConfigError, match="collective: no cable; collective_static"):
            plan(EPConfig(mode="normal"), SPEC, group)


@pytest.mark.ranks(NUM_RANKS)
def test_runner_that_one_rank_lacks_is_rejected_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with EPGroup() as group:
        reasons = ("no kernel",) if group.rank == 0 else ()
        monkeypatch.setattr(GroupedMMRunner, "supports", lambda weights: lacking(*reasons))
        chosen = plan(EPConfig(), SPEC, group, weights=weights())
        assert chosen.runner == "reference"
        assert [str(each) for each in chosen.rejected_runners] == ["grouped_mm: rank 0: no kernel"]


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize(
    ("on_rank_1", "message"),
    [
        (EPConfig(max_tokens_per_rank=8), "has a limit of tokens: false on rank 0, true on rank 1"),
        (EPConfig(mode="standard"), 'mode: "auto" on rank 0, "standard" on rank 1'),
        (EPConfig(runner="reference"), 'runner: "auto" on rank 0, "reference" on rank 1'),
    ],
    ids=["phases", "mode", "runner"],
)
def test_ranks_that_ask_for_different_things_all_raise(on_rank_1: EPConfig, message: str) -> None:
    with EPGroup() as group:
        config = on_rank_1 if group.rank == 1 else EPConfig()
        with pytest.raises(ConfigError) as caught:
            plan(config, SPEC, group)
        assert f"plan: ranks disagree on {message}" in str(caught.value)


@pytest.mark.ranks(NUM_RANKS)
def test_error_of_one_rank_is_told_to_the_others() -> None:
    with EPGroup() as group:
        wanted = "fp8_e4m3" if group.rank == 0 else None
        with pytest.raises(ConfigError) as caught:
            plan(EPConfig(dispatch_dtype=wanted), SPEC, group)  # type: ignore[arg-type]
        own = "plan: dispatch_dtype is fp8_e4m3"
        assert str(caught.value).startswith(own if group.rank == 0 else f"plan: rank 0: {own}")
        # The group is usable, and one exchange serves both phases.
        chosen = plan(EPConfig(max_tokens_per_rank=8), SPEC, group)
        assert chosen.decode is not None
        assert (chosen.prefill.mode, chosen.decode.mode) == (Mode.NORMAL, Mode.LOW_LATENCY)
