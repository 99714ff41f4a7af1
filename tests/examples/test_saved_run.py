from pathlib import Path

import pytest

from examples.comparison import CheckError
from examples.saved_run import RunFacts, check_losses, read_facts, write_facts

FACTS = RunFacts(step=2, num_batches=4, losses=[5.0, 4.0, 3.0, 2.0])


def test_facts_come_back_from_a_folder(tmp_path: Path) -> None:
    write_facts(tmp_path, FACTS)
    assert read_facts(tmp_path) == FACTS


def test_losses_are_compared_with_those_after_the_saved_step() -> None:
    assert check_losses([3.0, 2.0 * (1 + 9e-6)], FACTS, 1e-5) == pytest.approx(9e-6)
    for losses in ([3.0, 2.0 * (1 + 2e-5)], [3.0, float("nan")], [5.0, 4.0]):
        with pytest.raises(CheckError, match="losses after step 2 are"):
            check_losses(losses, FACTS, 1e-5)
