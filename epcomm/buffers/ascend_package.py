"""What the buffers over the Ascend deep_ep share: probing, opening, rows, counts."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from epcomm.ascend_facts import MAX_TOP_K, SizeLimits, size_reasons, window_reasons
from epcomm.ascend_soc import DEVICE_NAMES, Soc, current_soc, device_name
from epcomm.ascend_variables import rounds_of, variable_reasons
from epcomm.buffers.base import Availability, BufferCaps, BufferSpec, Combined, Dispatched
from epcomm.buffers.deep_ep_package import find_deep_ep, import_deep_ep
from epcomm.buffers.faults import BatchFlags
from epcomm.buffers.fit import carrying_reasons, limit_reasons
from epcomm.buffers.foreign import COMBINE, DISPATCH, ForeignBuffer
from epcomm.buffers.signatures import signature_reasons
from epcomm.buffers.sizes import CallShape
from epcomm.buffers.traffic import BufferTraffic
from epcomm.collectives.base import describe_ranks
from epcomm.config import Mode, environment
from epcomm.deep_ep_facts import DeepEPKind
from epcomm.errors import BackendUnavailable
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.records import Route, SlotIndex
from epcomm.types import Layout, RowsPer, WeightsAppliedBy, WireDtype, WireFormat, WireTensor

WIRE_DTYPES = frozenset({WireDtype.BF16, WireDtype.INT8})
# Ids and weights of one (token, expert) pair, and the scale of its row.
ENTRY_BYTES, SCALE_BYTES = 12, 4


@dataclass(frozen=True, kw_only=True, eq=False)
class AscendRoute(Route):
    """The package's handle, and what the bytes of a combine are counted by.

    slots_from_rank: [W], int64, on the device.
    """

    num_tokens: int
    num_rows: int
    index: SlotIndex
    handle: Any
    slots_from_rank: Tensor


class AscendBuffer(ForeignBuffer):
    """Rows come packed, one a (token, expert) pair; combine multiplies by the router weights.

    calls: what is passed to the package's Buffer, by method; everything is passed by name.
    """

    name: ClassVar[str]
    mode: ClassVar[Mode]
    calls: ClassVar[Mapping[str, Sequence[str]]]
    # A slot is written once for a (token, expert) pair.
    needs_distinct_ids: ClassVar[bool] = True
    # The package's Buffer, whose types are the package's own.
    _buffer: Any

    @classmethod
    def probe(cls, environment: object) -> Availability:
        kind, is_stand_in = find_deep_ep()
        reasons = []
        if kind is None:
            reasons.append("deep_ep for Ascend is not installed")
        elif kind is not DeepEPKind.ASCEND:
            reasons.append(f"the deep_ep installed is {kind.value}, expected Ascend")
        elif not is_stand_in and "torch_npu" not in sys.modules:
            reasons.append("torch_npu is not imported; import it before epcomm plans")
        elif (device := device_name()) is not None and current_soc() is None:
            known = ", ".join(DEVICE_NAMES.values())
            reasons.append(f"the device is {device}, expected one of {known}")
        return Availability(ok=not reasons, reasons=tuple(reasons))

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        variables, soc = environment(), current_soc()
        reasons = []
        if spec.combine_format.dtype is not WireDtype.BF16:
            reasons.append(f"combine carries bf16, not {spec.combine_format}")
        if spec.slot_alignment > 1:
            reasons.append("packs its rows, so slot_alignment must be 1")
        reasons += size_reasons(spec, world_size, cls._limits(soc), soc)
        window = cls._window_bytes(spec, world_size, variables)
        if window is not None:
            reasons += window_reasons(window, variables)
        reasons += variable_reasons(variables, soc)
        return tuple(reasons + cls._mode_reasons(spec, world_size, variables))

    @classmethod
    @abstractmethod
    def _limits(cls, soc: Soc | None) -> SizeLimits:
        """Sizes that the kernels of this mode take."""

    @classmethod
    @abstractmethod
    def _window_bytes(
        cls, spec: BufferSpec, world_size: int, variables: Mapping[str, str]
    ) -> int | None:
        """The HCCL window that it needs; None where the specification lacks what decides it."""

    @classmethod
    @abstractmethod
    def _mode_reasons(
        cls, spec: BufferSpec, world_size: int, variables: Mapping[str, str]
    ) -> list[str]:
        """What this mode alone refuses."""

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        out, home = slot_bytes(spec)
        return BufferTraffic(
            dispatch_bytes=call.slots_sent * out, combine_bytes=call.slots_received * home
        )

    def _open(self, **arguments: object) -> None:
        """Make the package's Buffer, once every rank has found that it can.

        The variables are read again: EPGroup.open_buffer may be called without a plan, or later.
        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: some rank cannot serve the specification; on every rank.
            ConfigError: ranks cut batches into different rounds.
        """
        process_group = self._process_group
        caps = self.caps(self.mode)
        reasons = [
            *self.probe(environment()).reasons,
            *carrying_reasons(self._spec, caps),
            *limit_reasons(self._spec, caps, self.mode),
            *self.lacks(self.mode, self._spec, self._world_size),
        ]
        package: Any = None
        if not reasons:
            try:
                package = import_deep_ep()
                reasons += signature_reasons(package.Buffer, self.calls)
            except BackendUnavailable as error:
                reasons.append(str(error))
        self._raise_reasons(reasons)
        self._collectives.agree(_settings(), what=self.name)
        self._buffer = package.Buffer(group=process_group, **arguments)

    def _raise_reasons(self, reasons: Sequence[str]) -> None:
        """Raise on every rank if some rank has reasons."""
        mine = {"reasons": "; ".join(reasons)}
        texts = [
            str(record["reasons"])
            for record in self._collectives.gather_records(mine, phase="prepare")
        ]
        faults = [
            f"{describe_ranks([r for r, other in enumerate(texts) if other == text])}: {text}"
            for text in dict.fromkeys(texts)
            if text
        ]
        if faults:
            raise BackendUnavailable(
                f"{self.name}: cannot be opened, {'; '.join(faults)} (this is rank {self._rank} of "
                f"{self._world_size})"
            )

    @property
    def _quant_mode(self) -> str:
        """Passed with every call, so that no variable of the process decides."""
        return "int8" if self._spec.dispatch_format.dtype is WireDtype.INT8 else "bf16"

    def _wire(self, received: Tensor | tuple[Tensor, Tensor]) -> WireTensor:
        """Received rows with their scales.

        Raises:
            BackendUnavailable: they are not what was asked for.
        """
        data, scales = (received, None) if isinstance(received, Tensor) else received
        wanted = self._spec.dispatch_format
        if data.dtype != wanted.dtype.torch_dtype or (scales is None) is wanted.dtype.is_quantized:
            with_scales = "no scales" if scales is None else "scales"
            raise BackendUnavailable(
                f"{self.name}: rows came as {data.dtype} with {with_scales}, expected {wanted} "
                f"(rank {self._rank} of {self._world_size}); install another release of deep_ep"
            )
        if scales is None:
            return WireTensor(data=data, format=WireFormat.of(data.dtype))
        return WireTensor(data=data, format=INT8_PER_TOKEN, scales=scales.unsqueeze(1))

    def _dispatched(self, rows: WireTensor, ids: Tensor, route: AscendRoute) -> Dispatched:
        """What arrived, after the bytes that this rank sent were counted."""
        to_rank = _slots_to_ranks(ids, self._num_experts, self._world_size)
        self._count_bytes(DISPATCH, to_rank, slot_bytes(self._spec)[0])
        return Dispatched(
            rows=rows,
            index=route.index,
            slot_weights=None,
            route=route,
            any_flags=BatchFlags.NONE,
        )

    def redispatch(self, hidden_states: Tensor, route: Route) -> Tensor:
        raise NotImplementedError("there is no cached dispatch (caps.reuses_route)")

    def combine(
        self,
        rows: Tensor,
        route: Route,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        assert isinstance(route, AscendRoute), "a route of this buffer"
        assert slot_weights is None, "weights are applied at home"
        assert row_scalars is None, "there is no backward"
        self._check_open()
        self._compare_combine()
        y = self._bring_home(rows, route)
        self._count_bytes(COMBINE, route.slots_from_rank, slot_bytes(self._spec)[1])
        return Combined(y=y, scalars=None)

    @abstractmethod
    def _bring_home(self, rows: Tensor, route: AscendRoute) -> Tensor:
        """[T, H]: the sums of `rows`, times the router weights. Collective."""

    def _destroy(self) -> None:
        """It holds a window of the process group, which is the group's."""
        self._buffer = None


