"""The committed matrix is of these mutants, and says why each scenario runs on so many ranks."""

from __future__ import annotations

import pytest

from epcomm.testing import buffer_suite, layer_suite
from tests.buffers import test_buffers
from tests.mutants.catalog import ALL_MUTANTS, ROWS, WORLDS
from tests.mutants.matrix import MARKDOWN, Matrix

REMEDY = "run python -m tests.mutants.matrix"


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return Matrix.read()


def test_it_is_of_all_mutants_and_scenarios(matrix: Matrix) -> None:
    for world in WORLDS:
        expected = [mutant.key for mutant in ROWS if world in mutant.worlds]
        assert list(matrix.noticed[world]) == expected, REMEDY
        for mutant in ROWS:
            assert set(matrix.by(mutant, world)) <= set(mutant.scenarios), REMEDY
    assert MARKDOWN.read_text("utf-8") == matrix.as_text(), REMEDY


def test_mutants_are_noticed_where_they_say(matrix: Matrix) -> None:
    for mutant in ALL_MUTANTS:
        noticed = matrix.by(mutant, mutant.world)
        assert mutant.scenario in noticed, mutant.key
        assert not mutant.alone or noticed == [mutant.scenario], mutant.key


def test_each_scenario_alone_notices_a_mutant(matrix: Matrix) -> None:
    suites = {
        "buffer": [*buffer_suite.SCENARIOS],
        "layer": [*layer_suite.SCENARIOS, *layer_suite.GRADIENT_SCENARIOS],
    }
    for suite, scenarios in suites.items():
        without = [name for name in scenarios if not matrix.alone(suite, name, 2)]
        assert not without, suite


@pytest.mark.parametrize(
    ("world", "chosen"), [(1, test_buffers.ON_ONE), (3, test_buffers.ON_THREE)]
)
def test_other_numbers_of_ranks_show_what_two_cannot(
    matrix: Matrix, world: int, chosen: tuple[str, ...]
) -> None:
    beyond = [
        set(matrix.by(mutant, world))
        for mutant in ROWS
        if mutant.suite == "buffer" and matrix.by(mutant, world) and not matrix.by(mutant, 2)
    ]
    assert all(noticed & set(chosen) for noticed in beyond)
    for scenario in chosen:
        others = set(chosen) - {scenario}
        assert any(not noticed & others for noticed in beyond), f"{scenario} shows nothing more"
