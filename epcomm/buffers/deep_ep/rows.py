"""Rows as deep_ep takes and gives them: bfloat16, or FP8 codes with scales of four bytes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from epcomm.buffers.sizes import RowBytes
from epcomm.quantization.scale_layout import pack_scales, unpack_scales
from epcomm.spec import BufferSpec
from epcomm.types import WireFormat, WireTensor

# Bytes sent with the elements of a row for each of the K: an int64 id and a float32 weight.
_ENTRY_BYTES = 8 + 4

Rows = Tensor | tuple[Tensor, Tensor]
# The handle of a dispatch of the older buffer.
LegacyHandle = tuple[Tensor, ...]


class ElasticHandle(Protocol):
    """The fields that are read of an elastic buffer's handle; counts are int32, on the device.

    psum_num_recv_tokens_per_scaleup_rank: where the rows of each rank of an NVLink domain end.
    psum_num_recv_tokens_per_expert: [L]; expanded: aligned rows of the experts before, own ones.
    recv_src_metadata: [N, K + 2]; its first column numbers the token of each row, rank * M + t.
    num_recv_tokens_per_expert_list: [L], aligned, on the host; empty where it did not wait.
    """

    num_sms: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor


def as_argument(wire: WireTensor) -> Rows:
    """Return rows as dispatch() of deep_ep takes them; power-of-two scales go four to an int32."""
    if wire.scales is None:
        return wire.data.contiguous()
    scales = wire.scales
    if scales.dtype == torch.float8_e8m0fnu:
        scales = pack_scales(scales)
    return wire.data.contiguous(), scales


def weights_argument(weights: Tensor) -> Tensor:
    """Return router weights, contiguous, without memory where there are no tokens.

    The kernels compare the pointers of ids and weights with null. Ids without tokens are new and
    have none; a slice without rows keeps the pointer of its tensor.
    """
    return weights.contiguous() if weights.numel() else weights.new_empty(weights.shape)


def as_wire(received: Rows, wire_format: WireFormat) -> WireTensor:
    """Return what dispatch() of deep_ep received as a WireTensor: the inverse of as_argument()."""
    if isinstance(received, Tensor):
        return WireTensor(data=received, format=wire_format)
    data, scales = received
    if wire_format.scale_dtype == torch.float8_e8m0fnu:
        scales = unpack_scales(scales, wire_format.num_scales(data.shape[-1]))
    return WireTensor(data=data, format=wire_format, scales=scales)


def row_bytes_of(spec: BufferSpec, *, backward: bool = False) -> RowBytes:
    """Return bytes of a row in dispatch and combine; backward also sends gradients of weights."""
    hidden_size, entries = spec.hidden_size, _ENTRY_BYTES * spec.top_k
    combine_bytes = spec.hidden_format.data_bytes(hidden_size)
    if backward:
        return RowBytes(dispatch=combine_bytes, combine=combine_bytes + 4 * spec.top_k)
    wire = spec.dispatch_format
    scale_bytes = wire.scale_bytes(hidden_size)
    if wire.scale_dtype == torch.float8_e8m0fnu:
        # The size is a whole number of int32 words.
        scale_bytes = -(-scale_bytes // 4) * 4
    return RowBytes(
        dispatch=wire.data_bytes(hidden_size) + scale_bytes + entries, combine=combine_bytes
    )
