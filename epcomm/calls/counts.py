"""The counts message of exact-size buffers: the header of a dispatch with row and slot counts.

Each rank receives the number of its rows and the slots of each of its experts. The message is sent
before the rows, so sizes, faults and flags together cost one small message and one host sync.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from epcomm.calls.call import DispatchCall
from epcomm.calls.faults import check_gradients, ids_error, is_repeated, raise_faults
from epcomm.calls.header import (
    CHECK,
    COUNTS_IN_HEADER,
    FAULT,
    FLAGS,
    HEADER_WORDS,
    MESSAGE_BYTES,
    MESSAGE_WORDS,
    PAIRS,
    ROWS,
    CallKind,
    CallSign,
)
from epcomm.calls.order import Calls
from epcomm.errors import EPError, RankNames, shown
from epcomm.protocol import BatchFlags, FaultCode, fault_word
from epcomm.records import Steps
from epcomm.spec import BufferSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """The counts of rows and slots that this rank sends and receives in a dispatch.

    rows_to_rank, rows_from_rank: [W].
    pairs_to_rank, pairs_from_rank: [W], rows that combine returns for them; 0 without sum_groups.
    tokens_per_expert: [L].   device_tokens_per_expert: the same, int64, on the device.
    any_flags: the flags of all ranks, or-ed.
    """

    rows_to_rank: tuple[int, ...]
    rows_from_rank: tuple[int, ...]
    pairs_to_rank: tuple[int, ...]
    pairs_from_rank: tuple[int, ...]
    tokens_per_expert: tuple[int, ...]
    device_tokens_per_expert: Tensor
    any_flags: BatchFlags


def any_flags(flags: Sequence[int]) -> BatchFlags:
    """Return the flags of all ranks, or-ed."""
    return BatchFlags(reduce(or_, flags))


def guard_ids(
    topk_ids: Tensor, num_experts: int, error: EPError | None, *, distinct: bool = False
) -> tuple[Tensor, Tensor]:
    """Replace all ids of a bad call by -1 and compute its fault word. Host sync: none.

    distinct: a row that names an expert twice is a fault too.

    Returns:
        topk_ids [T, K] that are safe to index with, and the fault word as an int64 scalar tensor.
    """
    bad_ids = ((topk_ids < -1) | (topk_ids >= num_experts)).any()
    word = 0 if error is None else fault_word(error)
    fault = torch.where(bad_ids, word or int(FaultCode.IDS), word)
    if distinct:
        has_repeated = is_repeated(topk_ids.sort(dim=1).values).any() & (fault == 0)
        fault = torch.where(has_repeated, int(FaultCode.REPEATED_IDS), fault)
    # torch.where keeps strides, which vendor kernels ignore, so the result is made contiguous.
    return torch.where(fault != 0, -1, topk_ids).contiguous(), fault


def make_headers(
    calls: Calls,
    sign: CallSign,
    flags: BatchFlags,
    counts: tuple[Tensor, Tensor, Tensor],
    *,
    has_rest: bool,
    pairs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the headers of a dispatch and the counts that do not fit. Host sync: none.

    Args:
        calls: the calls of the group.
        sign: the sign of the dispatch.
        flags: the flags of this rank's batch.
        counts: the fault code, a scalar; rows for each rank, [W] or one number for all; slots of
            all experts, [P].
        has_rest: headers have a fixed size, and the counts that do not fit need a second exchange;
            else the header is longer.
        pairs: [W], the rows that each rank returns in combine, with sum_groups.

    Returns: the header for each rank with the slots of its first COUNTS_IN_HEADER experts,
        [W, words], int64, and the slots of its other experts, [W, L - COUNTS_IN_HEADER].
    """
    fault, rows, slots = counts
    by_rank = slots.view(calls.world_size, -1)
    num_here = min(by_rank.shape[1], COUNTS_IN_HEADER) if has_rest else by_rank.shape[1]
    words = calls.header(CallKind.DISPATCH, sign, flags=int(flags))
    header = calls.message(words, max(MESSAGE_WORDS, HEADER_WORDS + num_here))
    header[:, FAULT] = fault
    header[:, ROWS] = rows
    if pairs is not None:
        header[:, PAIRS] = pairs
    header[:, HEADER_WORDS : HEADER_WORDS + num_here] = by_rank[:, :num_here]
    seal(header)
    return header, by_rank[:, num_here:].contiguous()


def seal(header: Tensor) -> None:
    """Write CHECK of complete headers [W, words]. Host sync: none."""
    header[:, CHECK] -= header.sum(1)


def empty_headers(calls: Calls, num_experts: int, *, has_rest: bool) -> tuple[Tensor, Tensor]:
    """Return zeroed headers and counts for a kernel to fill; see make_headers(). num_experts: L."""
    num_here = min(num_experts, COUNTS_IN_HEADER) if has_rest else num_experts
    header = calls.message((), max(MESSAGE_WORDS, HEADER_WORDS + num_here))
    return header, header.new_zeros(calls.world_size, num_experts - num_here)


def counts_bytes(num_local_experts: int) -> int:
    """Return the bytes of the counts message for one rank, both exchanges together."""
    return MESSAGE_BYTES + 8 * max(num_local_experts - COUNTS_IN_HEADER, 0)


