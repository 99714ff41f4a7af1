"""Records when the calls of a rank have moved their rows, to compare with other events."""

import time
from collections import Counter
from collections.abc import Callable
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch

from epcomm.buffers.collective.all_to_all import RowsBuffer
from epcomm.records import Steps

# Seconds in which a thread on a busy machine makes a call.
LIMIT_S = 60


class Recorder:
    """Counts the calls that have moved their rows, by kind, and those on the caller's thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended: Counter[str] = Counter()
        self.on_caller = 0
        for kind in ("combine", "cached_dispatch"):
            monkeypatch.setattr(RowsBuffer, kind, self._recorded(kind, getattr(RowsBuffer, kind)))
        steps = RowsBuffer.dispatch_steps

        def dispatch_steps(*args: Any) -> Steps[Any]:  # noqa: ANN401
            found = yield from steps(*args)
            self._note("dispatch")
            return found

        monkeypatch.setattr(RowsBuffer, "dispatch_steps", dispatch_steps)

    def _recorded(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            found = call(*args, **kwargs)
            self._note(kind)
            return found

        return run

    def _note(self, kind: str) -> None:
        self.on_caller += current_thread() is main_thread()
        self.ended[kind] += 1

    def compute_until(self, kind: str, number: int) -> None:
        """Compute products until `number` calls of this kind have moved their rows."""
        deadline_s, product = time.monotonic() + LIMIT_S, torch.ones(8, 8)
        while self.ended[kind] < number:
            assert time.monotonic() < deadline_s, f"{kind} waits for wait()"
            product = product @ torch.eye(8)
