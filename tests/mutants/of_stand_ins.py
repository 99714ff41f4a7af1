"""The mutants that other tests play, as rows of the matrix: those of adapters over deep_ep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from epcomm import EPGroup
from epcomm.registry import buffer_class
from epcomm.testing import buffer_suite, layer_suite
from fakes.deep_ep import install
from fakes.deep_ep.strict_v1 import buffer as strict_buffer
from tests.buffers.deep_ep.test_deep_ep import CASES, LAYER_SCENARIOS, RUNS, buffer_env, layer_env
from tests.mutants.base import Mutant
from tests.testing import test_deep_ep_mutations, test_suites_catch_faults


@dataclass(frozen=True, kw_only=True)
class StandInMutant(Mutant):
    """An adapter over deep_ep with a fault, on the stand-in for the package.

    rows: how they travel, see tests/buffers/test_deep_ep.py.
    """

    rows: str = "bf16"

    @property
    def environment(self) -> str:
        return f"{self.suite} suite, {self.backend} with {self.rows}"

    @property
    def scenarios(self) -> list[str]:
        if self.suite == "buffer":
            return [scenario for backend, scenario in RUNS if backend == self.backend]
        trains = buffer_class(self.backend).caps(CASES[self.backend].mode).trainable
        return [*LAYER_SCENARIOS, *(layer_suite.GRADIENT_SCENARIOS if trains else ())]

    @contextmanager
    def prepared(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, install(CASES[self.backend].package):
            # The real package refuses torch's poison, for it fills beside its stream.
            patch.setattr(strict_buffer, "_check_torch_deterministic", lambda: None)
            yield

    def run_suite(self, scenario: str, group: EPGroup, *, is_whole: bool) -> None:
        if self.suite == "buffer":
            buffer_suite.run_scenario(scenario, buffer_env(self.backend, group, self.rows))
        else:
            layer_suite.run_scenario(scenario, layer_env(self.backend, group))


MUTANTS: list[Mutant] = [
    *(
        StandInMutant(
            broken=case.buffer,
            suite=case.suite,
            scenario=case.scenario,
            tells=case.tells,
            alone=False,
            rows=case.wire,
            worlds=(2,),
        )
        for case in test_deep_ep_mutations.CASES_OF_MISTAKES
    ),
    *(
        Mutant(
            broken=case.buffer,
            suite=case.suite,
            scenario=case.scenario,
            tells=case.tells,
            alone=False,
        )
        for case in test_suites_catch_faults.CASES
    ),
]