def packed_caps(max_tokens: int | None) -> BufferCaps:
    """What both modes have in common, on the side of exact sizes."""
    return BufferCaps(
        layout=Layout.ROWS,
        trainable=False,
        graph_safe=False,
        ordered=True,
        wire_dtypes=WIRE_DTYPES,
        weights_applied_by=frozenset({WeightsAppliedBy.COMBINE}),
        max_tokens_per_rank=max_tokens,
        max_top_k=MAX_TOP_K,
        reuses_route=False,
        announces_faults=False,
        fills_holes=True,
        needs_process_group=True,
    )


def slot_bytes(spec: BufferSpec) -> tuple[int, int]:
    """Of one (token, expert) pair, out and home."""
    scale_bytes = SCALE_BYTES if spec.dispatch_format.dtype is WireDtype.INT8 else 0
    wire = spec.dispatch_format.data_bytes(spec.hidden_size)
    return wire + scale_bytes + ENTRY_BYTES, 2 * spec.hidden_size


def slots_from_ranks(prefix: Tensor, world_size: int) -> Tensor:
    """[W], int64, from inclusive sums over (expert, source rank) of the pairs received."""
    ends = prefix.flatten().to(torch.int64)
    return ends.diff(prepend=ends.new_zeros(1)).view(-1, world_size).sum(0)


def _slots_to_ranks(topk_ids: Tensor, num_experts: int, world_size: int) -> Tensor:
    """[W], int64, on the device: (token, expert) pairs for each rank."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=topk_ids.device)
    flat = topk_ids.flatten()
    return counts.scatter_add_(0, flat, torch.ones_like(flat)).view(world_size, -1).sum(1)


def _settings() -> dict[str, str | int]:
    """What the variables and the chip decide, and must be equal on all ranks."""
    rounds = rounds_of(environment())
    return {
        "chip": str(current_soc()),
        "rounds": rounds.num_rounds,
        "tokens of a round": rounds.tokens_per_round,
        "rounds in combine": str(rounds.in_combine),
    }
