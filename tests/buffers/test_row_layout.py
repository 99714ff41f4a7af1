from dataclasses import dataclass

import pytest
import torch

from epcomm import WireDtype, WireFormat
from epcomm.buffers.row_layout import RowLayout, wire_tensor_of
from epcomm.calls.call import DispatchCall
from epcomm.protocol import BatchFlags
from epcomm.quantization import KNOWN_FORMATS
from epcomm.types import WireTensor

FP8 = WireFormat(dtype=WireDtype.FP8_E4M3, scale_block=128, scale_dtype=torch.float32)
MXFP8, NVFP4 = WireFormat(dtype=WireDtype.MXFP8), WireFormat(dtype=WireDtype.NVFP4)


@dataclass(frozen=True)
class Case:
    """offsets: those of scales, ids and scalars, and the bytes of a row, computed by hand."""

    id: str
    format: WireFormat
    hidden_size: int
    top_k: int
    offsets: tuple[int, int, int, int]
    has_ids: bool = True

    @property
    def layout(self) -> RowLayout:
        return RowLayout(
            hidden_size=self.hidden_size, top_k=self.top_k, format=self.format, has_ids=self.has_ids
        )


CASES = [
    Case("bf16 of odd width", WireFormat.of(torch.bfloat16), 37, 3, (76, 76, 88, 112)),
    Case("fp32 in combine", WireFormat.of(torch.float32), 5, 2, (20, 20, 20, 32), has_ids=False),
    # Scalars of eight bytes start at a multiple of eight.
    Case("fp64 with an odd number of ids", WireFormat.of(torch.float64), 5, 3, (40, 40, 56, 80)),
    Case("fp8 with a short last block", FP8, 257, 1, (260, 272, 276, 288)),
    Case("fp8 with scales of one byte", MXFP8, 96, 2, (96, 100, 108, 128)),
    Case("fp4 with scales of rows", NVFP4, 96, 2, (48, 60, 68, 80)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_offsets_equal_those_computed_by_hand(case: Case) -> None:
    layout = case.layout
    offsets = (layout.scales_at, layout.ids_at, layout.scalars_at, layout.row_bytes)
    assert offsets == case.offsets


def random_bits(num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return arbitrary bits, including NaN; compare them as bytes."""
    generator = torch.Generator().manual_seed(num_columns)
    shape = (num_rows, num_columns * dtype.itemsize)
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8).view(dtype)


def as_bytes(tensor: torch.Tensor) -> list[list[int]]:
    return tensor.contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("case", [c for c in CASES if c.has_ids], ids=lambda case: case.id)
@pytest.mark.parametrize("token_of_row", [[2, 0, 0, 1], []], ids=["four rows", "no row"])
def test_packed_tokens_are_bit_equal(case: Case, token_of_row: list[int]) -> None:
    layout, wire = case.layout, case.format
    data = random_bits(3, wire.num_items(case.hidden_size), wire.dtype.torch_dtype)
    scales = None
    if wire.scale_dtype is not None:
        scales = random_bits(3, wire.num_scales(case.hidden_size), wire.scale_dtype)
    ids = torch.arange(3 * case.top_k).view(3, -1) - 1
    weights = random_bits(3, case.top_k, layout.scalar_dtype)
    picked = torch.tensor(token_of_row, dtype=torch.int64)

    rows = torch.full((len(token_of_row), layout.row_bytes), 0xA5, dtype=torch.uint8)
    sent = WireTensor(data=data, format=wire, scales=scales)
    layout.pack_tokens(sent, picked, ids, weights, out=rows)
    received = layout.wire_tensor(rows)
    # Index bytes, because torch cannot index every wire dtype.
    assert as_bytes(received.data) == [as_bytes(data)[token] for token in token_of_row]
    assert as_bytes(layout.scalars(rows)) == [as_bytes(weights)[token] for token in token_of_row]
    assert layout.ids(rows).tolist() == ids[picked].tolist()
    assert layout.ids(rows).dtype is torch.int32
    assert (received.scales is None) == (scales is None)
    if received.scales is not None and scales is not None:
        assert as_bytes(received.scales) == [as_bytes(scales)[token] for token in token_of_row]


@pytest.mark.parametrize("num_tokens", [5, 0])
@pytest.mark.parametrize("hidden_size", [257, 128], ids=["a short block", "whole blocks"])
@pytest.mark.parametrize("wire", [*KNOWN_FORMATS, WireFormat.of(torch.float32)], ids=str)
def test_tokens_quantised_inside_the_message_have_the_same_bytes(
    wire: WireFormat, hidden_size: int, num_tokens: int
) -> None:
    hidden_size += hidden_size % wire.dtype.per_item
    layout = RowLayout(hidden_size=hidden_size, top_k=2, format=wire, has_ids=True)
    generator = torch.Generator().manual_seed(0)
    call = DispatchCall(
        hidden_states=torch.randn(num_tokens, hidden_size, generator=generator),
        topk_ids=torch.arange(2 * num_tokens).view(-1, 2) - 1,
        topk_weights=torch.rand(num_tokens, 2, generator=generator),
        flags=BatchFlags.NONE,
    )
    wired = wire_tensor_of(call, wire)
    inside, copied = (
        torch.full((num_tokens, layout.row_bytes), 0xA5, dtype=torch.uint8) for _ in range(2)
    )
    layout.write_tokens(inside, call, call.topk_ids)
    tokens = torch.arange(num_tokens)
    layout.pack_tokens(wired, tokens, call.topk_ids, call.topk_weights, out=copied)
    assert torch.equal(inside, copied)


def test_rows_on_the_way_home_keep_their_scalars() -> None:
    layout = CASES[1].layout
    data, scalars = torch.randn(3, 5), torch.randn(3, 2)
    rows = layout.pack_rows(data, scalars)
    assert torch.equal(layout.data(rows), data)
    assert torch.equal(layout.scalars(rows), scalars)
