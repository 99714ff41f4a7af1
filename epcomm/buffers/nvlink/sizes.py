"""Bytes of the NVLink buffers, as `plan` predicts them from numbers alone."""

from collections.abc import Mapping
from dataclasses import replace

from epcomm.buffers.sizes import Region, index_bytes, slot_regions
from epcomm.kernels.nvlink.common.layout import (
    MAX_RETURNED_ROWS,
    PART_LINES,
    SUM_FORMATS,
    VECTOR_BYTES,
    LowLatencyLayout,
    NormalLayout,
    plane_words,
)
from epcomm.spec import BufferSpec
from epcomm.types import Layout, align_up

# Sums of one source that share a signal: fences cost less than a tenth of their time.
_ITEM_ROWS = 16
# Tokens of a rank that a buffer of normal mode without a limit has capacity for at first.
_FIRST_TOKENS = 256
# Regions of low latency that hold rows.
_ROW_REGIONS = ("row_lines", "sum_lines", "data", "scales", "returned")
_WORD_BYTES = 4
# Quantised sums of 64 columns and the scales of a piece and a row, see combine.cu; longer rows take
# less memory than unquantised ones.
_LEAST_CODED_BYTES = 128


def wire_row_bytes(spec: BufferSpec) -> int:
    """Return the bytes of a row in dispatch, without gaps between rows."""
    wire = spec.dispatch_format
    return wire.data_bytes(spec.hidden_size) + wire.scale_bytes(spec.hidden_size)


def sum_bytes(spec: BufferSpec, *, backward: bool = False) -> int:
    """Return the bytes of a sum in combine, or of a gradient, without gaps between rows."""
    wire = (spec.backward_format if backward else spec.combine_format) or spec.hidden_format
    return wire.data_bytes(spec.hidden_size) + wire.scale_bytes(spec.hidden_size)


def normal_layout(
    spec: BufferSpec, world_size: int, max_tokens: int | None, num_buffers: int
) -> NormalLayout:
    """Return the layout of blocks for M tokens of each rank, and gradients as rows."""
    sizes = _block_sizes(spec, world_size, max_tokens or _FIRST_TOKENS, num_buffers)
    hidden_size, gradients = spec.hidden_size, spec.backward_format or spec.hidden_format
    data_bytes, scale_bytes = gradients.data_bytes(hidden_size), gradients.scale_bytes(hidden_size)
    sizes["data_bytes"] = max(sizes["data_bytes"], align_up(data_bytes, VECTOR_BYTES))
    sizes["scale_bytes"] = max(sizes["scale_bytes"], align_up(scale_bytes, VECTOR_BYTES))
    # Gradients return in the memory of sums, and either of them may be unquantised.
    plain_bytes = align_up(spec.hidden_format.data_bytes(hidden_size), VECTOR_BYTES)
    if spec.combine_format is not None or spec.backward_format is not None:
        sizes["return_bytes"] = max(plain_bytes, _LEAST_CODED_BYTES)
    return NormalLayout(**sizes, item_rows=_ITEM_ROWS)


