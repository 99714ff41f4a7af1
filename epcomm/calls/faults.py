"""Faults of a call: a rank sends a fault code in place of its counts, so that every rank raises.

The rank with the fault takes part without rows. All ranks read the codes together with the counts,
so reporting needs no extra message and the group stays usable.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from epcomm.errors import (
    CapacityError,
    ConfigError,
    EPError,
    HandleError,
    RankNames,
    ShapeError,
    describe_ranks,
    grouped,
)
from epcomm.protocol import (
    COMPARED_FLAGS,
    FAULT_MASK,
    FLAGS_SHIFT,
    MAX_TRAINED,
    TRAINED_SHIFT,
    BatchFlags,
    FaultCode,
    fault_word,
    fault_word_of_byte,
    is_fault_byte,
    is_passed_on,
    pack_fault,
    unpack_fault,
)

_FAULT_TEXT = {
    FaultCode.SHAPE: "a tensor of wrong shape, dtype or device",
    FaultCode.IDS: "topk_ids out of range",
    FaultCode.REPEATED_IDS: "an expert twice in a row of topk_ids",
    FaultCode.CAPACITY: "more tokens than max_tokens_per_rank",
    FaultCode.OVERFLOW: "more received slots than max_recv_slots",
    FaultCode.GRAD_MODE: "torch.no_grad() while other ranks are in grad mode",
    FaultCode.HANDLE: "a batch combined twice, by another dispatcher, or after close()",
    FaultCode.NO_GRADIENTS: "gradients or decode in a mode or combine_dtype without them",
    FaultCode.ROWS: "a combine input of wrong layout, shape, dtype or device",
    FaultCode.EXPERTS: "an error while the experts computed or their results were summed",
    FaultCode.FROZEN: "an expert parameter that others train is frozen",
    FaultCode.UNREADY: "an error while tokens were routed or prepared for dispatch",
    FaultCode.CALLS: "a call that differs from that of another rank",
    FaultCode.UNFINISHED: "a call that was begun and never waited for",
}
# The error class if all faults have these codes; otherwise all ranks raise ShapeError.
_ERRORS = (
    (CapacityError, {FaultCode.CAPACITY, FaultCode.OVERFLOW}),
    (ConfigError, {FaultCode.GRAD_MODE, FaultCode.NO_GRADIENTS, FaultCode.FROZEN}),
    (HandleError, {FaultCode.HANDLE, FaultCode.CALLS, FaultCode.UNFINISHED}),
    (EPError, {FaultCode.EXPERTS, FaultCode.UNREADY}),
)


def is_repeated(ordered_ids: Tensor) -> Tensor:
    """Return whether each entry equals the next, [T, K - 1], bool; rows of ids are sorted."""
    return (ordered_ids[:, 1:] == ordered_ids[:, :-1]) & (ordered_ids[:, 1:] >= 0)


def ids_error(topk_ids: Tensor, num_experts: int, names: RankNames) -> ShapeError:
    """Return the detailed error of a rank whose ids are out of range. Host sync: reads the ids."""
    worst = int(topk_ids.max()) if int(topk_ids.max()) >= num_experts else int(topk_ids.min())
    error = ShapeError(
        f"dispatch: topk_ids holds {worst}, expected -1 or 0 to {num_experts - 1} "
        f"({names.where}); pass physical expert ids"
    )
    error.fault_word = pack_fault(FaultCode.IDS, names.own)
    return error


def repeated_ids_error(topk_ids: Tensor, names: RankNames) -> ShapeError:
    """Return the detailed error of a rank that names an expert twice. Host sync: reads the ids."""
    ordered = topk_ids.sort(dim=1).values.cpu()
    token, place = is_repeated(ordered).nonzero()[0].tolist()
    return ShapeError(
        f"dispatch: topk_ids names expert {int(ordered[token, place])} twice for token {token}, "
        f"expected distinct experts in a row ({names.where}); add up their weights "
        "and pass -1 for the others"
    )


def overwritten_error(backend: str, batch: int, num_batches: int, where: str) -> HandleError:
    """Return the error of a combine whose rows a later batch has overwritten."""
    return HandleError(
        f"combine: the rows of batch {batch} of {backend} were overwritten by batch "
        f"{batch + num_batches}, because at most {num_batches} may be in flight ({where}); "
        "combine a batch earlier, or set EPConfig.batches_in_flight"
    )


def raise_faults(
    words: Sequence[int], names: RankNames, own_error: EPError | None, *, function: str = "dispatch"
) -> None:
    """Raise on this rank if any rank reported a fault.

    Args:
        words: the fault word of each rank.
        names: the names of these ranks.
        own_error: the detailed error of this rank, or None.
        function: the function that found the faults.
    """
    if not any(words):
        return
    was_passed_on = any(map(is_passed_on, words))
    if own_error is not None:
        own_error.was_passed_on |= was_passed_on
        raise own_error
    sent = zip(words, names.numbers, strict=True)
    found = sorted({unpack_fault(word, number) for word, number in sent if word})
    ranks_of = grouped(found)
    faults = [f"{_FAULT_TEXT[code]} on {describe_ranks(r)}" for code, r in ranks_of.items()]
    kind = next((each for each, codes in _ERRORS if ranks_of.keys() <= codes), ShapeError)
    error = kind(
        f"{function}: {'; '.join(faults)} (this is {names.where}); "
        "no rows were sent and the group is usable; correct the call of the rank named"
    )
    error.fault_word = pack_fault(*found[0])
    error.was_passed_on = was_passed_on
    raise error


def check_gradients(flags: Sequence[int], names: RankNames, expert_names: Sequence[str]) -> None:
    """Check that all ranks of a batch need the same gradients.

    Args:
        flags: the BatchFlags of each rank.
        names: the names of these ranks.
        expert_names: names of the expert tensors, in the order of their bits.

    Raises:
        ConfigError: on every rank. Some ranks run under no_grad, so the backward of the others
            would hang; or an expert tensor is frozen on only some of the ranks.
    """
    needing = BatchFlags.INPUTS_NEED_GRAD | BatchFlags.EXPERTS_NEED_GRAD
    without_grad = [r for r, flag in enumerate(flags) if not flag & BatchFlags.GRAD_ENABLED]
    if without_grad and any(flag & needing for flag in flags):
        runs = "runs" if len(without_grad) == 1 else "run"
        error = ConfigError(
            f"dispatch: {names.describe(without_grad)} {runs} under torch.no_grad() while others "
            f"need gradients (this is {names.where}), so backward would hang; use one "
            "grad mode on all ranks"
        )
        error.fault_word = pack_fault(FaultCode.GRAD_MODE, names.numbers[without_grad[0]])
        raise error
    frozen: dict[str, list[str]] = {}
    faulty_rank = 0
    # Another rank may have named tensors that this one has not.
    for place in range(MAX_TRAINED if len(set(flags)) > 1 else 0):
        bit = 1 << (TRAINED_SHIFT + place)
        ranks = [r for r, flag in enumerate(flags) if not flag & bit]
        if 0 < len(ranks) < len(flags):
            is_named = place < len(expert_names)
            name = expert_names[place] if is_named else f"expert tensor {place}"
            frozen.setdefault(names.describe(ranks), []).append(name)
            faulty_rank = names.numbers[ranks[0]]
    if frozen:
        told = " and ".join(
            f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} frozen on {ranks}"
            for ranks, found in frozen.items()
        )
        them = "it" if sum(map(len, frozen.values())) == 1 else "them"
        error = ConfigError(
            f"dispatch: {told}, while the other ranks train {them} (this is {names.where}), so "
            "optimizers and norms over all experts would hang; call requires_grad_() "
            "with the same value on all ranks"
        )
        error.fault_word = pack_fault(FaultCode.FROZEN, faulty_rank)
        raise error


def assume_all_need_grad(flags: BatchFlags) -> BatchFlags:
    """Return the flags that a rank assumes for the batch if it cannot read those of other ranks.

    In grad mode another rank may need any gradient, so all ranks take part in every backward.
    """
    # Fast path: decoding runs without gradients.
    if flags is BatchFlags.NONE or not flags & BatchFlags.GRAD_ENABLED:
        return flags
    return flags | BatchFlags.INPUTS_NEED_GRAD | BatchFlags.EXPERTS_NEED_GRAD


def pack_header(fault: Tensor, flags: BatchFlags) -> Tensor:
    """Return the status of a rank, one int32: the code of a fault word and the BatchFlags.

    fault: the fault word, a scalar tensor. A status does not carry the rank of a relayed fault.
    """
    return (fault & FAULT_MASK).to(torch.int32) | (int(flags) << FLAGS_SHIFT)


class DeviceFaults:
    """The faults recorded on the device: the first one of each rank since the last check().

    entries: [W, 2], int64: each rank's FaultCode and the slots that an overflow needed.
    """

    def __init__(self, names: RankNames, device: torch.device) -> None:
        """Start without faults, for the ranks of `names`."""
        self._names = names
        self._own_error: EPError | None = None
        self.entries = torch.zeros(len(names.numbers), 2, dtype=torch.int64, device=device)

    def note_own(self, error: EPError | None) -> None:
        """Keep the detailed error of this rank; a kernel records its code. Local."""
        if error is not None and (self._own_error is None or self._own_error.was_raised):
            self._own_error = error

    def record(
        self, headers: Tensor, overflows: Tensor, required: Tensor, own_error: EPError | None
    ) -> Tensor:
        """Record the faults of one dispatch; return whether it has failed, a bool scalar.

        Args:
            headers: [W], int32, from pack_header().
            overflows: [W], bool: whether the slots of a rank exceed its budget.
            required: [W], int64: the slots that each rank needs.
            own_error: the detailed error of this rank, or None.

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
        """Record the fault codes of one combine, [W], int64; return whether it has failed."""
        return self._note(codes, torch.zeros_like(codes), own_error)

    def _note(self, codes: Tensor, required: Tensor, own_error: EPError | None) -> Tensor:
        self.note_own(own_error)
        entries, has_fault = torch.stack([codes, required], dim=1), codes != 0
        is_new = has_fault & (self.entries[:, 0] == 0)
        # Write in place, because a captured graph keeps using this memory.
        self.entries.copy_(torch.where(is_new.unsqueeze(1), entries, self.entries))
        return has_fault.any()

    def check(
        self, max_slots: int | None, *, max_rows: int | None = None, has_budget: bool = True
    ) -> None:
        """Raise the recorded faults and clear them. Host sync: yes.

        max_slots, max_rows: most slots or rows that a rank receives; one of them is None.
        has_budget: max_slots is configurable; else it is the most that distinct ids can need.
        """
        entries = self.entries.tolist()
        own_error, self._own_error = self._own_error, None
        if not any(code for code, _ in entries):
            return
        self.entries.zero_()
        words = [self._fault_word(place, byte) for place, (byte, _) in enumerate(entries)]
        if own_error is not None and own_error.was_raised:
            # Keep the faults of other ranks, and an older fault of this rank.
            place = self._names.place
            own_words = fault_word(own_error), fault_word(own_error, in_combine=True)
            codes = {unpack_fault(word, 0)[0] for word in own_words}
            if isinstance(own_error, ShapeError):
                # The device has a separate code for repeated ids.
                codes.add(FaultCode.REPEATED_IDS)
            if unpack_fault(words[place], 0)[0] in codes:
                words[place], entries[place] = int(FaultCode.NONE), [0, 0]
            own_error = None
        if not any(words):
            return
        numbers = self._names.numbers
        found = [unpack_fault(word, rank) for word, rank in zip(words, numbers, strict=True)]
        overflowed = [rank for code, rank in found if code is FaultCode.OVERFLOW]
        required = max(slots for _, slots in entries)
        if overflowed:
            unit = "slots"
            limit = f"max_recv_slots = {max_slots}"
            remedy = f"raise max_recv_slots to {required}"
            if max_rows is not None:
                unit = "rows"
                limit = f"max_tokens_per_rank = {max_rows} from all ranks together"
                remedy = f"raise max_tokens_per_rank to {required}"
            elif not has_budget:
                limit = f"{max_slots}, the most that distinct experts need"
                remedy = "name each expert at most once in a row of topk_ids"
            raise CapacityError(
                f"dispatch: {describe_ranks(overflowed)} received up to {required} {unit}, "
                f"expected at most {limit} (this is {self._names.where}); y was set to NaN; "
                f"{remedy}"
            )
        of_combine = {FaultCode.NONE, FaultCode.HANDLE, FaultCode.ROWS, FaultCode.EXPERTS}
        in_combine = {code for code, _ in found} <= of_combine | {FaultCode.CALLS}
        function = "combine" if in_combine else "dispatch"
        raise_faults(words, self._names, own_error, function=function)

    def _fault_word(self, place: int, byte: int) -> int:
        """Return the fault word of a fault byte from the device.

        Raises:
            EPError: the byte is not a valid fault.
        """
        if not is_fault_byte(byte):
            raise EPError(
                f"check: the status of {self._names.describe([place])} has fault {byte}, expected "
                f"a FaultCode (this is {self._names.where}); y was set to NaN; check that all "
                "ranks run the same version of epcomm, and the memory and network of the rank named"
            )
        return fault_word_of_byte(byte, self._names.numbers[place])
