"""Reports of kernels whose wait timed out, and the error that the host of their rank raises."""

import ctypes

import torch
from torch import Tensor

from epcomm.collectives.base import Collectives
from epcomm.errors import EPTimeout, describe_ranks
from epcomm.protocol import (
    REPORT_ABORTED,
    REPORT_EPOCH,
    REPORT_MISSING,
    REPORT_WAIT,
    Wait,
    decode_abort,
)

_TEXTS = {
    Wait.CREDIT: "the combine that releases this receive buffer, use {epoch} of it",
    Wait.DISPATCH: "dispatch, use {epoch} of its receive buffer",
    Wait.COMBINE: "combine, use {epoch} of its receive buffer",
    Wait.DISPATCH_BEGIN: "the beginning of dispatch {epoch}",
    Wait.HEADERS: "the counts of dispatch {epoch}",
    Wait.ROWS: "dispatch {epoch}",
    Wait.COMBINE_BEGIN: "the beginning of combine {epoch}",
    Wait.SUMS: "combine {epoch}",
}


def host_words(num_words: int, device: torch.device) -> tuple[Tensor, ctypes.Array[ctypes.c_int32]]:
    """Return memory of zeros, int32, that the host reads while kernels of a device write it.

    Twice: a view for ctypes takes less host time, because tolist() of a tensor takes 2 us.
    """
    is_pinned = device.type == "cuda"
    words = torch.zeros(num_words, dtype=torch.int32, device="cpu", pin_memory=is_pinned)
    return words, (ctypes.c_int32 * num_words).from_address(words.data_ptr())


class WaitReport:
    """The report of the wait that this rank could not end.

    entries: [REPORT_MISSING + W], int32, zero at first; the host may read them at any time.
    """

    def __init__(self, collectives: Collectives, backend: str) -> None:
        """Report nothing yet; `backend` begins every message."""
        self._collectives, self._backend = collectives, backend
        num_entries = REPORT_MISSING + collectives.world_size
        self.entries, self._words = host_words(num_entries, collectives.device)

    def check(self) -> None:
        """Raise the error that a kernel has reported. Local; does not wait for a device.

        Raises:
            EPTimeout: a kernel of this rank, or of one that set the abort flags, timed out.
        """
        words = self._words
        if words[REPORT_WAIT] or words[REPORT_ABORTED]:
            entries = self.entries.tolist()
            rank = self._collectives.rank
            story = _own_story(entries) if entries[REPORT_WAIT] else _abort_story(entries, rank)
            if entries[REPORT_WAIT]:
                story += f", within {self._collectives.kernel_timeout_s:g} s"
            raise EPTimeout(
                f"{self._backend}: {story} (this is rank {rank} of "
                f"{self._collectives.world_size}); close the group and make a new one"
            )


def _own_story(entries: list[int]) -> str:
    missing = [rank for rank, is_missing in enumerate(entries[REPORT_MISSING:]) if is_missing]
    text = _TEXTS[Wait(entries[REPORT_WAIT])].format(epoch=entries[REPORT_EPOCH])
    return f"{describe_ranks(missing)} did not arrive in {text}"


def _abort_story(entries: list[int], own_rank: int) -> str:
    timed_out, missing = decode_abort(entries[REPORT_ABORTED])
    what = f"rank {timed_out} gave up waiting for {describe_ranks(missing)} and aborted all ranks"
    if own_rank in missing:
        return f"this rank came too late: {what}"
    if missing:
        return f"{describe_ranks(missing)} did not arrive: {what}"
    return f"rank {timed_out} gave up waiting and aborted all ranks; see its message"
