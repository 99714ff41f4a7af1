"""What calls of deep_ep hide behind a product, and the tables of what they take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.measuring.deep_ep_overlap import Hidden
from benchmarks.readme_table import fill

RESULT = {
    "benchmark": "deep_ep",
    "configuration": {"ranks": 2, "hidden": 7168, "top_k": 8, "experts": 256, "num_sms": 24},
    "hardware": {"accelerator": "A GPU"},
    "versions": {"torch": "2.11"},
    "command": "torchrun",
    "slowest_rank_us": {"combine, T=4096": 312.34},
    "slowest_rank_units": {"combine": 18.26},
    "hidden": {
        "combine": {
            "communication_us": 30.0,
            "product_us": 50.0,
            "together_us": 60.0,
            "share": 20 / 30,
        }
    },
}


@pytest.mark.parametrize(("together_us", "share"), [(80.0, 0.0), (60.0, 2 / 3), (50.0, 1.0)])
def test_the_share_is_of_the_shorter_one(together_us: float, share: float) -> None:
    for pair in ((30.0, 50.0), (50.0, 30.0)):
        assert Hidden.of(*pair, together_us).share == pytest.approx(share)


def test_a_result_becomes_tables(tmp_path: Path) -> None:
    (tmp_path / "two.json").write_text(json.dumps(RESULT), encoding="utf-8")
    filled = fill("<!-- benchmark:two -->\n<!-- /benchmark -->", tmp_path)
    times, host, hidden, caption = filled.split("\n\n")
    assert times.splitlines()[1:] == [
        "| call | us |",
        "| --- | ---: |",
        "| combine, T=4096 | 312.3 |",
    ]
    assert host.splitlines()[2:] == ["| combine | 18.3 |"]
    assert hidden.splitlines()[2:] == ["| combine | 30 | 50 | 80 | 60 | 67% |"]
    assert caption.startswith("2 ranks on A GPU, H = 7168, top-8 of 256, normal mode on 24 SMs")
