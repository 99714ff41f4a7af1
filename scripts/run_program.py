"""Run one program as `python program.py arguments` would, then destroy its process group.

A process that exits with a live process group may abort or hang in a destructor.
launch_multi_rank.sh starts this program on each rank.
"""

import faulthandler
import os
import runpy
import sys
import traceback
from typing import NoReturn

# Seconds that a failed rank has for its cleanup, which may wait for ranks that never answer.
LEAVE_LIMIT_S = 5


def main() -> None:
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    exit_code = _run()
    _destroy_process_group()
    if exit_code:
        _leave(exit_code)


def _run() -> int:
    """Run the program and return its exit code."""
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        if not error.code:
            return 0
        _report_failure(f"exit: {error.code}\n")
        return error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 (KeyboardInterrupt too: report it, then exit)
        _report_failure(traceback.format_exc())
        return 1
    return 0


def _leave(exit_code: int) -> NoReturn:
    if "mpi4py.MPI" in sys.modules:
        # At exit mpi4py would wait in MPI_Finalize for ranks that never call it. Without it, the
        # non-zero exit code makes mpirun end the other ranks.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _report_failure(message: str) -> None:
    rank, num_ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    sys.stdout.flush()
    # One write, so that the messages of several ranks are not interleaved.
    sys.stderr.write(f"rank {rank} of {num_ranks} failed: {message}")
    sys.stderr.flush()
    faulthandler.dump_traceback_later(LEAVE_LIMIT_S, exit=True)


def _destroy_process_group() -> None:
    # A program that never imported torch.distributed has nothing to destroy.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
