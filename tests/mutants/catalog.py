"""All mutants."""

from __future__ import annotations

from tests.mutants import of_batches, of_calls, of_layers
from tests.mutants.base import Mutant

MUTANTS: list[Mutant] = [*of_batches.MUTANTS, *of_calls.MUTANTS, *of_layers.MUTANTS]
WORLDS = sorted({mutant.world for mutant in MUTANTS})
