"""Imitate normal mode: one row for each (token, expert), and a weighted combine."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.types import Int8Profile
from fakes.ascend.deep_ep import exchange
from fakes.ascend.deep_ep.config import (
    WINDOW_VARIABLES,
    NormalStrategy,
    Settings,
    settings,
)
from fakes.ascend.deep_ep.quant_mode import BF16, INT8, checked
from fakes.ascend.deep_ep.transport import gather
from fakes.ascend.int8 import quantize_rows
from fakes.ascend.limits import Soc, current_machine, require
from fakes.ascend.sizes import require_size
from fakes.ascend.undefined import undefined
from fakes.ascend.windows import normal_bytes, require_window

DISPATCH = "deep_ep.Buffer.dispatch"
COMBINE = "deep_ep.Buffer.combine"
LAYOUT = "deep_ep.Buffer.get_dispatch_layout"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """per_rank int32 [W]; per_expert int32 [rounds * E]; is_in_rank int32 [T, W]; for these ids."""

    ids: Tensor
    num_experts: int
    per_rank: Tensor
    per_expert: Tensor
    is_in_rank: Tensor


@dataclass(frozen=True, kw_only=True)
class Sent:
    """x bfloat16 [T, H]; ids int64 [T, K]; weights float32 [T, K]; mode: bf16 or int8."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    mode: str


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """The results of dispatch(); counts are a list of L numbers, or their inclusive sums."""

    x: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor
    counts: list[int]
    handle: tuple[Tensor, ...]


