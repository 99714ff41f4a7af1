"""All mutants."""

from __future__ import annotations

from tests.mutants import of_batches, of_calls, of_layers, of_stand_ins
from tests.mutants.base import Mutant

# What test_mutants.py plays, and what other tests do.
MUTANTS: list[Mutant] = [*of_batches.MUTANTS, *of_calls.MUTANTS, *of_layers.MUTANTS]
ALL_MUTANTS: list[Mutant] = [*MUTANTS, *of_stand_ins.MUTANTS]
# The rows of the matrix: of two that differ in what the test says, one.
ROWS: list[Mutant] = list({mutant.key: mutant for mutant in ALL_MUTANTS}.values())
# Numbers of ranks that the matrix looks at.
WORLDS = (1, 2, 3, 4)
