import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from epcomm.kernels.rows.gather import gather_rows
from epcomm.kernels.rows.scatter import scatter_tokens
from epcomm.kernels.rows.sums import dot_rows, sum_parts, sum_rows
from epcomm.ops.with_triton import TritonRowOps

NAN = float("nan")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# One column, an odd size, and more than one tile with the last one short.
HIDDEN = [1, 37, 1100]
# Each size, and each dtype with the odd one.
SHAPES = [
    *((torch.bfloat16, hidden) for hidden in HIDDEN),
    *((dtype, 37) for dtype in DTYPES if dtype is not torch.bfloat16),
]


def poisoned(
    num_rows: int, width: int, gap: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return rows of NaN with gaps between them."""
    whole = torch.full((num_rows, width + gap), NAN, dtype=dtype, device=device)
    return whole[:, :width]


def random_rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    rows = poisoned(num_rows, width, 5, dtype, device)
    generator = torch.Generator().manual_seed(num_rows)
    return rows.copy_(torch.randn(num_rows, width, generator=generator, dtype=torch.float64))


def gap_of(rows: Tensor) -> Tensor:
    stride, width = rows.stride(0), rows.shape[1]
    return rows.as_strided((rows.shape[0], stride - width), (stride, 1), width)


@pytest.mark.parametrize(("dtype", "hidden"), [*SHAPES, (torch.float8_e4m3fn, 37)], ids=str)
def test_gather_moves_exact_bits(dtype: torch.dtype, hidden: int, device: torch.device) -> None:
    rows = random_rows(7, hidden, torch.float32, device)
    rows = rows.to(dtype) if dtype is torch.float8_e4m3fn else random_rows(7, hidden, dtype, device)
    row_of_slot = torch.tensor([6, 0, -1, 6, 3], dtype=torch.int32, device=device)
    out = poisoned(5, hidden, 3, torch.float32, device).to(dtype)
    gather_rows(rows, row_of_slot, out)
    for slot, row in enumerate(row_of_slot.tolist()):
        expected = rows[row] if row >= 0 else torch.zeros_like(rows[0])
        assert out[slot].float().tolist() == expected.float().tolist()


def test_gather_leaves_what_lies_between_rows(device: torch.device) -> None:
    rows, out = (poisoned(4, 20, 3, torch.float32, device) for _ in range(2))
    rows.fill_(1.0)
    gather_rows(rows, torch.zeros(4, dtype=torch.int32, device=device), out)
    assert out.eq(1.0).all()
    assert gap_of(out).isnan().all()


def sums_of(rows: Tensor, sources: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sums, term by term: each product and each sum is rounded."""
    wide = torch.float64 if rows.dtype is torch.float64 else torch.float32
    lines = []
    for line in sources.tolist():
        total = torch.zeros(rows.shape[1], dtype=wide, device=rows.device)
        for source in line:
            if source >= 0:
                term = rows[source].to(wide)
                total = total + (term if weights is None else term * weights[source])
        lines.append(total.to(rows.dtype))
    return torch.stack(lines)


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize(("dtype", "hidden"), SHAPES, ids=str)
def test_sums_are_in_order_and_rounded_once(
    dtype: torch.dtype, hidden: int, has_weights: bool, device: torch.device
) -> None:
    rows = random_rows(9, hidden, dtype, device)
    # No target has this row: neither the row nor its weight is read.
    rows[4] = NAN
    sources = torch.tensor(
        [[0, 8, -1], [-1, -1, -1], [7, 3, 1], [2, 2, 2], [-1, 5, 6]],
        dtype=torch.int32,
        device=device,
    )
    weights = None
    if has_weights:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        weights = torch.linspace(-1.7, 2.9, 9, dtype=wide, device=device)
        weights[4] = NAN
    out = poisoned(5, hidden, 3, dtype, device)
    sum_rows(rows, sources, out, weights)
    assert torch.equal(out, sums_of(rows, sources, weights))
    assert gap_of(out).isnan().all()


def test_long_lines_are_summed_in_order_too(device: torch.device) -> None:
    rows = random_rows(40, 20, torch.bfloat16, device)
    sources = torch.arange(40, dtype=torch.int32, device=device).view(2, 20)
    out = poisoned(2, 20, 0, torch.bfloat16, device)
    sum_rows(rows, sources, out)
    assert torch.equal(out, sums_of(rows, sources, None))


@pytest.mark.parametrize("hidden", HIDDEN)
def test_parts_are_summed_wherever_they_lie(hidden: int, device: torch.device) -> None:
    # The rows are as in low latency: a header row before the tokens of each rank, and unused rows
    # after them.
    whole = torch.full((3, 8, hidden + 5), NAN, dtype=torch.bfloat16, device=device)
    parts = whole[:, 1:6, :hidden]
    parts.copy_(random_rows(15, hidden, torch.bfloat16, device).unflatten(0, (3, 5)))
    out = poisoned(5, hidden, 2, torch.bfloat16, device)
    sum_parts(parts, out)
    expected = (parts[0].float() + parts[1].float() + parts[2].float()).bfloat16()
    assert torch.equal(out, expected)


def dots_of(left: Tensor, right: Tensor) -> Tensor:
    """Add columns that are 1024 apart, then neighbours: each product and each sum is rounded."""
    wide = torch.float64 if left.dtype is torch.float64 else torch.float32
    products, hidden = left.to(wide) * right.to(wide), left.shape[1]
    width = min(1024, 1 << (hidden - 1).bit_length())
    total = torch.zeros(left.shape[0], width, dtype=wide, device=left.device)
    for block in products.split(width, dim=1):
        total[:, : block.shape[1]] += block
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    return total[:, 0]


@pytest.mark.parametrize(("dtype", "hidden"), SHAPES, ids=str)
def test_dots_do_not_depend_on_the_number_of_rows(
    dtype: torch.dtype, hidden: int, device: torch.device
) -> None:
    num_rows = 5
    left, right = (random_rows(num_rows + n, hidden, dtype, device)[:num_rows] for n in range(2))
    expected = dots_of(left, right)
    splits = [
        (begin, end) for end in range(1, num_rows + 1) for begin in range(end if hidden < 99 else 1)
    ]
    for begin, end in splits:
        out = torch.full((end - begin,), NAN, dtype=expected.dtype, device=device)
        # Slices begin at addresses of any alignment.
        dot_rows(left[begin:end], right[begin:end], out)
        assert torch.equal(out, expected[begin:end])
    assert torch.equal(TritonRowOps().dot_rows(left.t().contiguous().t(), right), expected)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_scatter_brings_scales_ids_and_weights(hidden: int, device: torch.device) -> None:
    num_tokens, top_k = 6, 3
    codes = random_rows(num_tokens, hidden, torch.float32, device).to(torch.float8_e4m3fn)
    scales = random_rows(num_tokens, 4, torch.float32, device)
    ids = torch.arange(num_tokens * top_k, device=device).view(num_tokens, top_k) - 1
    weights = torch.rand(num_tokens, top_k, device=device)
    table = torch.tensor(
        [[0, 2], [-1, 3], [-1, -1], [1, 4], [-1, 5], [-1, -1]], dtype=torch.int32, device=device
    )
    data = torch.full((7, hidden + 3), 0x7F, dtype=torch.uint8, device=device)
    row_codes = data[:, :hidden].view(torch.float8_e4m3fn)
    row_scales, row_weights = (poisoned(7, n, 2, torch.float32, device) for n in (4, top_k))
    row_ids = torch.full((7, top_k + 2), -9, dtype=torch.int32, device=device)
    scatter_tokens(
        (codes, scales, ids, weights),
        table,
        (row_codes, row_scales, row_ids[:, :top_k], row_weights),
    )
    token_of_row = [0, 3, 0, 1, 3, 4]
    assert data[:6, :hidden].tolist() == codes.view(torch.uint8)[token_of_row].tolist()
    assert row_scales[:6].tolist() == scales[token_of_row].tolist()
    assert row_ids[:6, :top_k].tolist() == ids[token_of_row].tolist()
    assert row_weights[:6].tolist() == weights[token_of_row].tolist()
    # Nothing is written to row 6, nor after any row.
    assert data[6].eq(0x7F).all()
    assert data[:, hidden:].eq(0x7F).all()
    assert row_ids[6].eq(-9).all()
    assert row_ids[:, top_k:].eq(-9).all()
    assert row_scales[6].isnan().all()


@pytest.mark.parametrize("strides", [(4, 1), (0, 0)], ids=["usual", "gradient of sum()"])
def test_nothing_to_do(strides: tuple[int, int], device: torch.device) -> None:
    rows = torch.empty_strided((0, 4), strides, device=device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    gather_rows(rows, none, torch.empty(0, 4, device=device))
    padding = torch.full((2, 4), NAN, device=device)
    gather_rows(rows, torch.full((2,), -1, dtype=torch.int32, device=device), padding)
    assert not padding.any()
    sum_rows(rows, none.view(0, 2), torch.empty(0, 4, device=device))
    dot_rows(rows, rows, torch.empty(0, device=device))
    scatter_tokens((rows, None, None, None), none.view(0, 2), (rows, None, None, None))


def test_rows_beyond_2_to_the_31_elements(device: torch.device) -> None:
    """Use three rows that are 2**30 + 16 elements apart, in mostly untouched memory."""
    stride = 2**30 + 16
    try:
        source, target = (
            torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=device) for _ in range(2)
        )
    except RuntimeError:
        pytest.skip("not enough memory for 4 * 2**31 bytes")
    rows, far = (each.as_strided((3, 64), (stride, 1)) for each in (source, target))
    rows.copy_(random_rows(3, 64, torch.bfloat16, device))
    last = torch.tensor([2, 2, 2], dtype=torch.int32, device=device)
    gather_rows(rows, last, far)
    assert torch.equal(far[2], rows[2])
    far.zero_()
    sum_rows(rows, last.view(3, 1), far)
    assert torch.equal(far[2], rows[2])
    dots = torch.empty(3, device=device)
    dot_rows(rows, far, dots)
    assert torch.equal(dots[2:], dots_of(rows[2:], far[2:]))
    far.zero_()
    nothing = (None, None, None)
    table = torch.tensor([[-1], [-1], [2]], dtype=torch.int32, device=device)
    scatter_tokens((rows, *nothing), table, (far, *nothing))
    assert torch.equal(far[2], rows[2])


# Callers may pass tensors of any strides.
OPS = TritonRowOps()


def test_weights_of_sums_may_be_a_column(device: torch.device) -> None:
    rows = torch.tensor([[5.0], [6.0], [7.0]], device=device)
    weights = torch.tensor([[1.0, -9.0], [3.0, -9.0], [2.0, -9.0]], device=device)[:, 0]
    table = torch.tensor([[2, 0], [-1, 1]], dtype=torch.int32, device=device)
    assert OPS.sum_members(rows, table, weights).tolist() == [[19.0], [18.0]]


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_parts_may_lie_any_distance_apart(num_tokens: int, device: torch.device) -> None:
    flat = torch.full((40,), float("nan"), device=device)
    # Rows are 3 elements apart, and parts 7, which no number of rows makes.
    parts = flat.as_strided((3, num_tokens, 2), (7, 3, 1))
    for part in range(3):
        parts[part] = 10.0**part
    assert OPS.sum_parts(parts, torch.float32).tolist() == [[111.0, 111.0]] * num_tokens


def test_ids_and_weights_may_be_transposed(device: torch.device) -> None:
    ids = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32, device=device).t()
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device).t()
    counts = torch.tensor([2, 2], device=device)
    index, slot_weights = OPS.index_slots(
        ids, weights, counts, [2, 2], first_expert=0, expert_alignment=1
    )
    assert index.row_of_slot.tolist() == [0, 1, 0, 1]
    # Token 0 has expert 0 with 1 and expert 1 with 3; token 1 has expert 1 with 2, expert 0 with 4.
    assert slot_weights.tolist() == [1.0, 4.0, 3.0, 2.0]