def exchange_counts(
    calls: Calls,
    call: DispatchCall,
    headers: tuple[Tensor, Tensor],
    spec: BufferSpec,
    *,
    rows_have_slots: bool = True,
    exchange: Callable[[Tensor], Tensor] | None = None,
    start_read: Callable[[Tensor], Callable[[], list]] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Steps[Counts]:
    """Exchange headers with row and slot counts: the only host sync of a dispatch.

    It comes after a pause, unless the host has waited in the exchange already.

    Args:
        calls: the calls of the group.
        call: this rank's part of the dispatch.
        headers: from make_headers() or empty_headers().
        spec: the specification of the buffer.
        rows_have_slots: ranks send only rows that have a slot.
        exchange: sends header row r to rank r and returns the headers from all ranks; None:
            calls.exchange().
        start_read: begins to copy a tensor to the host; None: tolist().
        meanwhile: launches work that does not depend on the received headers; it runs on the
            device while the host reads them.

    Collective: yes.   Host sync: yes.
    Raises:
        HandleError: some ranks make a different call; on every rank.
        ShapeError, CapacityError: some rank reported a fault; on every rank.
        ConfigError: some ranks need gradients, others run under no_grad; on every rank.
        EPError: the counts are impossible; the group becomes unusable, see Calls.reject().
    """
    sent, sent_rest = headers
    received = calls.exchange(sent, CallKind.DISPATCH.phase) if exchange is None else exchange(sent)
    end = HEADER_WORDS + spec.num_local_experts - sent_rest.shape[1]
    both = torch.stack([sent[:, :end], received[:, :end]])
    read = both.tolist if start_read is None else start_read(both)
    if meanwhile is not None:
        meanwhile()
    if not calls.waits:
        yield
    sent_words, received_words = read()
    calls.compare(received_words, received, call.error)
    slots = received[:, HEADER_WORDS:end]
    if sent_rest.numel() > 0:
        # CHECK excludes these counts, because a rank in a different call does not send them.
        # _read_counts() rejects counts that are out of range.
        rest = calls.collectives.all_to_all(sent_rest, phase=CallKind.DISPATCH.phase)
        slots = torch.cat([slots, rest], dim=1)
        received_words = [
            [*words, *more] for words, more in zip(received_words, rest.tolist(), strict=True)
        ]
    return _read_counts(
        received_words, sent_words, slots, call, spec, calls, rows_have_slots=rows_have_slots
    )


def _read_counts(
    headers: Sequence[Sequence[int]],
    sent: Sequence[Sequence[int]],
    device_slots: Tensor,
    call: DispatchCall,
    spec: BufferSpec,
    calls: Calls,
    *,
    rows_have_slots: bool,
) -> Counts:
    """Read the headers of one call, after Calls.compare(); see exchange_counts().

    headers: from each rank, on the host, each followed by the slots of this rank's experts.
    sent: to each rank.   device_slots: [W, L], the slots of `headers` on the device.
    """
    codes, flags = ([words[place] for words in headers] for place in (FAULT, FLAGS))
    if any(codes):
        calls.check_others()
    check_headers(codes, flags, call, spec.num_local_experts * calls.world_size, calls.names)
    num_slots = device_slots.shape[1]
    slots_from_rank = [words[HEADER_WORDS : HEADER_WORDS + num_slots] for words in headers]
    for rank, (words, slots) in enumerate(zip(headers, slots_from_rank, strict=True)):
        num_rows, most = words[ROWS], spec.max_tokens_per_rank
        if most is not None and num_rows > most:
            calls.reject(rank, f"rows {num_rows}, expected at most max_tokens_per_rank = {most}")
        least = num_rows if rows_have_slots else 0
        if min(slots) < 0 or not least <= sum(slots) <= num_rows * spec.top_k:
            expected = f"{least} to {num_rows * spec.top_k} for {num_rows} rows"
            calls.reject(rank, f"slots {shown(slots)}, expected {expected}")
        fewest, most_pairs = (0, 0) if spec.sum_groups is None else (least, sum(slots))
        pairs = words[PAIRS]
        if rows_have_slots and not fewest <= pairs <= most_pairs:
            calls.reject(rank, f"pairs {pairs}, expected {fewest} to {most_pairs}")
    return Counts(
        rows_to_rank=tuple(words[ROWS] for words in sent),
        rows_from_rank=tuple(words[ROWS] for words in headers),
        pairs_to_rank=tuple(words[PAIRS] for words in sent),
        pairs_from_rank=tuple(words[PAIRS] for words in headers),
        tokens_per_expert=tuple(map(sum, zip(*slots_from_rank, strict=True))),
        device_tokens_per_expert=device_slots.sum(0),
        any_flags=any_flags(flags),
    )


def check_headers(
    codes: list[int], flags: Sequence[int], call: DispatchCall, num_experts: int, names: RankNames
) -> None:
    """Raise the faults that the headers of a dispatch report.

    codes, flags: the fault word and the BatchFlags of each rank.

    Raises:
        ShapeError, CapacityError, ConfigError: as exchange_counts().
    """
    own_error = call.error
    if codes[names.place] == FaultCode.IDS:
        own_error = ids_error(call.topk_ids, num_experts, names)
    if any(codes):
        raise_faults(codes, names, own_error)
    if len(set(flags)) > 1:
        check_gradients(flags, names, call.expert_names)
