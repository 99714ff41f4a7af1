import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SOAK = Path(__file__).parents[2] / "scripts" / "soak.py"
# Seconds for all runs of one kind, on a machine with a load of ten for each core.
LIMIT_S = 600


@pytest.mark.parametrize(
    ("what", "number", "at_once"),
    # Run all programs at the same time, so that their threads compete for the cores.
    [("exits", 3, 3), ("kills", 3, 1)],
)
def test_programs_end_well(what: str, number: int, at_once: int) -> None:
    done = subprocess.run(
        [sys.executable, str(SOAK), what, f"--number={number}", f"--at-once={at_once}"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{what}: {number} of {number} passed" in done.stdout