def layout_of(
    group: dist.ProcessGroup, ids: Tensor, num_experts: int, strategy: NormalStrategy
) -> Layout:
    """Return the layout of a dispatch: the ranks of each token, with counts.

    With alltoall, which is collective here, per_expert is [L], the rows that this rank will
    receive, and is_in_rank is zeros. This is documented, but callers do not expect it.
    """
    require(LAYOUT, ids.dim() == 2 and ids.is_contiguous(), "topk_idx is 2-D and contiguous")
    require(LAYOUT, ids.dtype == torch.int64, f"topk_idx is int64, got {ids.dtype}")
    num_ranks = group.size()
    fits = num_experts > 0 and num_experts % num_ranks == 0
    require(LAYOUT, fits, f"num_experts is a multiple of {num_ranks}, got {num_experts}")
    known = settings()
    # Wrong ids are refused in dispatch, together with the other ranks.
    is_expert = (ids >= 0) & (ids < num_experts)
    chosen = torch.zeros(ids.shape[0], num_experts + 1, dtype=torch.int32)
    chosen.scatter_(1, torch.where(is_expert, ids, num_experts), 1)
    chosen = chosen[:, :num_experts]
    is_in_rank = chosen.view(-1, num_ranks, num_experts // num_ranks).amax(-1)
    rounds = [chosen[first : first + known.tokens_per_round] for first in _firsts(known)]
    per_expert = torch.cat([part.sum(0, dtype=torch.int32) for part in rounds])
    per_rank = is_in_rank.sum(0, dtype=torch.int32)
    if strategy is NormalStrategy.ALLTOALL:
        totals = gather(group, chosen.sum(0, dtype=torch.int32)).sum(0, dtype=torch.int32)
        per_expert = totals.view(num_ranks, -1)[group.rank()].clone()
        is_in_rank = torch.zeros_like(is_in_rank)
    return Layout(
        ids=ids,
        num_experts=num_experts,
        per_rank=per_rank,
        per_expert=per_expert,
        is_in_rank=is_in_rank,
    )


def quant_mode_of(argument: str | None, strategy: NormalStrategy) -> str:
    """Return the argument, or the setting of the environment, which alltoall ignores."""
    if argument is not None:
        return checked(DISPATCH, argument)
    is_asked = strategy is NormalStrategy.DEFAULT
    return INT8 if is_asked and settings().normal_int8 else BF16


def dispatch(
    group: dist.ProcessGroup, sent: Sent, layout: Layout, given: Sequence[Tensor | None]
) -> Arrived:
    """Send the rows; `given` is the layout that the caller passes, in its order."""
    known = settings()

    def check() -> Sequence[int]:
        _check_sent(sent, layout, given)
        _check_sizes(sent, layout.num_experts, group.size(), known)
        return [sent.x.shape[1], sent.ids.shape[1], layout.num_experts, int(sent.mode == INT8)]

    exchange.agree(group, DISPATCH, check)
    pairs = exchange.pairs_of(sent.ids, layout.num_experts)
    rows, scales = sent.x[pairs.tokens], None
    if sent.mode == INT8:
        rows, scales = quantize_rows(rows, Int8Profile.RINT127EPS)
    received = exchange.send(group, pairs, rows, scales)
    # Without received rows one row is allocated, which is not written.
    num_rows = max(received.rows.shape[0], 1)
    per_expert = received.per_expert()
    shape = [num_rows, sent.ids.shape[1]]
    row_scales = received.scales
    return Arrived(
        x=exchange.rows_then_undefined(received.rows, num_rows),
        scales=None if row_scales is None else exchange.rows_then_undefined(row_scales, num_rows),
        ids=undefined(shape, torch.int64),
        weights=undefined(shape, torch.float32),
        counts=(per_expert.cumsum(0) if known.counts_are_sums else per_expert).tolist(),
        handle=_handle(group.size(), received, num_rows, sent, layout),
    )


def combine(group: dist.ProcessGroup, x: Tensor, handle: tuple[Tensor, ...]) -> Tensor:
    """Return the sum of rows times the weights of the dispatch, [T, H]."""
    most = settings().combine_tokens

    def check() -> Sequence[int]:
        require(COMBINE, len(handle) == 8, "the handle is that of dispatch")
        triples, prefix, num_tokens = handle[3], handle[5], handle[6].shape[0]
        rule = f"{num_tokens} tokens, of {most} at most without rounds in combine"
        require(COMBINE, num_tokens <= most, rule)
        require(COMBINE, x.dim() == 2 and x.is_contiguous(), "x is 2-D and contiguous")
        require(COMBINE, x.dtype == torch.bfloat16, f"x is bfloat16, got {x.dtype}")
        num_rows = triples.numel() // 3
        require(COMBINE, x.shape[0] == num_rows, f"x has {num_rows} rows, got {x.shape[0]}")
        exchange.require_written(COMBINE, prefix, triples.view(-1, 3), group.size())
        return [x.shape[1]]

    exchange.agree(group, COMBINE, check)
    counts = exchange.counts_of(handle[5], group.size())
    ids, weights = handle[6], handle[7]
    return exchange.combine(group, COMBINE, x[: int(counts.sum())], counts, ids, weights)


def _firsts(known: Settings) -> list[int]:
    return [index * known.tokens_per_round for index in range(known.num_rounds)]


def _handle(
    num_ranks: int, received: exchange.Received, num_rows: int, sent: Sent, layout: Layout
) -> tuple[Tensor, ...]:
    """Return the handle of a dispatch, in the order of the real package.

    It is rank, channel and received channel prefixes, which stay undefined here, expand_idx int32
    [3N], is_in_rank, inclusive counts int32 [L * W], ids and weights.
    """
    prefixes = [undefined([num_ranks, num_ranks], torch.int32) for _ in range(3)]
    triples = exchange.rows_then_undefined(received.triples, num_rows).flatten()
    # The real package keeps the caller's tensors too: overwriting them changes the combine.
    return (*prefixes, triples, layout.is_in_rank, received.prefix(), sent.ids, sent.weights)


def _check_sent(sent: Sent, layout: Layout, given: Sequence[Tensor | None]) -> None:
    x, ids, weights = sent.x, sent.ids, sent.weights
    require(DISPATCH, x.dim() == 2 and x.is_contiguous(), "x is 2-D and contiguous")
    require(DISPATCH, x.dtype == torch.bfloat16, f"x is bfloat16, got {x.dtype}")
    fits = ids.dim() == 2 and ids.shape[0] == x.shape[0] and ids.dtype == torch.int64
    require(DISPATCH, fits, "topk_idx is int64 [T, K]")
    fits = weights.shape == ids.shape and weights.dtype == torch.float32
    require(DISPATCH, fits, "topk_weights is float32 [T, K]")
    is_same = torch.equal(layout.ids, ids)
    require(DISPATCH, is_same, "the latest get_dispatch_layout() on this buffer was for topk_idx")
    wanted = (layout.per_rank, layout.is_in_rank, layout.per_expert)
    for tensor, own in zip(given, wanted, strict=True):
        is_same = tensor is not None and torch.equal(tensor, own)
        require(DISPATCH, is_same, "the tensors of the latest get_dispatch_layout() are passed")
    exchange.require_ids(DISPATCH, ids, layout.num_experts, allow_none=True)


def _check_sizes(sent: Sent, num_experts: int, num_ranks: int, known: Settings) -> None:
    (num_tokens, hidden_size), num_topk = sent.x.shape, sent.ids.shape[1]
    is_a2 = current_machine().soc is Soc.A2
    require_size(DISPATCH, 1 <= num_topk <= 16, f"K is 1 to 16, got {num_topk}")
    require_size(DISPATCH, num_experts <= 512, f"E is at most 512, got {num_experts}")
    fits = hidden_size == 7168 if is_a2 else 1024 <= hidden_size <= 7168
    require_size(DISPATCH, fits, f"H is 1024 to 7168 (A2: 7168), got {hidden_size}")
    require_size(DISPATCH, 2 <= num_ranks <= 384, f"2 to 384 ranks, got {num_ranks}")
    max_tokens = known.num_rounds * known.tokens_per_round
    # A size of the rounds chosen by the caller, not of a kernel, so no test mode lifts it.
    require(DISPATCH, num_tokens <= max_tokens, f"{num_tokens} tokens, of {max_tokens} at most")
    needed = normal_bytes(min(num_tokens, known.tokens_per_round), num_topk, hidden_size)
    require_window(DISPATCH, needed, WINDOW_VARIABLES)
