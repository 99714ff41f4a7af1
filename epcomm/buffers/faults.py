"""Tell how a rank reports a bad call: a fault code in place of counts, so that every rank raises.

A rank that finds a fault takes part with no rows. All ranks read the codes with the counts, which
they read anyway, so no extra message is spent and the group stays usable.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from epcomm.errors import (
    CapacityError,
    ConfigError,
    EPError,
    HandleError,
    ShapeError,
    describe_ranks,
)
from epcomm.protocol import COMPARED_FLAGS, FLAGS_SHIFT, TRAINED_SHIFT, BatchFlags, FaultCode

_FAULT_TEXT = {
    FaultCode.SHAPE: "a tensor of wrong shape, dtype or device",
    FaultCode.IDS: "topk_ids out of range",
    FaultCode.REPEATED_IDS: "an expert twice in a row of topk_ids",
    FaultCode.CAPACITY: "more tokens than max_tokens_per_rank",
    FaultCode.OVERFLOW: "more received slots than max_recv_slots",
    FaultCode.GRAD_MODE: "torch.no_grad() while other ranks are in grad mode",
    FaultCode.HANDLE: "a combined batch, a batch of another dispatcher, or a closed dispatcher,",
    FaultCode.NO_GRADIENTS: "gradients or decode asked of a mode that has none",
    FaultCode.ROWS: "a combine input of wrong layout, shape, dtype or device",
    FaultCode.EXPERTS: "an error while the experts computed or their results were summed",
    FaultCode.FROZEN: "an expert parameter that others train is frozen",
    FaultCode.UNREADY: "an error while tokens were routed or made ready to be sent",
}
# What all ranks raise if there are no faults of another kind.
_ERRORS = (
    (CapacityError, {FaultCode.CAPACITY, FaultCode.OVERFLOW}),
    (ConfigError, {FaultCode.GRAD_MODE, FaultCode.NO_GRADIENTS, FaultCode.FROZEN}),
    (HandleError, {FaultCode.HANDLE}),
    (EPError, {FaultCode.EXPERTS, FaultCode.UNREADY}),
)


def any_flags(flags: Sequence[int]) -> BatchFlags:
    """Return the flags of all ranks, or-ed."""
    return BatchFlags(reduce(or_, flags))


def guard_ids(
    topk_ids: Tensor, num_experts: int, error: EPError | None, *, distinct: bool = False
) -> tuple[Tensor, Tensor]:
    """Replace all ids of a bad call by -1, and make its fault code, without a host sync.

    distinct: whether an expert twice in a row is a fault too.

    Returns:
        topk_ids [T, K] that are safe to index with, and the FaultCode as an int64 scalar tensor.
    """
    bad_ids = ((topk_ids < -1) | (topk_ids >= num_experts)).any()
    code = FaultCode.of(error)
    fault = torch.where(bad_ids, int(FaultCode.IDS if code == FaultCode.NONE else code), int(code))
    if distinct:
        is_repeated = _is_repeated(topk_ids.sort(dim=1).values).any() & (fault == 0)
        fault = torch.where(is_repeated, int(FaultCode.REPEATED_IDS), fault)
    # Contiguous whatever came: torch.where keeps strides, which vendor kernels do not read.
    return torch.where(fault != 0, -1, topk_ids).contiguous(), fault


def _is_repeated(ordered_ids: Tensor) -> Tensor:
    """Mark entries whose next entry names the same expert, [T, K - 1]; rows of ids are ordered."""
    return (ordered_ids[:, 1:] == ordered_ids[:, :-1]) & (ordered_ids[:, 1:] >= 0)


def ids_error(topk_ids: Tensor, num_experts: int, rank: int, world_size: int) -> ShapeError:
    """Return the detailed error of a rank whose ids are out of range. Host sync: reads the ids."""
    worst = int(topk_ids.max()) if int(topk_ids.max()) >= num_experts else int(topk_ids.min())
    return ShapeError(
        f"dispatch: topk_ids holds {worst}, expected -1 or 0 to {num_experts - 1} "
        f"(rank {rank} of {world_size}); pass physical expert ids"
    )


def repeated_ids_error(topk_ids: Tensor, rank: int, world_size: int) -> ShapeError:
    """Return the detailed error of a rank that names an expert twice. Reads the ids on the host."""
    ordered = topk_ids.sort(dim=1).values.cpu()
    token, place = _is_repeated(ordered).nonzero()[0].tolist()
    return ShapeError(
        f"dispatch: topk_ids names expert {int(ordered[token, place])} twice for token {token}, "
        f"expected distinct experts in a row (rank {rank} of {world_size}); add up their weights "
        "and pass -1 for the others"
    )


def overwritten_error(backend: str, batch: int, num_batches: int, where: str) -> HandleError:
    """Return the error of a combine whose rows lay in memory that a later batch has taken."""
    return HandleError(
        f"combine: the rows of batch {batch} of {backend} were overwritten by batch "
        f"{batch + num_batches}, for {num_batches} may be in flight ({where}); combine a batch "
        "earlier, or set EPConfig.batches_in_flight"
    )


def raise_faults(
    codes: Sequence[int], rank: int, own_error: EPError | None, *, function: str = "dispatch"
) -> None:
    """Raise on this rank if any rank reported a fault, after all have heard of it.

    Args:
        codes: a FaultCode a rank.
        rank: this rank.
        own_error: the detailed error that this rank found, if it did.
        function: in which the faults were found.
    """
    if not any(codes):
        return
    if own_error is not None:
        raise own_error
    faults = [
        f"{_FAULT_TEXT[code]} on {describe_ranks([r for r, c in enumerate(codes) if c == code])}"
        for code in FaultCode
        if code and code in codes
    ]
    raise _error_of(set(codes) - {FaultCode.NONE})(
        f"{function}: {'; '.join(faults)} (this is rank {rank} of {len(codes)}); "
        "no rows were sent and the group is usable; correct the call of the rank named"
    )


def _error_of(codes: Set[int]) -> type[EPError]:
    return next((error for error, kinds in _ERRORS if codes <= kinds), ShapeError)


def check_gradients(flags: Sequence[int], rank: int, expert_names: Sequence[str]) -> None:
    """Refuse a batch of which ranks would train other things.

    Args:
        flags: the BatchFlags a rank.
        rank: this rank.
        expert_names: of the tensors of the experts, in the order of their bits.

    Raises:
        ConfigError: on every rank. Some ranks run under no_grad, so that the backward of others
            would wait for ever; or a tensor of the experts is frozen on some ranks alone.
    """
    needing = BatchFlags.INPUTS_NEED_GRAD | BatchFlags.EXPERTS_NEED_GRAD
    without_grad = [r for r, flag in enumerate(flags) if not flag & BatchFlags.GRAD_ENABLED]
    if without_grad and any(flag & needing for flag in flags):
        runs = "runs" if len(without_grad) == 1 else "run"
        raise ConfigError(
            f"dispatch: {describe_ranks(without_grad)} {runs} under torch.no_grad() while others "
            f"need gradients (this is rank {rank} of {len(flags)}), so backward would wait for "
            "ever; use one grad mode on all ranks"
        )
    frozen: dict[str, list[str]] = {}
    for place, name in enumerate(expert_names):
        bit = 1 << (TRAINED_SHIFT + place)
        ranks = [r for r, flag in enumerate(flags) if not flag & bit]
        if 0 < len(ranks) < len(flags):
            frozen.setdefault(describe_ranks(ranks), []).append(name)
    if frozen:
        told = " and ".join(
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} frozen on {ranks}"
            for ranks, names in frozen.items()
        )
        them = "it" if sum(map(len, frozen.values())) == 1 else "them"
        raise ConfigError(
            f"dispatch: {told}, while the other ranks train {them} (this is rank {rank} of "
            f"{len(flags)}), so optimizers and norms over all experts would wait for ever; call "
            "requires_grad_() alike on all ranks"
        )


def assume_all_need_grad(flags: BatchFlags) -> BatchFlags:
    """Return the flags that a rank assumes of the others when it may not read theirs.

    In grad mode some rank may need any gradient, so all take part in every backward.
    """
    # Decoding, whose host time counts, has none.
    if flags is BatchFlags.NONE or not flags & BatchFlags.GRAD_ENABLED:
        return flags
    return flags | BatchFlags.INPUTS_NEED_GRAD | BatchFlags.EXPERTS_NEED_GRAD


def pack_header(fault: Tensor, flags: BatchFlags) -> Tensor:
    """Return the status of a rank, one int32: FaultCode (scalar tensor) and BatchFlags."""
    return fault.to(torch.int32) | (int(flags) << FLAGS_SHIFT)


class DeviceFaults:
    """The faults that wait on the device: the first one of each rank since the last check."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        """Begin without a fault, for `world_size` ranks."""
        self._rank = rank
        self._own_error: EPError | None = None
        # [W, 2]: FaultCode, and the slots that an overflow would have needed.
        self._entries = torch.zeros(world_size, 2, dtype=torch.int64, device=device)

    @property
    def entries(self) -> Tensor:
        """Return [W, 2], int64: each rank's FaultCode and the slots that an overflow needed."""
        return self._entries

    def note_own(self, error: EPError | None) -> None:
        """Keep the detailed error of this rank, whose code a kernel notes. Local."""
        self._own_error = self._own_error or error

    def record(
        self, headers: Tensor, overflows: Tensor, required: Tensor, own_error: EPError | None
    ) -> Tensor:
        """Note the faults of one dispatch.

        Args:
            headers: [W], int32, as pack_header() made them.
            overflows: [W], bool: the slots of a rank exceed its budget.
            required: [W], int64: the slots it would need.
            own_error: the detailed error of this rank, if it has one.

        Returns:
            bool scalar on the device: the call has failed, on every rank.

        Host sync: none.
        """
        flags = headers >> FLAGS_SHIFT
        codes = (headers & ((1 << FLAGS_SHIFT) - 1)).long()
        codes = torch.where(overflows, int(FaultCode.OVERFLOW), codes)
        compared = flags & COMPARED_FLAGS
        is_mixed = (compared != compared.amax()) & (codes == 0)
        mixed = torch.where(compared == 0, int(FaultCode.GRAD_MODE), int(FaultCode.FROZEN))
        codes = torch.where(is_mixed, mixed, codes)
        return self._note(codes, required, own_error)

    def record_combine(self, codes: Tensor, own_error: EPError | None) -> Tensor:
        """Note the faults of one combine: codes [W], FaultCode. Returns and costs as record."""
        codes = codes.long()
        return self._note(codes, torch.zeros_like(codes), own_error)

    def _note(self, codes: Tensor, required: Tensor, own_error: EPError | None) -> Tensor:
        self.note_own(own_error)
        entries = torch.stack([codes, required], dim=1)
        is_first = self._entries[:, :1] == 0
        # In place: a captured graph keeps writing to this memory.
        self._entries.copy_(
            torch.where(is_first & (codes != 0).unsqueeze(1), entries, self._entries)
        )
        return (codes != 0).any()

    def check(self, max_slots: int) -> None:
        """Raise the recorded faults and forget them. Host sync: yes."""
        entries = self._entries.tolist()
        own_error, self._own_error = self._own_error, None
        if not any(code for code, _ in entries):
            return
        self._entries.zero_()
        overflowed = [rank for rank, (code, _) in enumerate(entries) if code == FaultCode.OVERFLOW]
        if overflowed:
            required = max(entries[rank][1] for rank in overflowed)
            raise CapacityError(
                f"dispatch: {describe_ranks(overflowed)} received up to {required} slots, expected "
                f"at most max_recv_slots = {max_slots} (this is rank {self._rank} of "
                f"{len(entries)}); y was set to NaN; raise max_recv_slots to {required}"
            )
        codes = [code for code, _ in entries]
        of_combine = {FaultCode.NONE, FaultCode.HANDLE, FaultCode.ROWS, FaultCode.EXPERTS}
        in_combine = set(codes) <= of_combine
        function = "combine" if in_combine else "dispatch"
        raise_faults(codes, self._rank, own_error, function=function)
