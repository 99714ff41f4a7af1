"""What a mutant is: a fault that is put into the library for a test, and who must notice it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, Mode
from epcomm.testing import buffer_suite, layer_suite

# Seconds that a rank waits for the others, which may be somewhere else when one has noticed.
PATIENCE_S = 1.25


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault, and the scenario that must notice it.

    broken: a subclass with the fault, of a buffer or of ExpertParallelExperts.
    suite: buffer | layer.   scenario, world: where it is noticed.   tells: what the failure says.
    dtype: of rows, where the buffer takes one alone.
    """

    broken: type[Any]
    suite: str = "buffer"
    scenario: str
    world: int = 2
    tells: str
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.broken.__name__

    @property
    def breaks_layer(self) -> bool:
        """Whether a layer is broken, on a whole buffer."""
        return issubclass(self.broken, ExpertParallelExperts)

    @property
    def whole(self) -> type[Any]:
        """What is broken, as it is in the library."""
        return next(base for base in self.broken.__mro__ if base.__module__.startswith("epcomm."))

    def run(self, group: EPGroup) -> None:
        """Run the scenario with this fault. Collective.

        Raises what the scenario raises where it notices.
        """
        with pytest.MonkeyPatch.context() as patch:
            if not self.breaks_layer:
                # In place of the whole buffer, the registry finds the broken one.
                module = import_module(self.whole.__module__)
                patch.setattr(module, self.whole.__name__, self.broken)
            if self.suite == "buffer":
                env = buffer_suite.BufferEnv(
                    group=group, backend=self.whole.__name__, mode=Mode.NORMAL, dtype=self.dtype
                )
                buffer_suite.run_scenario(self.scenario, env)
            else:
                self._run_layer(group)

    def _run_layer(self, group: EPGroup) -> None:
        config = EPConfig(mode="normal", backend="collective", timeout_s=PATIENCE_S)
        kind = self.broken if self.breaks_layer else ExpertParallelExperts
        env = replace(
            layer_suite.pipeline_env(group, config),
            make_layer=lambda weights, top_k: kind(weights, group, config, top_k=top_k),
        )
        layer_suite.run_scenario(self.scenario, env)
