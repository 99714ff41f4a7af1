"""The kernels of lines in one process: lines that no rank sends, and how often they are read.

A process plays all ranks, one after another: every line is stored before it is waited for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from epcomm.kernels import launch
from epcomm.kernels.nvlink import ll_combine_send
from epcomm.kernels.nvlink.common.exchange import SlabMemory
from epcomm.kernels.nvlink.common.layout import LINE_BYTES
from epcomm.kernels.nvlink.common.lines import elements_of, flag_of, line_of, word_of, words_of
from epcomm.kernels.nvlink.lines import dispatch_unpack
from epcomm.protocol import Wait
from tests.kernels.nvlink.test_ll_kernels import HIDDEN, make_ranks, receive, send


@triton.jit
def _lines_kernel(
    elements_ptr: tl.tensor,
    lines_ptr: tl.tensor,
    words_ptr: tl.tensor,
    back_ptr: tl.tensor,
    epoch: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    elements = tl.load(elements_ptr + tl.arange(0, SIZE))
    lines = line_of(words_of(elements), epoch)
    place = tl.arange(0, lines.shape[0])
    tl.store(lines_ptr + place, lines)
    tl.store(words_ptr + 2 * place, word_of(lines))
    tl.store(words_ptr + 2 * place + 1, flag_of(lines))
    if elements_ptr.dtype.element_ty.primitive_bitwidth >= 16:
        back = elements_of(word_of(lines), elements_ptr.dtype.element_ty)
        tl.store(back_ptr + tl.arange(0, SIZE), back)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bfloat16, torch.float32])
def test_line_holds_its_elements_and_the_epoch(dtype: torch.dtype, device: torch.device) -> None:
    # Bytes with their highest bit set, and an epoch beyond 2**31.
    raw = torch.arange(3, 19, device=device, dtype=torch.uint8) * 16 + 15
    elements, epoch = raw.view(dtype), -5
    lines = torch.zeros(4, dtype=torch.int64, device=device)
    words = torch.zeros(8, dtype=torch.int32, device=device)
    back = torch.zeros_like(elements)
    kernel: Any = _lines_kernel
    kernel[(1,)](elements, lines, words, back, epoch, SIZE=elements.numel())
    assert torch.equal(words.view(4, 2)[:, 0].contiguous().view(torch.uint8), raw)
    assert words.view(4, 2)[:, 1].tolist() == [epoch] * 4
    assert torch.equal(lines.view(torch.int32), words)
    if dtype is not torch.uint8:
        assert torch.equal(back.view(torch.uint8), raw)


send_lines = partial(send, in_lines=True)


@pytest.mark.skipif(not launch.IS_INTERPRETED, reason="compiled kernels record nothing")
def test_unpacking_ends_at_the_tokens_of_each_source(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, is_waiting = [], dispatch_unpack.is_waiting
    ranks = make_ranks(2, device, max_tokens=8, line_tokens=8)
    send_lines(ranks[0], [[0, 3]], [[1, 1]])
    x = send_lines(ranks[1], [[0, 3]] * 3, [[1, 1]] * 3)

    def noted(state: Any) -> Any:  # noqa: ANN401
        looks.append(None)
        return is_waiting(state)

    monkeypatch.setattr(dispatch_unpack, "is_waiting", noted)
    index = receive(ranks[0])
    assert index.counts.tolist() == [4, 0]
    rows = ranks[0].region("data", torch.bfloat16)[: 16 * HIDDEN].view(16, HIDDEN)
    assert torch.equal(rows[8:11], x)
    # Two questions for the first four tokens of each rank, and none for the others.
    assert len(looks) == 2 * 2


@pytest.mark.parametrize(
    ("line_tokens", "num_tokens", "expected"),
    [(32, 4, 48), (32, 12, 144), (32, 32, 384), (32, 0, 384), (8, 32, 48), (0, 32, 0)],
)
def test_each_piece_of_a_source_has_as_many_programs(
    line_tokens: int, num_tokens: int, expected: int
) -> None:
    layout = make_ranks(2, torch.device("cpu"))[0].layout
    # 24 pieces of the rows of each source.
    layout = replace(layout, line_tokens=line_tokens, data_words=24 * 3 * 128, data_plane=128)
    assert dispatch_unpack.num_unpackers(layout, num_tokens) == expected


@pytest.mark.parametrize(("num_tokens", "grids"), [(1, 1), (8, 1), (32, 2), (33, 2), (128, 2)])
def test_each_piece_of_a_sum_in_lines_has_a_sender(num_tokens: int, grids: int) -> None:
    exchange = make_ranks(2, torch.device("cpu"))[0].exchange
    # 10 parts of a sum, two at a time.
    layout = replace(exchange.peers.layout, line_tokens=32, return_words=3584)
    peers = replace(exchange.peers, layout=layout, num_programs=128)
    found = ll_combine_send._num_programs(replace(exchange, peers=peers), num_tokens)
    assert found == 128 * grids


def test_line_that_does_not_come_ends_the_wait(device: torch.device) -> None:
    ranks = make_ranks(2, device)
    send_lines(ranks[1], [[0, 3]], [[0.6, 0.4]])
    send_lines(ranks[0], [], [])
    # The second line of the row is from the last batch.
    layout = ranks[0].layout
    lines = ranks[0].region("row_lines", torch.int64).view(-1, LINE_BYTES // 8)
    place = layout.line_tokens * layout.row_lines + 1
    lines[place, -1] = 5
    index = receive(ranks[0])
    phase, epoch, _, _, *missing = ranks[0].exchange.peers.report.tolist()
    assert (phase, epoch, missing) == (Wait.DISPATCH, 1, [0, 1])
    assert index.counts.tolist() == [0, 0], "what has not come is not handed out"
    assert [int(rank.block[:4].view(torch.int32)) for rank in ranks] == [513, 513]


@pytest.mark.parametrize("expert", [2, 3])
def test_expert_of_another_rank_gets_no_row_of_a_slab(expert: int, device: torch.device) -> None:
    receiver, sender = make_ranks(2, device)
    send_lines(receiver, [], [])
    send_lines(sender, [[0, 3]], [[0.6, 0.4]])
    layout = receiver.layout
    lines = receiver.region("metadata_lines", torch.int32).view(-1, LINE_BYTES // 4)
    lines[layout.max_tokens * layout.metadata_words, 0] = expert
    num_slots = 2 * layout.num_rows
    memory = torch.full(
        (4 * num_slots, layout.data_bytes // 4), 77, dtype=torch.int32, device=device
    )
    receive(receiver, SlabMemory(data=memory[:num_slots]))
    assert (memory == 77).all()
