"""Normal dispatch of V1, and its handle: six tensors, and the exchange of the rows."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Self, SupportsIndex

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from epcomm.errors import CapacityError, ShapeError
from epcomm.integrations.deep_ep import normal
from epcomm.integrations.deep_ep.checks import FLOAT32, IDS, Check, Dtypes
from epcomm.integrations.deep_ep.ranks import Ranks, Service
from epcomm.spec import BufferSpec

# The dtypes of x without scales, and with scales.
PLAIN: Dtypes = (torch.bfloat16, torch.float16, torch.float32)
QUANTIZED: Dtypes = (torch.float8_e4m3fn, torch.int8)
_NUM_TENSORS = 6
# The position of the tensor whose memory stands for the handle.
_CHANNEL_PREFIX = 1
# The value of tensors whose numbers only the source ranks know. Indexing with it raises an error.
UNKNOWN = torch.iinfo(torch.int32).min


class NormalRequest(NamedTuple):
    """One dispatch of V1 on new routes; see Buffer.dispatch().

    is_in_rank, per_expert: tensors once check() has passed.   num_sms: see dispatch_rows().
    service: ROW_BUDGET: num_worst_tokens rows, at most as many tokens, and no host sync.
    """

    rows: normal.Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    is_in_rank: Tensor
    per_expert: Tensor
    num_worst_tokens: int
    num_sms: int | None
    service: Service

    def check(self, check: Check) -> None:
        """Check the arguments, and set check.spec; without ids and weights a rank is one expert."""
        num_ranks, ids, weights = check.ranks.size, self.topk_idx, self.topk_weights
        check.rows(self.rows, (None, None), PLAIN, QUANTIZED)
        num_tokens = self.rows.x.shape[0]
        check.tensor("num_tokens_per_expert", self.per_expert, (None,), (torch.int32,))
        num_experts = self.per_expert.shape[0]
        if num_experts < 1 or num_experts % num_ranks:
            fault = f"num_tokens_per_expert has {num_experts} entries, expected a multiple of the"
            raise check.error(ShapeError, f"{fault} {num_ranks} ranks")
        top_k, num_local, has_topk = num_ranks, 1, ids is not None or weights is not None
        if has_topk:
            top_k, num_local = check.top_k(num_tokens, ids, weights), num_experts // num_ranks
        most = self.num_worst_tokens if self.service.is_static else None
        check.spec = normal.spec_of(self.rows.form, top_k, num_local, max_tokens=most)
        check.tensor("is_token_in_rank", self.is_in_rank, (num_tokens, num_ranks), (torch.bool,))
        if has_topk:
            check.tensor("topk_idx", ids, (num_tokens, None), IDS)
            assert ids is not None, "just checked"
            check.tensor("topk_weights", weights, ids.shape, FLOAT32)
            check.ids(ids, num_experts)
        if self.service.is_static:
            check.num_tokens(num_tokens, "num_worst_tokens", self.num_worst_tokens)

    def send(self, ranks: Ranks, spec: BufferSpec) -> normal.ReceivedRows:
        """Dispatch; ids are those of is_in_rank where there are none.

        Collective: yes.   Host sync: one, none where sizes are static.
        Raises:
            CapacityError: some rank received more than num_worst_tokens rows; on every rank. On a
                GPU their sums are NaN instead.
        """
        ids, weights, most = self.topk_idx, self.topk_weights, self.num_worst_tokens
        options = {"num_worst_tokens": most, "has_topk_weights": ids is not None}
        if ids is None or weights is None:
            everyone = torch.arange(ranks.size, device=self.is_in_rank.device)
            ids = torch.where(self.is_in_rank, everyone, -1)
            weights = torch.ones_like(ids, dtype=torch.float32)
        topk = ids.long(), weights
        received = normal.dispatch_rows(
            ranks, self.service, self.rows, topk, spec, num_sms=self.num_sms, options=options
        )
        if self.service.is_static:
            return received
        if self.topk_idx is None:
            counts = self.per_expert.contiguous().view(ranks.size, -1)
            counts = ranks.collectives.all_to_all(counts, phase="dispatch").sum(0)
            received = replace(received, num_tokens_per_expert=tuple(counts.tolist()))
        return _with_worst_rows(ranks, received, most) if most else received


def _with_worst_rows(ranks: Ranks, received: normal.ReceivedRows, most: int) -> normal.ReceivedRows:
    """Pad the received rows to `most` rows.

    Collective: yes.   Host sync: yes.
    Raises:
        CapacityError: some rank received more; on every rank.
    """
    num_rows = received.exchange.num_rows
    largest = max(int(each["rows"] or 0) for each in ranks.gather("dispatch", {"rows": num_rows}))
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


def with_length(rows: normal.Rows, length: int) -> normal.Rows:
    """Return the rows padded with undefined rows to `length`. Local."""
    if rows.x.shape[0] == length:
        return rows
    scales = None if rows.scales is None else _lengthened(rows.scales, length)
    return normal.Rows(x=_lengthened(rows.x, length), scales=scales)


def _lengthened(tensor: Tensor, length: int) -> Tensor:
    out = tensor.new_empty(length, tensor.shape[1])
    out[: tensor.shape[0]] = tensor
    return out


class SavedHandles:
    """Finds the exchange of a plain tuple or list of the six tensors of a handle.

    Programs save these in its place, for instance by `ctx.save_for_backward(*handle)`. The key is
    the memory of channel_prefix_matrix: autograd may return other tensor objects in it. The first
    call after the program has freed this memory frees the exchange.
    """

    def __init__(self) -> None:
        self._exchanges: dict[StorageWeakRef, normal.RowExchange] = {}

    def keep(self, channel_prefix: Tensor, exchange: normal.RowExchange) -> None:
        """Keep the exchange for as long as the memory of channel_prefix_matrix exists."""
        self.drop_freed()
        self._exchanges[StorageWeakRef(channel_prefix.untyped_storage())] = exchange

    def drop_freed(self) -> None:
        """Free the exchanges whose tensors the program has freed."""
        for key in [key for key in self._exchanges if key.expired()]:
            del self._exchanges[key]

    def find(self, handle: object) -> normal.RowExchange | None:
        """Return the exchange of a handle or of its six tensors, or None if there is none."""
        if isinstance(handle, NormalHandle):
            return handle.exchange
        if not isinstance(handle, tuple | list) or len(handle) != _NUM_TENSORS:
            return None
        prefix = handle[_CHANNEL_PREFIX]
        if not isinstance(prefix, Tensor):
            return None
        return self._exchanges.get(StorageWeakRef(prefix.untyped_storage()))


class NormalHandle(normal.Uncopied, tuple[Tensor, ...]):
    """The tuple that V1 returns; programs pass it to later calls and read none of it.

    0: rank_prefix_matrix [W, W], int32; column `rank` has the received rows up to and with each
        source, the other columns are 0.
    1: channel_prefix_matrix [W, C], int32; rows sent to each rank up to and with each channel.
    2: recv_channel_prefix_matrix [W, C], int32, filled with UNKNOWN.
    3: recv_src_idx [R], int32, filled with UNKNOWN.
    4: is_token_in_rank [T, W], bool; the caller's own tensor.
    5: send_head [T, W], int32; position of a token in the queue of its channel, -1 where it is not
        sent.

    Reading, printing and comparing are local: the tensors are computed at the first read from what
    the dispatch left on this rank. The numbers of 2 and 3 are on the source ranks: no call reads
    them.
    Lifetime: as long as the program holds it, or its tensors.
    """

    exchange: normal.RowExchange
    is_in_rank: Tensor
    channels: int
    _saved: SavedHandles

    @classmethod
    def of(
        cls, exchange: normal.RowExchange, is_in_rank: Tensor, saved: SavedHandles, channels: int
    ) -> Self:
        """Make the handle of a dispatch; saved: of the Buffer whose calls will take it. Local."""
        handle = cls()
        handle.exchange, handle.is_in_rank = exchange, is_in_rank
        handle.channels, handle._saved = channels, saved
        return handle

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The six tensors. Local."""
        exchange, is_in_rank = self.exchange, self.is_in_rank
        num_ranks = is_in_rank.shape[1]
        rank_prefix = is_in_rank.new_zeros(num_ranks, num_ranks, dtype=torch.int32)
        rank_prefix[:, exchange.ranks.rank] = exchange.exchange_plan.rows_from_ranks().cumsum(0)
        prefix, send_head = _channels(is_in_rank, self.channels)
        before = torch.full_like(prefix, UNKNOWN)
        src_idx = is_in_rank.new_full((exchange.max_rows,), UNKNOWN, dtype=torch.int32)
        self._saved.keep(prefix, exchange)
        return rank_prefix, prefix, before, src_idx, is_in_rank, send_head

    def __len__(self) -> int:
        return _NUM_TENSORS

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __getitem__(self, position: SupportsIndex | slice) -> Any:  # noqa: ANN401 - as a tuple has it
        return self.tensors[position]

    # The methods of tuple would compare the elements of the tuple, which is empty here.
    __hash__, __eq__, __ne__ = object.__hash__, object.__eq__, object.__ne__

    def __repr__(self) -> str:
        exchange = self.exchange
        sizes = (exchange.max_rows, exchange.spec.hidden_size, exchange.num_tokens)
        return f"<NormalHandle of R, H, T = {sizes} on rank {exchange.ranks.rank}>"


def _channels(is_in_rank: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Return [W, C] and [T, W]: each channel takes the same number of consecutive tokens."""
    num_tokens, num_ranks = is_in_rank.shape
    share = max(-(-num_tokens // channels), 1)
    padded = torch.zeros(channels * share, num_ranks, dtype=torch.int32, device=is_in_rank.device)
    padded[:num_tokens] = is_in_rank
    by_channel = padded.view(channels, share, num_ranks)
    prefix = by_channel.sum(1).cumsum(0).T.to(torch.int32).contiguous()
    positions = (by_channel.cumsum(1) - 1).view(-1, num_ranks)[:num_tokens].to(torch.int32)
    return prefix, positions.masked_fill(~is_in_rank, -1).contiguous()
