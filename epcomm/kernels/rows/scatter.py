"""Copy tokens with scales, ids and weights to the rows that are sent: the local half of dispatch.

A program reads its part of a few tokens once and writes it to the rows of all ranks that get one of
them, 16 bytes at a time: a token that goes to five ranks is read once, not five times.
"""

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import check_rows
from epcomm.kernels.prepared import launch
from epcomm.kernels.rows.tiles import WARPS, movable, row_stride, tile_of


@triton.jit
def _beside(
    values_ptr: tl.tensor,
    out_ptr: tl.tensor,
    token: tl.tensor,
    row: tl.tensor,
    is_sent: tl.tensor,
    STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Copy WIDTH values of each token to its row, cast to the dtype of the row."""
    lane = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    mask = is_sent[:, None] & (lane < WIDTH)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    values = tl.load(values_ptr + token[:, None] * STRIDE + lane, mask=mask, other=0)
    to_ptr = out_ptr + row[:, None] * OUT_STRIDE + lane
    tl.store(to_ptr, values.to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _scatter_tokens_kernel(
    x_ptr: tl.tensor,
    scales_ptr: tl.tensor | None,
    ids_ptr: tl.tensor | None,
    weights_ptr: tl.tensor | None,
    row_of_rank_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    row_scales_ptr: tl.tensor | None,
    row_ids_ptr: tl.tensor | None,
    row_weights_ptr: tl.tensor | None,
    num_tokens: tl.tensor,
    X_STRIDE: tl.constexpr,
    ROWS_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    ROW_SCALES_STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    ROW_IDS_STRIDE: tl.constexpr,
    ROW_WEIGHTS_STRIDE: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Copy COLUMNS columns of TOKENS tokens; programs of the first columns copy the other parts.

    row_of_rank 0 1 | -1 2: token 0 is copied to rows 0 and 1, token 1 to row 2.
    """
    TILES: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    # Both are widened before a stride multiplies them: rows may begin beyond 2**31 elements.
    token = (program // TILES * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    column = (program % TILES * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_token, is_in = token < num_tokens, column < HIDDEN
    x = tl.load(x_ptr + token[:, None] * X_STRIDE + column, mask=is_token[:, None] & is_in, other=0)
    for rank in range(W):
        row = tl.load(row_of_rank_ptr + token * W + rank, mask=is_token, other=-1).to(tl.int64)
        is_sent = row >= 0
        to_ptr = rows_ptr + row[:, None] * ROWS_STRIDE + column
        tl.store(to_ptr, x, mask=is_sent[:, None] & is_in)
        if program % TILES == 0:
            if scales_ptr is not None:
                _beside(
                    *(scales_ptr, row_scales_ptr, token, row, is_sent),
                    *(SCALES_STRIDE, ROW_SCALES_STRIDE, SCALES),
                )
            if ids_ptr is not None:
                _beside(ids_ptr, row_ids_ptr, token, row, is_sent, K, ROW_IDS_STRIDE, K)
            if weights_ptr is not None:
                _beside(weights_ptr, row_weights_ptr, token, row, is_sent, K, ROW_WEIGHTS_STRIDE, K)


# Elements, scales, ids and weights of tokens or rows; the last three may be None.
Parts = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def scatter_tokens(tokens: Parts, row_of_rank: Tensor, rows: Parts) -> None:
    """Copy each token to its rows.

    Args:
        tokens: elements [T, H] and scales [T, S], of any row stride; ids and weights [T, K],
            contiguous.
        row_of_rank: [T, W], int32, contiguous, as order_sends() writes it.
        rows: written, in the same dtypes, but for ids, which are int32; rows have any stride.

    Allocates nothing.   Compiled for each dtype, H, K, W and strides.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    Raises:
        ShapeError: a tensor is not on a GPU, or its columns are not adjacent.
    """
    (x, scales, ids, weights), (data, row_scales, row_ids, row_weights) = tokens, rows
    check_rows("scatter_tokens", hidden_states=x, rows=data)
    num_tokens, hidden_size = x.shape
    if num_tokens == 0 or data.shape[0] == 0:
        return
    top_k = 1 if ids is None else ids.shape[1]
    num_scales = 1 if scales is None else scales.shape[1]
    tile = tile_of(hidden_size, x.itemsize)
    sent = (movable(x), movable(scales), ids, weights)
    received = (movable(data), movable(row_scales), row_ids, row_weights)
    launch(
        _scatter_tokens_kernel,
        tile.programs(num_tokens),
        (*sent, row_of_rank, *received, num_tokens),
        X_STRIDE=row_stride(x),
        ROWS_STRIDE=_stride_of(data),
        HIDDEN=hidden_size,
        SCALES_STRIDE=0 if scales is None else row_stride(scales),
        ROW_SCALES_STRIDE=_stride_of(row_scales),
        SCALES=num_scales,
        ROW_IDS_STRIDE=_stride_of(row_ids),
        ROW_WEIGHTS_STRIDE=_stride_of(row_weights),
        K=top_k,
        W=row_of_rank.shape[1],
        TOKENS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=WARPS,
    )


def _stride_of(rows: Tensor | None) -> int:
    """Return the row stride; in a message it is valid for a single row too."""
    return 0 if rows is None else rows.stride(0)
