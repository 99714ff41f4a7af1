"""Normal dispatch of V1, which may have no ids, and rows that nobody sent."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from epcomm.errors import CapacityError, EPError, ShapeError
from epcomm.integrations.deep_ep.checks import IDS, Check, Dtypes
from epcomm.integrations.deep_ep.normal import ReceivedRows, Rows, dispatch_rows, spec_of
from epcomm.integrations.deep_ep.ranks import NO_OPTIONS, Options, Ranks
from epcomm.spec import BufferSpec

# The dtypes of x without scales, and with scales.
PLAIN: Dtypes = (torch.bfloat16, torch.float16, torch.float32)
QUANTIZED: Dtypes = (torch.float8_e4m3fn, torch.int8)


class NormalRequest(NamedTuple):
    """One dispatch of V1 on new routes; see Buffer.dispatch().

    num_sms: see spec_of().   is_static: sizes are static: num_worst_tokens rows, and no host sync.
        T is at most as much then. Without ids V1 has no such dispatch.
    """

    rows: Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    is_in_rank: Tensor | None
    per_expert: Tensor | None
    num_worst_tokens: int
    num_sms: int | None
    is_static: bool

    def check(self, check: Check) -> None:
        """Raise what is wrong with the tensors, as Check does."""
        rows, ids, num_ranks = self.rows, self.topk_idx, check.ranks.size
        _check_rows(check, rows)
        num_tokens = rows.x.shape[0]
        check.tensor("is_token_in_rank", self.is_in_rank, (num_tokens, num_ranks), (torch.bool,))
        check.tensor("num_tokens_per_expert", self.per_expert, (None,), (torch.int32,))
        assert self.per_expert is not None, "just checked"
        num_experts = self.per_expert.shape[0]
        if ids is not None or self.topk_weights is not None:
            check.tensor("topk_idx", ids, (num_tokens, None), IDS)
            assert ids is not None, "just checked"
            check.tensor("topk_weights", self.topk_weights, ids.shape, (torch.float32,))
        if num_experts < 1 or num_experts % num_ranks:
            fault = f"num_tokens_per_expert has {num_experts} entries, expected a multiple of the"
            raise check.error(ShapeError, f"{fault} {num_ranks} ranks")
        if ids is not None:
            if ids.shape[1] == 0:
                fault = f"topk_idx is {list(ids.shape)}, expected at least one expert a token"
                raise check.error(ShapeError, fault)
            check.ids(ids, num_experts)
        if self.is_static and num_tokens > self.num_worst_tokens:
            fault = f"x has {num_tokens} tokens, expected at most num_worst_tokens"
            remedy = "pass a larger number on all ranks"
            raise check.error(CapacityError, f"{fault} = {self.num_worst_tokens}", remedy)

    def spec(self, num_ranks: int) -> BufferSpec:
        """Return the specification of the buffer; without ids a rank is one expert."""
        top_k, num_local = num_ranks, 1
        if self.topk_idx is not None and self.per_expert is not None:
            top_k, num_local = self.topk_idx.shape[1], self.per_expert.shape[0] // num_ranks
        most = self.num_worst_tokens if self.is_static else None
        return spec_of(self.rows.form, top_k, num_local, max_tokens=most, num_sms=self.num_sms)

    def known_spec(self, check: Check) -> BufferSpec | None:
        """Return the specification of a refused call; None if its tensors do not tell."""
        try:
            _check_rows(check, self.rows)
        except EPError:
            return None
        ids, per_expert, num_ranks = self.topk_idx, self.per_expert, check.ranks.size
        if ids is not None:
            if not isinstance(ids, Tensor) or not isinstance(per_expert, Tensor):
                return None
            if (ids.dim(), per_expert.dim()) != (2, 1):
                return None
            if per_expert.shape[0] == 0 or per_expert.shape[0] % num_ranks:
                return None
        return self.spec(num_ranks)

    def send(self, ranks: Ranks) -> ReceivedRows:
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
        spec = self.spec(ranks.size)
        received = dispatch_rows(ranks, self.rows, ids.long(), weights, spec, options=options)
        if self.is_static:
            if ranks.reads_faults:
                received.exchange.buffer.check()
            return received
        if self.topk_idx is None and self.per_expert is not None:
            counts = ranks.sum_of_counts(self.per_expert)
            received = replace(received, num_tokens_per_expert=counts)
        return _with_worst_rows(ranks, received, most) if most else received


def _check_rows(check: Check, rows: Rows) -> None:
    num_tokens = rows.x.shape[0] if isinstance(rows.x, Tensor) and rows.x.dim() else None
    shape = (None if rows.scales is None else num_tokens, None)
    check.rows(rows, shape, PLAIN, QUANTIZED)


def _with_worst_rows(ranks: Ranks, received: ReceivedRows, most: int) -> ReceivedRows:
    """Lengthen what came to `most` rows.

    Collective: yes.
    Raises:
        CapacityError: some rank received more; on every rank.
    """
    largest = ranks.largest(received.rows.x.shape[0])
    if largest > most:
        raise CapacityError(
            f"dispatch: some rank received {largest} rows, expected at most num_worst_tokens = "
            f"{most} ({ranks.where}); pass as many as all ranks can send to one"
        )
    ids, weights = (_lengthened(each, most) for each in (received.topk_ids, received.topk_weights))
    ids[received.topk_ids.shape[0] :] = -1
    rows = with_length(received.rows, most)
    return replace(received, rows=rows, topk_ids=ids, topk_weights=weights)


def with_length(rows: Rows, length: int) -> Rows:
    """Return rows with undefined ones after them, as many as a handle has. Local."""
    if rows.x.shape[0] == length:
        return rows
    scales = rows.scales
    return Rows(
        x=_lengthened(rows.x, length),
        scales=None if scales is None else _lengthened(scales, length),
    )


def _lengthened(tensor: Tensor, length: int) -> Tensor:
    out = tensor.new_empty(length, tensor.shape[1])
    out[: tensor.shape[0]] = tensor
    return out
