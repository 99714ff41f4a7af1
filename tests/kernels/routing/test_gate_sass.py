"""The gate compiled for sm_90 without a GPU: a maximum is one instruction, and nothing spills."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.compiling import compiled_by

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

VARIANTS = ("deepseek v3", "deepseek v3 with tables", "qwen3", "largest")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    program = Path(__file__).with_name("gate_sass_of.py")
    return compiled_by(program, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_spilled(variant: str, compiled: Mapping[str, Any]) -> None:
    assert "0 bytes spill stores, 0 bytes spill loads" in compiled[variant]["ptxas"]


@pytest.mark.parametrize("variant", VARIANTS[:3])
def test_a_round_of_the_top_k_reduces_twice(variant: str, compiled: Mapping[str, Any]) -> None:
    reductions = re.findall(r"\bREDUX\.\S+", compiled[variant]["sass"])
    # Of eight rounds: the largest key of a warp, and the lowest expert that has it.
    assert len(reductions) == 2 * 8


def test_load_and_calls_are_counted_without_an_answer(compiled: Mapping[str, Any]) -> None:
    sass = compiled["deepseek v3 with tables"]["sass"]
    assert len(re.findall(r"\bREDG?\.E\.ADD\.64", sass)) == 2
    assert not re.search(r"\bATOMG?\.", sass)
