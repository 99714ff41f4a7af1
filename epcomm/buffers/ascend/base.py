"""What the buffers over the Ascend deep_ep share: limits, rows, counts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from epcomm.buffers.ascend.calls import AscendCalls, device_types, slot_bytes, slots_to_ranks
from epcomm.buffers.base import Combined, DispatchCall, Dispatched
from epcomm.buffers.vendor import COMBINE, DISPATCH, VendorBuffer
from epcomm.config import Mode, environment
from epcomm.errors import BackendUnavailable
from epcomm.ops.masked_entries import fill_masked_entries
from epcomm.platforms.ascend.chip import Soc, current_soc
from epcomm.platforms.ascend.environment import variable_reasons
from epcomm.platforms.ascend.limits import MAX_TOP_K, Limits, window_reasons
from epcomm.protocol import BatchFlags
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import Layout, RowsPer, WireDtype, WireFormat, WireTensor

WIRE_DTYPES = frozenset({WireDtype.BF16, WireDtype.INT8})


@dataclass(frozen=True, kw_only=True, eq=False)
class AscendExchangePlan(ExchangePlan):
    """The package's handle, and what the bytes of a combine are counted by.

    num_tokens: of the call; the package was given one where there was none.
    slots_from_rank: [W], int64, on the device.
    is_empty: [T, 1], bool: tokens that are zeros in y.
    """

    num_tokens: int
    num_rows: int
    index: SlotIndex
    handle: Any
    slots_from_rank: Tensor
    is_empty: Tensor


class AscendBuffer(AscendCalls, VendorBuffer):
    """Rows come packed, one a (token, expert) pair; combine multiplies by the router weights."""

    name: ClassVar[str]

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        variables, soc = environment(), current_soc()
        reasons = []
        if spec.combine_format.dtype is not WireDtype.BF16:
            reasons.append(f"combine carries bf16, not {spec.combine_format}")
        if spec.expert_alignment > 1:
            reasons.append("packs its rows, so expert_alignment must be 1")
        where = "" if soc is None else f" on {soc}"
        reasons += cls._limits(soc).reasons(spec, world_size, where)
        window = cls._window_bytes(spec, world_size, variables)
        if window is not None:
            reasons += window_reasons(window, variables)
        reasons += variable_reasons(variables, soc)
        return tuple(reasons + cls._mode_reasons(spec, world_size, variables))

    @classmethod
    @abstractmethod
    def _limits(cls, soc: Soc | None) -> Limits:
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

    @property
    def _quant_mode(self) -> str:
        """Passed with every call, so that no variable of the process decides."""
        return "int8" if self._spec.dispatch_format.dtype is WireDtype.INT8 else "bf16"

    def _sent(self, call: DispatchCall, ids: Tensor) -> DispatchCall:
        """What the package is given: an expert in every entry, and one token at least.

        ids: those of the call that are safe to send.

        Releases of the package put a token in place of none, and keep in their Buffer that they
        did: the next dispatch then decides what an earlier one's combine returns.
        """
        if ids.shape[0] == 0:
            return self._dummy(call)
        ids, weights = fill_masked_entries(ids, call.topk_weights, self._num_experts)
        rows = call.hidden_states.contiguous()
        return replace(call, hidden_states=rows, topk_ids=ids, topk_weights=weights)

    def _dummy(self, call: DispatchCall) -> DispatchCall:
        """One token of weight 0, for experts of this rank first; a row of zeros had no scale."""
        top_k, device = self._spec.top_k, call.topk_ids.device
        first = self._rank * self._spec.num_local_experts
        experts = torch.arange(first, first + top_k, device=device) % self._num_experts
        return replace(
            call,
            hidden_states=call.hidden_states.new_ones(1, self._spec.hidden_size),
            topk_ids=experts.unsqueeze(0),
            topk_weights=torch.zeros(1, top_k, device=device),
        )

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

    def _dispatched(
        self, rows: WireTensor, ids: Tensor, exchange_plan: AscendExchangePlan
    ) -> Dispatched:
        """What arrived, after the bytes that this rank sent were counted."""
        to_rank = slots_to_ranks(ids, self._num_experts, self._world_size)
        self._count_bytes(DISPATCH, to_rank, slot_bytes(self._spec)[0])
        return Dispatched(
            rows=rows,
            index=exchange_plan.index,
            slot_weights=None,
            exchange_plan=exchange_plan,
            any_flags=BatchFlags.NONE,
        )

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        raise NotImplementedError("there is no cached dispatch (caps.trainable)")

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        assert isinstance(exchange_plan, AscendExchangePlan), "an exchange plan of this buffer"
        assert slot_weights is None, "weights are applied by combine"
        assert row_scalars is None, "there is no backward"
        self._check_open()
        self._compare_combine()
        # Without the token of a rank that has none.
        y = self._return_rows(rows, exchange_plan)[: exchange_plan.num_tokens].masked_fill(
            exchange_plan.is_empty, 0.0
        )
        self._count_bytes(COMBINE, exchange_plan.slots_from_rank, slot_bytes(self._spec)[1])
        return Combined(y=y, scalars=None)

    @abstractmethod
    def _return_rows(self, rows: Tensor, exchange_plan: AscendExchangePlan) -> Tensor:
        """The sums of `rows`, times the router weights, for all tokens sent. Collective."""


def packed_caps(max_tokens: int | None) -> BufferCaps:
    """What both modes have in common, on the side of exact sizes."""
    return BufferCaps(
        layout=Layout.ROWS,
        trainable=False,
        ordered=True,
        wire_dtypes=WIRE_DTYPES,
        max_tokens_per_rank=max_tokens,
        max_top_k=MAX_TOP_K,
        reports_faults=False,
        device_types=device_types(),
    )


def slots_from_ranks(prefix: Tensor, world_size: int) -> Tensor:
    """[W], int64, from inclusive sums over (expert, source rank) of the pairs received."""
    ends = prefix.flatten().to(torch.int64)
    return ends.diff(prepend=ends.new_zeros(1)).view(-1, world_size).sum(0)
