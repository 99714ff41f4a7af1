"""Normal mode over NVLink with a budget of rows: M is also the most rows that a rank receives."""

from dataclasses import replace
from typing import ClassVar

from epcomm.buffers.nvlink.normal import NVLinkStaticBuffer
from epcomm.buffers.nvlink.sizes import normal_regions
from epcomm.buffers.sizes import Region, most_slots_of
from epcomm.config import Mode
from epcomm.spec import BufferCaps, BufferSpec


class NVLinkRowBudgetBuffer(NVLinkStaticBuffer):
    """Serves normal mode with static sizes, and returns M rows without gaps between ranks.

    max_tokens_per_rank is both the most tokens that a rank dispatches and the most rows that it
    receives from all ranks together: for callers who know the sum, and not how it is spread. More
    rows on one rank are a fault on all. Rows after these have no slot and are undefined.
    Rows are always in separate memory, so one receive buffer suffices.
    """

    has_row_budget: ClassVar[bool] = True
    num_buffers: ClassVar[int] = 1

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(
            super().caps(mode),
            batches_in_flight=None,
            batches_on_request=False,
            has_slot_budget=False,
        )

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        layout = cls.layout_for(spec, world_size)
        num_rows = layout.max_tokens
        return normal_regions(spec, layout, cls._max_slots_of(spec, num_rows), num_rows)

    @classmethod
    def _max_slots_of(cls, spec: BufferSpec, num_rows: int) -> int:
        assert spec.max_tokens_per_rank is not None, "sizes are static"
        # A budget of rows has no fault for too many slots.
        return most_slots_of(spec, spec.max_tokens_per_rank)

    def _raise_faults(self) -> None:
        self._faults.check(None, max_rows=self._layout.max_tokens)
