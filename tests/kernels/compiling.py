"""Run a program that compiles kernels for a GPU that need not exist, and read its output."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def compiled_by(program: Path, cache: Path) -> dict[str, Any]:
    """Return the JSON that a program prints; kernels of the test process itself are interpreted.

    cache: a folder for what Triton compiles.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": str(REPOSITORY),
    }
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        # A minute and a half of processor time, on a loaded machine.
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
