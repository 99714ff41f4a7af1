"""What the buffers over the Ascend deep_ep share: probing, rows, counts."""

from __future__ import annotations

import sys
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Availability, BufferSpec
from epcomm.buffers.deep_ep_package import find_deep_ep
from epcomm.buffers.foreign import ForeignBuffer
from epcomm.deep_ep_facts import DeepEPKind
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.types import WireDtype, WireFormat, WireTensor

KINDS = frozenset({DeepEPKind.ASCEND})
WIRE_DTYPES = frozenset({WireDtype.BF16, WireDtype.INT8})
# Ids and weights of one (token, expert) pair, and the scale of its row.
ENTRY_BYTES, SCALE_BYTES = 12, 4


class AscendBuffer(ForeignBuffer):
    """Rows come packed, one a (token, expert) pair; combine multiplies by the router weights."""

    name: ClassVar[str]

    @classmethod
    def probe(cls, environment: object) -> Availability:
        kind, is_stand_in = find_deep_ep()
        reasons = []
        if kind is None:
            reasons.append("deep_ep for Ascend is not installed")
        elif kind not in KINDS:
            reasons.append(f"the deep_ep installed is {kind.value}, expected Ascend")
        elif not is_stand_in and "torch_npu" not in sys.modules:
            reasons.append("torch_npu is not imported; import it before epcomm plans")
        return Availability(ok=not reasons, reasons=tuple(reasons))

    @property
    def _quant_mode(self) -> str:
        """Passed with every call, so that no variable of the process decides."""
        return "int8" if self._spec.dispatch_format.dtype is WireDtype.INT8 else "bf16"

    def _wire(self, received: Tensor | tuple[Tensor, Tensor]) -> WireTensor:
        if isinstance(received, Tensor):
            return WireTensor(data=received, format=WireFormat.of(received.dtype))
        data, scales = received
        return WireTensor(data=data, format=INT8_PER_TOKEN, scales=scales.unsqueeze(1))

    def _destroy(self) -> None:
        """It holds a window of the process group, which is the group's."""
        self._buffer = None


def format_reasons(spec: BufferSpec) -> list[str]:
    """What no buffer of the package carries."""
    if spec.combine_format.dtype is WireDtype.BF16:
        return []
    return [f"combine carries bf16, not {spec.combine_format}"]


def slot_bytes(spec: BufferSpec) -> tuple[int, int]:
    """Of one (token, expert) pair, out and home."""
    scale_bytes = SCALE_BYTES if spec.dispatch_format.dtype is WireDtype.INT8 else 0
    wire = spec.dispatch_format.data_bytes(spec.hidden_size)
    return wire + scale_bytes + ENTRY_BYTES, 2 * spec.hidden_size


def slots_to_ranks(topk_ids: Tensor, num_experts: int, world_size: int) -> Tensor:
    """[W], int64, on the device: (token, expert) pairs for each rank."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=topk_ids.device)
    flat = topk_ids.flatten()
    return counts.scatter_add_(0, flat, torch.ones_like(flat)).view(world_size, -1).sum(1)


def slots_from_ranks(prefix: Tensor, world_size: int) -> Tensor:
    """[W], int64, from inclusive sums over (expert, source rank) of the pairs received."""
    ends = prefix.flatten().to(torch.int64)
    return ends.diff(prepend=ends.new_zeros(1)).view(-1, world_size).sum(0)
