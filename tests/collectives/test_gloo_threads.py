import hashlib
import threading
import time
from pathlib import Path

import pytest

from epcomm.collectives import gloo_threads

WORK_S, SLEEP_S = 0.3, 30.0


def name_this_thread() -> None:
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system tells of no threads")
def test_a_thread_that_runs_is_waited_for_and_one_that_sleeps_is_not() -> None:
    begun, ended, goes = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        name_this_thread()
        begun.set()
        end_s, block = time.monotonic() + WORK_S, bytes(2**22)
        while time.monotonic() < end_s:
            # Runs without the GIL, like a gloo thread.
            hashlib.sha256(block).digest()
        ended.set()
        goes.wait(SLEEP_S)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    gloo_threads.settle()
    assert ended.is_set()
    start_s = time.monotonic()
    gloo_threads.settle()
    assert time.monotonic() - start_s < WORK_S
    goes.set()
    thread.join()