def group_reasons(spec: BufferSpec, world_size: int) -> list[str]:
    """Return why a buffer cannot return a sum of each group of experts; none if it can."""
    groups = spec.sum_groups
    if groups is None or groups == world_size or spec.sums_at_source:
        return []
    if groups % world_size or spec.num_local_experts % (groups // world_size):
        return [
            f"the {spec.num_local_experts} experts of each of {world_size} ranks are no whole "
            f"groups of {groups}"
        ]
    if groups > MAX_RETURNED_ROWS:
        return [f"returns at most {MAX_RETURNED_ROWS} sums a token, not {groups}"]
    return []


def low_latency_layout(
    spec: BufferSpec, world_size: int, num_buffers: int, line_tokens: int
) -> LowLatencyLayout:
    """Return the layout of blocks with capacity for the tokens that the specification limits.

    line_tokens: the most tokens that a rank sends in lines, if blocks of its wire
        format are whole words.
    """
    assert spec.max_tokens_per_rank is not None, "plan() has checked the limit"
    if spec.sums_at_source:
        # Only the receiver of slots in bulk adds them by group.
        line_tokens = 0
    sizes = _block_sizes(spec, world_size, spec.max_tokens_per_rank, num_buffers)
    wire, hidden_size = spec.dispatch_format, spec.hidden_size
    sums = spec.combine_format or spec.hidden_format
    block = wire.scale_block or _WORD_BYTES
    data_words = -(-wire.data_bytes(hidden_size) // _WORD_BYTES)
    data_plane, scale_plane = plane_words(data_words), 1
    if wire.scale_block:
        # Whole blocks, a power of two, whose scales are whole words of whatever type.
        block_words = -(-block // _WORD_BYTES)
        blocks = 1 << (max(_WORD_BYTES, -(-PART_LINES // block_words)) - 1).bit_length()
        assert wire.scale_dtype is not None, "a block has a scale"
        data_plane = blocks * block_words
        scale_plane = blocks * wire.scale_dtype.itemsize // _WORD_BYTES
    return LowLatencyLayout(
        **sizes,
        line_tokens=0 if block % _WORD_BYTES else min(line_tokens, spec.max_tokens_per_rank),
        data_words=data_words,
        scale_words=-(-wire.scale_bytes(hidden_size) // _WORD_BYTES),
        return_words=-(-sums.data_bytes(hidden_size) // _WORD_BYTES),
        data_plane=data_plane,
        scale_plane=scale_plane,
        returns_slots=spec.returns_slots or spec.sums_at_source,
        sum_block=sums.scale_block or 0,
        sum_exponents=sums.has_exponents,
        sum_row_scale=sums.dtype.has_row_scale,
    )


def _block_sizes(
    spec: BufferSpec, world_size: int, max_tokens: int, num_buffers: int
) -> dict[str, int]:
    """Return the fields of a MemoryLayout."""
    wire, hidden_size = spec.dispatch_format, spec.hidden_size
    assert spec.combine_format in (None, *SUM_FORMATS), f"sums are {spec.combine_format}"
    sums = spec.combine_format or spec.hidden_format
    sum_end = align_up(sums.data_bytes(hidden_size), _WORD_BYTES) + sums.scale_bytes(hidden_size)
    return {
        "world_size": world_size,
        "max_tokens": max_tokens,
        "top_k": spec.top_k,
        "num_local_experts": spec.num_local_experts,
        "num_buffers": num_buffers,
        "groups": 1 if spec.sums_at_source else spec.returned_columns(world_size),
        "data_bytes": align_up(wire.data_bytes(hidden_size), VECTOR_BYTES),
        "scale_bytes": align_up(wire.scale_bytes(hidden_size), VECTOR_BYTES),
        "return_bytes": align_up(sum_end, VECTOR_BYTES),
    }


def normal_regions(
    spec: BufferSpec, layout: NormalLayout, num_slots: int, num_rows: int | None = None
) -> tuple[Region, ...]:
    """Return Buffer.region_bytes() for an index of C slots, by token if the spec has no limit.

    num_rows: R, of the index; None: the rows for which there is memory.
    """
    num_rows = num_rows or layout.num_rows
    row_bytes = layout.data_bytes + layout.scale_bytes
    combine_bytes = layout.num_rows * layout.groups * layout.return_bytes
    header_bytes = layout.num_buffers * layout.regions["header"]
    sizes = {
        "signals and headers": layout.buffers_at - combine_bytes + header_bytes,
        "received rows": layout.num_buffers * layout.num_rows * (layout.metadata_bytes + row_bytes),
        "returned rows": combine_bytes,
        "slot index": index_bytes(spec, num_rows=num_rows, num_slots=num_slots, num_members=0),
    }
    packed = slot_regions(spec, row_bytes=row_bytes, max_rows=num_rows)
    if spec.max_tokens_per_rank is not None:
        return (*_regions(sizes), *(replace(each, bytes_per_token=None) for each in packed))
    return (
        *(
            Region(name=name, bytes_per_token=size // layout.max_tokens)
            for name, size in sizes.items()
        ),
        *(replace(each, max_bytes=None) for each in packed),
    )


def low_latency_regions(
    spec: BufferSpec, layout: LowLatencyLayout, num_slots: int, handed: Layout
) -> tuple[Region, ...]:
    """Return Buffer.region_bytes() for an index of C slots, in the layout that is returned."""
    num_rows, num_bytes = layout.num_rows, layout.data_bytes + layout.scale_bytes
    index = index_bytes(spec, num_rows=num_rows, num_slots=num_slots, num_members=0)
    rows = {name.replace("_", " "): layout.regions[name] for name in _ROW_REGIONS}
    buffer_sizes = {
        "signals and metadata": layout.buffer_bytes - sum(rows.values()),
        **rows,
        "slot index": index + num_rows,
    }
    if handed is Layout.MASKED:
        buffer_sizes["packed rows"] = num_slots * num_bytes
    sizes = {name: layout.num_buffers * size for name, size in buffer_sizes.items()}
    if handed is Layout.MASKED:
        results = num_slots * spec.hidden_format.data_bytes(spec.hidden_size)
        return _regions(sizes | {"expert results": results})
    packed = slot_regions(spec, row_bytes=num_bytes, max_rows=num_rows)
    return (*_regions(sizes), *(replace(each, bytes_per_token=None) for each in packed))


def _regions(sizes: Mapping[str, int]) -> tuple[Region, ...]:
    return tuple(Region(name=name, max_bytes=size) for name, size in sizes.items())
