"""Normal dispatch of V1, which may have no ids, and rows that nobody sent."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from epcomm.errors import CapacityError, ShapeError
from epcomm.integrations.deep_ep.checks import FLOAT32, Check, Dtypes
from epcomm.integrations.deep_ep.normal import ReceivedRows, Rows, dispatch_rows, spec_of
from epcomm.integrations.deep_ep.ranks import NO_OPTIONS, Options, Ranks, Service
from epcomm.spec import BufferSpec

# The dtypes of x without scales, and with scales.
PLAIN: Dtypes = (torch.bfloat16, torch.float16, torch.float32)
QUANTIZED: Dtypes = (torch.float8_e4m3fn, torch.int8)


class NormalRequest(NamedTuple):
    """One dispatch of V1 on new routes; see Buffer.dispatch().

    num_sms: see spec_of().
    service: ROW_BUDGET: num_worst_tokens rows, at most as many tokens, and no host sync.
    """

    rows: Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    is_in_rank: Tensor | None
    per_expert: Tensor | None
    num_worst_tokens: int
    num_sms: int | None
    service: Service

    def checked_spec(self, check: Check) -> BufferSpec:
        """Check the arguments that a buffer depends on; without ids a rank is one expert."""
        num_ranks = check.ranks.size
        check.rows(self.rows, (None, None), PLAIN, QUANTIZED)
        check.tensor("num_tokens_per_expert", self.per_expert, (None,), (torch.int32,))
        assert self.per_expert is not None, "just checked"
        num_experts = self.per_expert.shape[0]
        if num_experts < 1 or num_experts % num_ranks:
            fault = f"num_tokens_per_expert has {num_experts} entries, expected a multiple of the"
            raise check.error(ShapeError, f"{fault} {num_ranks} ranks")
        top_k, num_local = num_ranks, 1
        if self.topk_idx is not None or self.topk_weights is not None:
            check.topk_idx(self.topk_idx, self.rows.x.shape[0])
            assert self.topk_idx is not None, "just checked"
            top_k, num_local = self.topk_idx.shape[1], num_experts // num_ranks
        most = self.num_worst_tokens if self.service.is_static else None
        form = self.rows.form
        return spec_of(form, top_k, num_local, max_tokens=most, num_sms=self.num_sms)

    def check(self, check: Check) -> None:
        """Check the other arguments."""
        num_tokens, ids = self.rows.x.shape[0], self.topk_idx
        shape = (num_tokens, check.ranks.size)
        check.tensor("is_token_in_rank", self.is_in_rank, shape, (torch.bool,))
        if ids is not None and self.per_expert is not None:
            check.tensor("topk_weights", self.topk_weights, ids.shape, FLOAT32)
            check.ids(ids, self.per_expert.shape[0])
        if self.service.is_static:
            check.num_tokens(num_tokens, "num_worst_tokens", self.num_worst_tokens)

    def send(self, ranks: Ranks, spec: BufferSpec) -> ReceivedRows:
        """Dispatch; ids are those of is_in_rank where there are none.

        Collective: yes.   Host sync: one, none where sizes are static.
        Raises:
            CapacityError: some rank received more than num_worst_tokens rows; on every rank. With
                static sizes on a GPU sums are NaN instead, on every rank.
        """
        ids, weights, most = self.topk_idx, self.topk_weights, self.num_worst_tokens
        options = NO_OPTIONS
        if most or ids is None:
            options = Options(num_worst_tokens=most, has_topk_weights=ids is not None)
        if ids is None or weights is None:
            assert self.is_in_rank is not None, "just checked"
            everyone = torch.arange(ranks.size, device=self.is_in_rank.device)
            ids = torch.where(self.is_in_rank, everyone, -1)
            weights = torch.ones_like(ids, dtype=torch.float32)
        topk = ids.long(), weights
        received = dispatch_rows(ranks, self.service, self.rows, topk, spec, options=options)
        if self.service.is_static:
            if ranks.reads_faults:
                received.exchange.buffer.check()
            return received
        if self.topk_idx is None and self.per_expert is not None:
            counts = _sum_of_counts(ranks, self.per_expert)
            received = replace(received, num_tokens_per_expert=counts)
        return _with_worst_rows(ranks, received, most) if most else received


def _sum_of_counts(ranks: Ranks, counts: Tensor) -> tuple[int, ...]:
    """Return the sum over ranks of this rank's part of counts [W * L]: [L], on the host.

    Collective: yes.   Host sync: yes.
    """
    everyone = ranks.gather_counts({"counts": " ".join(map(str, counts.tolist()))})
    counts_of_rank = [list(map(int, str(each["counts"]).split())) for each in everyone]
    num_local = counts.shape[0] // ranks.size
    own = slice(ranks.rank * num_local, (ranks.rank + 1) * num_local)
    return tuple(sum(column) for column in zip(*(c[own] for c in counts_of_rank), strict=True))


def _with_worst_rows(ranks: Ranks, received: ReceivedRows, most: int) -> ReceivedRows:
    """Lengthen what came to `most` rows.

    Collective: yes.   Host sync: yes.
    Raises:
        CapacityError: some rank received more; on every rank.
    """
    num_rows = received.exchange.num_rows
    largest = max(int(each["rows"] or 0) for each in ranks.gather_counts({"rows": num_rows}))
    if largest > most:
        raise CapacityError(
            f"dispatch: some rank received {largest} rows, expected at most num_worst_tokens = "
            f"{most} ({ranks.where}); pass as many as all ranks can send to one"
        )
    ids, weights = (_lengthened(each, most) for each in (received.topk_ids, received.topk_weights))
    ids[num_rows:] = -1
    return replace(
        received,
        rows=with_length(received.rows, most),
        topk_ids=ids,
        topk_weights=weights,
        exchange=replace(received.exchange, max_rows=most),
    )


def with_length(rows: Rows, length: int) -> Rows:
    """Return rows with undefined ones after them, as many as a handle has. Local."""
    if rows.x.shape[0] == length:
        return rows
    scales = None if rows.scales is None else _lengthened(rows.scales, length)
    return Rows(x=_lengthened(rows.x, length), scales=scales)


def _lengthened(tensor: Tensor, length: int) -> Tensor:
    out = tensor.new_empty(length, tensor.shape[1])
    out[: tensor.shape[0]] = tensor
    return out
