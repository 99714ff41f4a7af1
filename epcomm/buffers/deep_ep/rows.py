"""Rows in the form that deep_ep takes and returns: bfloat16, or FP8 codes with 4-byte scales."""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from epcomm.buffers.sizes import RowBytes
from epcomm.quantization.scale_layout import pack_scales, row_major
from epcomm.spec import BufferSpec
from epcomm.types import ScaleLayout, WireFormat, WireTensor, align_up

# Bytes sent with the elements of a row for each of its K experts: an int64 id and a float32 weight.
_ENTRY_BYTES = 8 + 4

# Low latency of V1: the bytes of a message before its elements, those of a scale, and its columns.
MESSAGE_HEADER_BYTES, _SCALE_BYTES, _SCALE_BLOCK = 16, 4, 128
# Sizes of buffers of V1 are multiples of this number.
_ALIGNMENT_BYTES = 128

Rows = Tensor | tuple[Tensor, Tensor]
# The handle of a dispatch of the older buffer.
LegacyHandle = tuple[Tensor, ...]


class ElasticHandle(Protocol):
    """The fields of an elastic buffer's handle that are read; counts are int32, on the device.

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
    """Return rows as dispatch() of deep_ep takes them; an int32 holds four power-of-two scales."""
    if wire.scales is None:
        return wire.data.contiguous()
    has_exponents = wire.scales.dtype == torch.float8_e8m0fnu
    return wire.data.contiguous(), pack_scales(wire.scales) if has_exponents else wire.scales


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
    wire = WireTensor(data=data, format=wire_format, scales=scales)
    if wire_format.scale_dtype != torch.float8_e8m0fnu:
        return wire
    return row_major(replace(wire, scale_layout=ScaleLayout(packed=True)))


def row_bytes_of(spec: BufferSpec, *, backward: bool = False) -> RowBytes:
    """Return bytes of a row in dispatch and combine; backward also sends gradients of weights."""
    hidden_size, entries = spec.hidden_size, _ENTRY_BYTES * spec.top_k
    sum_bytes = spec.hidden_format.data_bytes(hidden_size)
    if backward:
        return RowBytes(dispatch=sum_bytes, combine=sum_bytes + 4 * spec.top_k)
    wire = spec.dispatch_format
    scale_bytes = wire.scale_bytes(hidden_size)
    if wire.scale_dtype == torch.float8_e8m0fnu:
        # The size is a whole number of int32 words.
        scale_bytes = -(-scale_bytes // 4) * 4
    sent_bytes = wire.data_bytes(hidden_size) + scale_bytes + entries
    return RowBytes(dispatch=sent_bytes, combine=sum_bytes)


def low_latency_bytes(max_tokens: int, hidden_size: int, num_experts: int) -> int:
    """Return the bytes that V1 allocates for low latency, for any number of ranks and routing.

    Worked example, M = 16, H = 2048, E = 8: a combine message has 4160 bytes, 128 of them 532480,
    two to send and two to receive 2129920, and 128 for the signals of each: 2130176; a multiple of
    128 already, to which V1 adds another 128.

    Source: deep_ep, csrc/config.hpp, LowLatencyLayout and get_low_latency_rdma_size_hint.
    """
    scale_bytes = low_latency_scale_bytes(hidden_size)
    combine_bytes = 2 * hidden_size + scale_bytes
    dispatch_bytes = MESSAGE_HEADER_BYTES + max(2 * hidden_size, hidden_size + scale_bytes)
    send = max(max_tokens * dispatch_bytes, num_experts * max_tokens * combine_bytes)
    receive = num_experts * max_tokens * max(dispatch_bytes, combine_bytes)
    total = 2 * (send + receive + align_up(4 * num_experts, _ALIGNMENT_BYTES))
    return (total + _ALIGNMENT_BYTES) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES


def low_latency_scale_bytes(hidden_size: int) -> int:
    """Return the bytes of the scales of a row."""
    return hidden_size // _SCALE_BLOCK * _SCALE_BYTES
