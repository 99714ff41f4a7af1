"""Wait at the end of a program until gloo's threads are idle.

A gloo thread may hold the last reference to a tensor of an exchange, and needs the GIL to release
it. If the interpreter shuts down at that moment, Python ends the thread inside a destructor, which
aborts the process. dist.destroy_process_group() joins these threads, but not while another object,
such as one of our buffers, still holds the process group.
"""

import atexit
import time
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")
# The name of torch's threads that run exchanges of gloo.
_NAME = "pt_gloo_runloop"
# Seconds between two polls. A thread that waits for the GIL wakes every 5 ms to request it, which
# its run time shows, so it is not mistaken for an idle thread.
_LOOK_S = 0.015
# Most seconds to wait; reached only if the threads get no core.
_LIMIT_S = 2.0


def settle_at_exit() -> None:
    """Call settle() once at the end of the program, before the interpreter shuts down. Local."""
    atexit.unregister(settle)
    atexit.register(settle)


def settle() -> None:
    """Wait until the threads sleep and have not run between two polls. Local.

    Without /proc it waits for one poll.
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
    """Return the run time of each thread, or None if one is running or waits for a core."""
    found = {}
    for task in _TASKS.glob("*") if _TASKS.exists() else ():
        # A thread may end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().strip() == _NAME:
                if (task / "stat").read_text().rpartition(")")[2].split()[0] != "S":
                    return None
                found[task.name] = (task / "schedstat").read_text()
    return found
