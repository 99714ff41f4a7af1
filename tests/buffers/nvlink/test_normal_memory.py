"""Rows of normal mode over NVLink as the words that kernels move."""

from __future__ import annotations

import pytest
import torch

from epcomm.buffers.nvlink.memory import as_words


@pytest.mark.parametrize(
    ("offset", "columns", "expected"),
    [
        pytest.param(0, 4, torch.int32, id="aligned"),
        pytest.param(2, 4, torch.int32, id="two elements on"),
        pytest.param(1, 4, torch.int16, id="between words"),
        pytest.param(0, 3, torch.int16, id="odd rows"),
    ],
)
def test_rows_are_as_wide_words_as_they_begin_at(
    offset: int, columns: int, expected: torch.dtype
) -> None:
    elements = torch.arange(offset + 2 * columns, dtype=torch.bfloat16)
    rows = elements[offset:].view(2, columns)
    words = as_words(rows)
    assert words.dtype == expected
    assert words.data_ptr() == rows.data_ptr()
    assert torch.equal(words.view(torch.bfloat16), rows)
