import re
from collections.abc import Mapping

import pytest
import torch.distributed as dist

from tests.examples.programs import EXAMPLES, run_program

# Host syncs of a call of each path.
PATHS = {
    "fuseep_reference": 1,
    "fused_deep_moe": 0,
    "dispatch_ffn_combine": 0,
    "normal": 1,
    "low_latency": 0,
}
CHOICES = {
    "fused_deep_moe": "mode fuseep on backend fused_deep_moe (FusedDeepMoE), 2 ranks with 2 "
    "experts each; experts computed by fused_deep_moe itself; y is reduced",
    "normal": "mode normal on backend collective (CollectiveBuffer), 2 ranks with 2 experts "
    "each; runner quantized_reference: plain torch, which dequantises rows and matrices unless "
    "they are INT8",
}


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_paths_agree_and_their_costs_are_shown() -> None:
    output = run_program(EXAMPLES / "fuseep_w8a8.py", "--experts", "4", "--max-tokens", "40")
    if dist.get_rank() == 0:
        lines = [line.split() for line in output.splitlines() if re.search(r" 0\.0\d{4} ", line)]
        check_rows({line[0]: line[1:] for line in lines})
        for name, what in CHOICES.items():
            assert re.search(rf"^{name} +{re.escape(what)}$", output, re.MULTILINE), output


def check_rows(rows: Mapping[str, list[str]]) -> None:
    """Check the cells of the table by path; the reference lacks one."""
    assert list(rows) == list(PATHS)
    for name, cells in rows.items():
        to_bf16, to_w8a8 = map(float, cells[:2])
        # Both errors exist: that of rounded activations, and the larger one of rounded activations
        # and weights.
        assert 0.005 < to_w8a8 < to_bf16, name
        # MAX_ERROR of the example.
        assert to_w8a8 <= 0.0245, name
        assert to_bf16 <= 0.03, name
    differences = {name: float(cells[2]) for name, cells in rows.items() if len(cells) == 7}
    assert list(differences) == list(PATHS)[1:]
    assert max(differences.values()) <= 0.01
    # Float32 between the products, as in the reference.
    assert differences["fused_deep_moe"] <= 1e-3
    assert {name: int(cells[-1]) for name, cells in rows.items()} == PATHS
    dispatch = {name: float(cells[-4]) for name, cells in rows.items()}
    combine = {name: float(cells[-3]) for name, cells in rows.items()}
    # The operators send the same rows, and results in 2 bytes an element where the reference has 4.
    assert dispatch["fused_deep_moe"] == dispatch["dispatch_ffn_combine"] > 0
    assert combine["fused_deep_moe"] == combine["dispatch_ffn_combine"] > 0
    # Static sizes are sent in full.
    assert dispatch["low_latency"] > dispatch["normal"] > 0
