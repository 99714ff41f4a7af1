"""Limits, rows and counts of the buffers over the Ascend deep_ep."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from epcomm.buffers.ascend.calls import AscendCalls, device_types, slot_bytes, slots_to_ranks
from epcomm.buffers.base import Dispatched
from epcomm.buffers.vendor import COMBINE, DISPATCH
from epcomm.calls.call import DispatchCall
from epcomm.config import Mode
from epcomm.errors import BackendUnavailable, EPError
from epcomm.ops.masked_entries import fill_masked_entries
from epcomm.platforms.ascend.chip import Soc, current_soc
from epcomm.platforms.ascend.environment import Rounds, int8_reasons, rounds_of, variable_reasons
from epcomm.platforms.ascend.limits import MAX_TOP_K, Limits, window_reasons
from epcomm.platforms.machine import Machine
from epcomm.platforms.signatures import has_parameter, signature_reasons
from epcomm.protocol import BatchFlags
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.records import ExchangePlan
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import Layout, RowsPer, WireDtype, WireFormat, WireTensor

WIRE_DTYPES = frozenset({WireDtype.BF16, WireDtype.INT8})


@dataclass(frozen=True, kw_only=True, eq=False)
class AscendExchangePlan(ExchangePlan):
    """The handle of the package, and the counts that determine the bytes of a combine.

    num_tokens: tokens of the call; without tokens the package receives one dummy token.
    slots_from_rank: [W], int64, on the device, slots received from each rank.
    is_empty: [T, 1], bool: tokens without an expert, whose y is zero.
    """

    handle: Any
    slots_from_rank: Tensor
    is_empty: Tensor


def format_arguments(
    dispatch: Callable[..., object] | None, wire: WireFormat
) -> dict[str, str | bool]:
    """Return the arguments that select the format of rows, for the release that has `dispatch`.

    All are passed, so that no default and no environment variable decides. Releases up to August
    2026 have quant_mode, later ones flags; use_fp8, named like DeepEP's argument, means INT8 on A2
    and A3.
    """
    is_int8 = wire.dtype is WireDtype.INT8
    if dispatch is None or not has_parameter(dispatch, "quant_mode"):
        return {"use_fp8": is_int8, "use_mxfp4": False, "use_mxfp8": False}
    by_name: dict[str, str | bool] = {"quant_mode": "int8" if is_int8 else "bf16"}
    return by_name | {"use_fp8": is_int8} if has_parameter(dispatch, "use_fp8") else by_name


class AscendBuffer(AscendCalls):
    """A buffer of packed rows, one per (token, expert); combine multiplies by the router weights.

    It precedes Buffer among the bases.

    dispatching: the method of the package that takes the format of rows.
    """

    name: ClassVar[str]
    dispatching: ClassVar[str]

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = []
        if spec.hidden_format.dtype is not WireDtype.BF16:
            reasons.append(f"combine carries bf16, not {spec.hidden_format}")
        if spec.expert_alignment > 1:
            reasons.append("packs its rows, so expert_alignment must be 1")
        soc = current_soc()
        where = "" if soc is None else f" on {soc}"
        return tuple(reasons + cls._limits(soc).reasons(spec, world_size, where))

    @classmethod
    def lacks_with(cls, machine: Machine, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        window = cls._window_bytes(spec, world_size, rounds_of(machine.environment))
        reasons = [] if window is None else window_reasons(window, machine.environment)
        reasons += variable_reasons(machine.environment, current_soc())
        reasons += int8_reasons(spec.dispatch_format, machine.environment)
        return tuple(reasons)

    @classmethod
    @abstractmethod
    def _limits(cls, soc: Soc | None) -> Limits:
        """Return the sizes that the kernels of this mode take."""

    @classmethod
    @abstractmethod
    def _window_bytes(cls, spec: BufferSpec, world_size: int, rounds: Rounds) -> int | None:
        """Return the bytes of the HCCL window; None if the specification does not determine it."""

    def _signature_reasons(self, buffer: type) -> list[str]:
        method, names = self.dispatching, self.calls[self.dispatching]
        dispatch = getattr(buffer, method, None)
        self._format_arguments = format_arguments(dispatch, self._spec.dispatch_format)
        calls = {**self.calls, method: (*names, *self._format_arguments)}
        reasons = signature_reasons(buffer, calls)
        is_int8 = self._spec.dispatch_format.dtype is WireDtype.INT8
        if is_int8 and "quant_mode" not in self._format_arguments and current_soc() is Soc.A5:
            reasons.append(
                f"{buffer.__name__}.{method} of the installed package has no INT8 rows on A5, "
                "where use_fp8 means FP8 with a scale a token; dispatch bf16 rows"
            )
        return reasons

    def _sent(self, call: DispatchCall, ids: Tensor) -> DispatchCall:
        """Return the call for the package: an expert in every entry, and at least one token.

        ids: the top-k ids of the call that are safe to send.

        Without a token, releases of the package send a dummy token and record this in their Buffer,
        so that the next dispatch would change the result of an earlier batch's combine.
        """
        if ids.shape[0] == 0:
            return self._dummy(call)
        ids, weights = fill_masked_entries(ids, call.topk_weights, self._num_experts)
        rows = call.unquantized.contiguous()
        return replace(call, hidden_states=rows, topk_ids=ids, topk_weights=weights)

    def _dummy(self, call: DispatchCall) -> DispatchCall:
        """Return a call of one token of ones with weights of 0; a row of zeros has no scale."""
        top_k, device = self._spec.top_k, call.topk_ids.device
        first = self._rank * self._spec.num_local_experts
        experts = torch.arange(first, first + top_k, device=device) % self._num_experts
        return replace(
            call,
            hidden_states=call.unquantized.new_ones(1, self._spec.hidden_size),
            topk_ids=experts.unsqueeze(0),
            topk_weights=torch.zeros(1, top_k, dtype=torch.float32, device=device),
        )

    def _wire(self, received: Tensor | tuple[Tensor, Tensor]) -> WireTensor:
        """Return received rows with their scales.

        Raises:
            BackendUnavailable: rows or scales do not have the dispatch format.
        """
        data, scales = (received, None) if isinstance(received, Tensor) else received
        wanted = self._spec.dispatch_format
        if data.dtype != wanted.dtype.torch_dtype or (scales is None) is wanted.dtype.is_quantized:
            with_scales = "no scales" if scales is None else "scales"
            raise BackendUnavailable(
                f"{self.name}: received {data.dtype} rows with {with_scales}, expected {wanted} "
                f"(rank {self._rank} of {self._world_size}); install another release of deep_ep"
            )
        if scales is None:
            return WireTensor(data=data, format=WireFormat.of(data.dtype))
        return WireTensor(data=data, format=INT8_PER_TOKEN, scales=scales.unsqueeze(1))

    def _dispatched(
        self, rows: WireTensor, ids: Tensor, exchange_plan: AscendExchangePlan
    ) -> Dispatched:
        """Count the bytes that this rank sent, and return the received rows."""
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
        exchange_plan: ExchangePlan | None,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
        error: EPError | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert slot_weights is None, "weights are applied by combine"
        assert row_scalars is None, "there is no backward"
        self._compare_combine(error)
        if error is not None:
            return rows, None
        self._check_open()
        assert isinstance(exchange_plan, AscendExchangePlan), "an exchange plan of this buffer"
        # The dummy token of a rank without tokens is left out.
        y = self._return_rows(rows, exchange_plan)[: exchange_plan.num_tokens].masked_fill(
            exchange_plan.is_empty, 0.0
        )
        self._count_bytes(COMBINE, exchange_plan.slots_from_rank, slot_bytes(self._spec)[1])
        return y, None

    @abstractmethod
    def _return_rows(self, rows: Tensor, exchange_plan: AscendExchangePlan) -> Tensor:
        """Return the sums of `rows` times router weights for all tokens sent. Collective."""


def packed_caps(max_tokens: int | None) -> BufferCaps:
    """Return the capabilities of both modes, with exact sizes."""
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
    """Return the slots from each rank, [W], int64.

    prefix: inclusive sums of received slots, ordered by expert, then source rank.
    """
    ends = prefix.flatten().to(torch.int64)
    return ends.diff(prepend=ends.new_zeros(1)).view(-1, world_size).sum(0)
