"""Each mutant is noticed by its scenario, which passes without it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from epcomm import EPConfig, EPGroup
from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.testing import layer_suite
from tests.mutants import of_batches, of_calls, of_layers
from tests.mutants.base import Mutant

MUTANTS: list[Mutant] = [*of_batches.MUTANTS, *of_calls.MUTANTS, *of_layers.MUTANTS]


@pytest.fixture(scope="module", autouse=True)
def whole_layer() -> None:
    """Run a layer without a fault: what it imports takes longer than ranks with a mutant wait."""
    with EPGroup() as group:
        config = EPConfig(mode="normal", backend="collective")
        layer_suite.run_scenario("uneven", layer_suite.pipeline_env(group, config))


def failures_of(mutant: Mutant) -> list[str]:
    """What each rank says of the mutant's scenario. Collective."""
    failure = ""
    try:
        with EPGroup(dist.new_group()) as group:
            # Seconds. On a busy machine opening a buffer takes more than one; opening NVLink's,
            # which imports Triton, takes more than four. Its mutants fail without a timeout.
            group.limit_waits(30.0 if issubclass(mutant.broken, NVLinkBuffer) else 4.0)
            mutant.run(group)
    except Exception as error:  # noqa: BLE001  (a fault may end in any)
        failure = f"{type(error).__name__}: {error}"
    failures = [""] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return failures


def check_noticed(mutant: Mutant) -> None:
    failures = failures_of(mutant)
    assert any(mutant.tells in text for text in failures if text), failures


def on(world: int) -> pytest.MarkDecorator:
    mutants = [mutant for mutant in MUTANTS if mutant.world == world]
    return pytest.mark.parametrize(
        "mutant", mutants, ids=lambda mutant: f"{mutant.name}-{mutant.suite}"
    )


@pytest.mark.ranks(2)
@on(2)
def test_mutant_is_noticed(mutant: Mutant) -> None:
    check_noticed(mutant)


@pytest.mark.ranks(3)
@on(3)
def test_mutant_of_three_ranks_is_noticed(mutant: Mutant) -> None:
    check_noticed(mutant)
