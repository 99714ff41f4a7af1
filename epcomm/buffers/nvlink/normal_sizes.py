"""Capabilities, limits and bytes of normal mode over NVLink, and the names of its waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from epcomm.buffers.nvlink.excluded_ranks import ExcludingHost
from epcomm.buffers.nvlink.normal_layout import NUM_BUFFERS, NormalLayout
from epcomm.buffers.sizes import CallShape, Region, index_bytes, max_slots_of, slot_regions
from epcomm.buffers.traffic import BufferTraffic
from epcomm.config import Mode
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import FLOAT32_SUM_DTYPES, Layout

# Sums of one source that share a signal: fences cost less than a tenth of their time.
ITEM_ROWS = 16
# Tokens of a rank that a buffer without a limit has capacity for at first.
FIRST_TOKENS = 256


class NVLinkNormalFacts(ExcludingHost):
    """Capabilities, limits and bytes of normal mode over NVLink."""

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL})
    # Number of receive buffers. Tests also use 1, where a missing wait fails at once.
    num_buffers: ClassVar[int] = NUM_BUFFERS
    # Of each kernel, a block on each: enough for nine tenths of what the wire takes.
    default_num_sms: ClassVar[int] = 32

    @classmethod
    def _waits(cls) -> Mapping[int, str]:
        from epcomm.kernels.nvlink.normal_combine import PHASE_COMBINE_BEGIN, PHASE_SUMS
        from epcomm.kernels.nvlink.normal_dispatch_recv import PHASE_ROWS
        from epcomm.kernels.nvlink.normal_dispatch_send import PHASE_DISPATCH_BEGIN, PHASE_HEADERS

        return {
            PHASE_DISPATCH_BEGIN: "the beginning of dispatch {epoch}",
            PHASE_HEADERS: "the counts of dispatch {epoch}",
            PHASE_ROWS: "dispatch {epoch}",
            PHASE_COMBINE_BEGIN: "the beginning of combine {epoch}",
            PHASE_SUMS: "combine {epoch}",
        }

    @classmethod
    def _caps(cls, *, is_static: bool) -> BufferCaps:
        return BufferCaps(
            layout=Layout.ROWS,
            trainable=True,
            ordered=True,
            wire_dtypes=FLOAT32_SUM_DTYPES,
            is_static=is_static,
            batches_in_flight=cls.num_buffers,
            batches_on_request=True,
            reports_faults=True,
            device_types=frozenset({"cuda"}),
        )

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        if spec.combine_format.dtype.is_quantized:
            return (f"combine carries unquantised rows, not {spec.combine_format}",)
        return ()

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        layout = cls._layout_for(spec, world_size, spec.max_tokens_per_rank or FIRST_TOKENS)
        packed = slot_regions(
            spec, row_bytes=layout.data_bytes + layout.scale_bytes, max_rows=layout.num_rows
        )
        sizes = cls._block_sizes(spec, layout)
        if spec.max_tokens_per_rank is not None:
            sizes |= {each.name: each.max_bytes or 0 for each in packed}
            return tuple(Region(name=name, max_bytes=size) for name, size in sizes.items())
        sizes = {name: size // layout.max_tokens for name, size in sizes.items()}
        sizes |= {each.name: each.bytes_per_token or 0 for each in packed}
        return tuple(Region(name=name, bytes_per_token=size) for name, size in sizes.items())

    @classmethod
    def _block_sizes(cls, spec: BufferSpec, layout: NormalLayout) -> dict[str, int]:
        """Bytes of a block, and of an index over its rows."""
        row = layout.metadata_bytes + layout.data_bytes + layout.scale_bytes
        combine_bytes = layout.num_rows * layout.return_bytes
        headers = layout.num_buffers * layout.buffer_regions["header"]
        return {
            "signals and headers": layout.buffers_at - combine_bytes + headers,
            "received rows": layout.num_buffers * layout.num_rows * row,
            "returned rows": combine_bytes,
            "slot index": index_bytes(
                spec,
                num_rows=layout.num_rows,
                num_slots=cls._max_slots_of(spec, layout.num_rows),
                num_members=0,
            ),
        }

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        """As Buffer.wire_bytes(); signals are not counted."""
        layout = cls._layout_for(spec, call.world_size, FIRST_TOKENS)
        out, combine_bytes = row_bytes(spec, backward=backward)
        control = call.rows_sent * layout.metadata_bytes
        control += (call.world_size - 1) * layout.header_bytes
        return BufferTraffic(
            dispatch_bytes=call.rows_sent * out,
            combine_bytes=call.rows_received * combine_bytes,
            control_bytes=0 if backward else control,
        )

    @classmethod
    def _layout_for(cls, spec: BufferSpec, world_size: int, max_tokens: int) -> NormalLayout:
        return NormalLayout(spec, world_size, max_tokens, ITEM_ROWS, cls.num_buffers_of(spec))

    @classmethod
    def _max_slots_of(cls, spec: BufferSpec, num_rows: int) -> int:
        return spec.max_recv_slots or max_slots_of(spec, num_rows)


def row_bytes(spec: BufferSpec, *, backward: bool) -> tuple[int, int]:
    """Return the bytes of one row in dispatch and in combine, without the gaps between rows."""
    hidden_size = spec.hidden_size
    if backward:
        bare = spec.backward_format.data_bytes(hidden_size)
        return bare, bare + 4 * spec.top_k
    wire = spec.dispatch_format
    out = wire.data_bytes(hidden_size) + wire.scale_bytes(hidden_size)
    return out, spec.combine_format.data_bytes(hidden_size)
