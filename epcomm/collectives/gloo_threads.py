"""Wait at the end of a program until the threads of gloo have nothing left to do.

A thread of gloo may be the last that holds a tensor of an exchange, and needs the interpreter to
let go of it. A thread that asks for the interpreter while it is taken down is ended, in a
destructor, and that aborts the process. dist.destroy_process_group() joins these threads, but not
while anything, such as a buffer of ours, still holds the process group.
"""

from __future__ import annotations

import time
import weakref
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")
# The name that torch gives to threads that run exchanges of gloo.
_NAME = "pt_gloo_runloop"
# Seconds between two looks: enough to get the interpreter, which is free meanwhile.
_LOOK_S = 0.001
# Seconds: reached only on a machine that leaves threads no core.
_LIMIT_S = 2.0


def settle_at_exit(owner: object) -> None:
    """Let the end of the program wait for gloo's threads, if `owner` is alive then. Local."""
    weakref.finalize(owner, _settle_beside, weakref.ref(owner))


def _settle_beside(owner: weakref.ref[object]) -> None:
    # Without the owner its process group is another's to destroy.
    if owner() is not None:
        settle()


def settle() -> None:
    """Wait until the threads sleep, and have not run between two looks. Local.

    Where the system does not tell, one look long.
    """
    before: dict[str, str] | None = None
    deadline_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
        now = _times_of_sleeping()
        if now is not None and now in (before, {}):
            return
        before = now


def _times_of_sleeping() -> dict[str, str] | None:
    """Return how long each of the threads has run; None where one runs, or waits for a core."""
    found = {}
    for task in _TASKS.glob("*") if _TASKS.exists() else ():
        # A thread may end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().strip() == _NAME:
                if (task / "stat").read_text().rpartition(")")[2].split()[0] != "S":
                    return None
                found[task.name] = (task / "schedstat").read_text()
    return found
