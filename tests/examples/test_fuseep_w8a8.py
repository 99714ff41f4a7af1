"""A real launch of the example on two ranks, one of them without tokens."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
COMMAND = [
    str(REPO / "scripts" / "launch_multi_rank.sh"),
    "2",
    str(REPO / "examples" / "fuseep_w8a8.py"),
    *("--experts", "4", "--max-tokens", "40"),
]
# The example takes 5 s on an idle machine with two cores.
LIMIT_S = 100
# Host syncs of a call of each path.
PATHS = {
    "fuseep_reference": 1,
    "fused_deep_moe": 0,
    "dispatch_ffn_combine": 0,
    "normal": 1,
    "low_latency": 0,
}

Rows = Mapping[str, list[str]]


@pytest.fixture(scope="module")
def output() -> str:
    # A fixed width, because the width of the terminal changes the output.
    environment = os.environ | {"PYTHON": sys.executable, "COLUMNS": "80"}
    done = subprocess.run(
        COMMAND, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def rows(output: str) -> Rows:
    """Return the cells of the table by path, the empty one of the reference left out."""
    cells = [line.split() for line in output.splitlines() if re.search(r" 0\.0\d{4} ", line)]
    return {row[0]: row[1:] for row in cells}


def test_every_path_is_near_float64_and_its_weights_cost_more(rows: Rows) -> None:
    assert list(rows) == list(PATHS)
    for name, cells in rows.items():
        to_bf16, to_w8a8 = map(float, cells[:2])
        # Both errors exist: that of rounded activations, and the larger one of rounded activations
        # and weights.
        assert 0.005 < to_w8a8 < to_bf16, name
        # MAX_ERROR of the example.
        assert to_w8a8 <= 0.0245, name
        assert to_bf16 <= 0.03, name


def test_paths_differ_by_rounding_alone(rows: Rows) -> None:
    differences = {name: float(cells[2]) for name, cells in rows.items() if len(cells) == 7}
    assert list(differences) == list(PATHS)[1:]
    assert max(differences.values()) <= 0.01
    # Float32 between the products, as in the reference.
    assert differences["fused_deep_moe"] <= 1e-3


def test_bytes_and_host_reads_are_those_of_the_paths(rows: Rows) -> None:
    assert {name: int(cells[-1]) for name, cells in rows.items()} == PATHS
    dispatch = {name: float(cells[-4]) for name, cells in rows.items()}
    combine = {name: float(cells[-3]) for name, cells in rows.items()}
    # The operators send the same rows, and results in 2 bytes an element where the reference has 4.
    assert dispatch["fused_deep_moe"] == dispatch["dispatch_ffn_combine"] > 0
    assert combine["fused_deep_moe"] == combine["dispatch_ffn_combine"] > 0
    # Static sizes are sent in full.
    assert dispatch["low_latency"] > dispatch["normal"] > 0


def test_choice_of_every_path_is_explained(output: str) -> None:
    for name, what in {
        "fused_deep_moe": "mode fuseep on backend fused_deep_moe (FusedDeepMoE), 2 ranks with 2 "
        "experts each; experts computed by fused_deep_moe itself; y is reduced",
        "normal": "mode normal on backend collective (CollectiveBuffer), 2 ranks with 2 experts "
        "each; runner quantized_reference",
    }.items():
        assert re.search(rf"^{name} +{re.escape(what)}$", output, re.MULTILINE), output
