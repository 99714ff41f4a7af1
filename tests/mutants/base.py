"""What a mutant is: a fault that is put into the library for a test, and who must notice it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, Mode
from epcomm.buffers.collective.all_to_all import CollectiveBuffer
from epcomm.registry import buffer_class
from epcomm.testing import buffer_suite, layer_suite
from epcomm.types import WireFormat

# Seconds that a rank waits for the others, which may be somewhere else when one has noticed.
PATIENCE_S = 1.25


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault, and the scenario that must notice it.

    broken: a subclass with the fault, of a buffer or of ExpertParallelExperts.
    suite: buffer | layer.   scenario, world: where it is noticed.   tells: what the failure says.
    alone: no other scenario of the suite notices it on so many ranks.
    mode: that the buffer serves.   wire: of rows towards the experts, None for those of the batch.
    dtype: of rows, where the buffer takes one alone.
    few: the scenarios to look at, where each takes long; else all.
    worlds: numbers of ranks that the matrix looks at.
    """

    broken: type[Any]
    suite: str = "buffer"
    scenario: str
    world: int = 2
    tells: str
    alone: bool = True
    mode: Mode = Mode.NORMAL
    wire: WireFormat | None = None
    dtype: torch.dtype | None = None
    few: tuple[str, ...] = ()
    worlds: tuple[int, ...] = (1, 2, 3, 4)

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.broken.__name__

    @property
    def key(self) -> str:
        """The mutant in its suite, which may be one of two."""
        return f"{self.name} in the {self.suite} suite"

    @property
    def says(self) -> str:
        """The fault in a sentence."""
        return (self.broken.__doc__ or "").partition("\n")[0]

    @property
    def breaks_layer(self) -> bool:
        """Whether a layer is broken, on a whole buffer."""
        return issubclass(self.broken, ExpertParallelExperts)

    @property
    def whole(self) -> type[Any]:
        """What is broken, as it is in the library."""
        return next(base for base in self.broken.__mro__ if base.__module__.startswith("epcomm."))

    @property
    def backend(self) -> str:
        """The class of the buffer that everything runs on."""
        return CollectiveBuffer.__name__ if self.breaks_layer else self.whole.__name__

    @property
    def scenarios(self) -> list[str]:
        """Those of its suite that have something to test of its backend."""
        if self.few:
            return [*self.few]
        if self.suite == "layer":
            return [*layer_suite.SCENARIOS, *layer_suite.GRADIENT_SCENARIOS]
        caps = buffer_class(self.backend).caps(self.mode)
        return [n for n in buffer_suite.SCENARIOS if buffer_suite.tests_anything(n, caps)]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place of the whole buffer, the registry finds the broken one."""
        if self.breaks_layer:
            yield
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(import_module(self.whole.__module__), self.backend, self.broken)
            yield

    @property
    def environment(self) -> str:
        """What scenarios run on, in words."""
        wire = f" with {self.wire}" if self.wire else ""
        return f"{self.suite} suite, {self.backend}, {self.mode.value}{wire}"

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """What a group must be made in."""
        yield

    def run(self, scenario: str, group: EPGroup, *, is_whole: bool = False) -> None:
        """Run a scenario of the suite with this fault, or without it. Collective.

        Raises what the scenario raises where it notices.
        """
        with nullcontext() if is_whole else self.installed():
            self.run_suite(scenario, group, is_whole=is_whole)

    def run_suite(self, scenario: str, group: EPGroup, *, is_whole: bool) -> None:
        """Run a scenario on what the registry finds."""
        if self.suite == "buffer":
            env = buffer_suite.BufferEnv(
                group=group,
                backend=self.backend,
                mode=self.mode,
                wire=self.wire,
                dtype=self.dtype,
            )
            buffer_suite.run_scenario(scenario, env)
        else:
            config = EPConfig(mode=self.mode, backend="collective", timeout_s=PATIENCE_S)
            env = layer_suite.pipeline_env(group, config)
            kind = self.broken if self.breaks_layer and not is_whole else ExpertParallelExperts
            layer_suite.run_scenario(
                scenario,
                replace(
                    env,
                    make_layer=lambda weights, top_k: kind(weights, group, config, top_k=top_k),
                ),
            )
