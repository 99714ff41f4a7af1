"""Move tokens with the kernels of the Ascend deep_ep: one packed row for each slot.

Normal mode: combine of the package multiplies by the router weights of the dispatch, so the runner
must not. The ids and weights that dispatch returns are uninitialised, and if no row arrives it
returns one undefined row, so only the counts are read. Each dispatch directly follows its layout
call, which sets state of the Buffer. There are no cached handles, hence no backward.

Low latency: a dispatch returns M * W * min(K, L) packed rows, of which the first sum(counts) are
defined; the counts stay on the device. Combine takes all rows and multiplies by the router weights,
which the exchange plan keeps. Hooks, events and cleaning of the package do nothing: all work is
ordered by the stream.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from epcomm.buffers.ascend.calls import AscendCalls, device_types, slot_bytes, slots_to_ranks
from epcomm.buffers.base import Buffer, Dispatched
from epcomm.buffers.sizes import Region, rows_region
from epcomm.buffers.vendor import COMBINE, DISPATCH
from epcomm.calls.call import DispatchCall
from epcomm.config import Mode
from epcomm.errors import BackendUnavailable, EPError
from epcomm.ops.masked_entries import fill_masked_entries, has_no_expert
from epcomm.ops.slots import packed_index
from epcomm.platforms.ascend import environment
from epcomm.platforms.ascend.chip import Soc, current_soc
from epcomm.platforms.ascend.environment import Rounds
from epcomm.platforms.ascend.limits import (
    MAX_LOCAL_EXPERTS_TIMES_RANKS,
    MAX_TOP_K,
    Limits,
    low_latency_limits,
    low_latency_window_bytes,
    normal_limits,
    normal_window_bytes,
)
from epcomm.platforms.machine import Machine
from epcomm.platforms.signatures import has_parameter, signature_reasons
from epcomm.protocol import BatchFlags
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.records import ExchangePlan
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import Int8Profile, Layout, RowsPer, WireDtype, WireFormat, WireTensor

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


class AscendBuffer(AscendCalls, Buffer):
    """A buffer of packed rows, one per (token, expert); combine multiplies by the router weights.

    dispatching: the method of the package that takes the format of rows.
    limits: returns the sizes that the kernels of this mode take on a chip.
    """

    name: ClassVar[str] = "ascend"
    dispatching: ClassVar[str]
    limits: ClassVar[Callable[[Soc | None], Limits]]

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = []
        if spec.hidden_format.dtype is not WireDtype.BF16:
            reasons.append(f"combine carries bf16, not {spec.hidden_format}")
        if spec.expert_alignment > 1:
            reasons.append("packs its rows, so expert_alignment must be 1")
        soc = current_soc()
        where = "" if soc is None else f" on {soc}"
        return tuple(reasons + cls.limits(soc).reasons(spec, world_size, where))

    @classmethod
    def lacks_with(cls, machine: Machine, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        window = cls._window_bytes(spec, world_size, environment.rounds_of(machine.environment))
        reasons = [] if window is None else environment.window_reasons(window, machine.environment)
        reasons += environment.variable_reasons(machine.environment, current_soc())
        reasons += environment.int8_reasons(spec.dispatch_format, machine.environment)
        return tuple(reasons)

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

    def _dispatched(self, rows: WireTensor, ids: Tensor, plan: AscendExchangePlan) -> Dispatched:
        to_rank = slots_to_ranks(ids, self._num_experts, self._world_size)
        self._count_bytes(DISPATCH, to_rank, slot_bytes(self._spec)[0])
        return Dispatched(
            rows=rows,
            index=plan.index,
            slot_weights=None,
            exchange_plan=plan,
            any_flags=BatchFlags.NONE,
        )

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


class AscendNormalBuffer(AscendBuffer):
    """Inference with exact sizes; the host waits for the counts once per dispatch."""

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL})
    dispatching: ClassVar[str] = "dispatch"
    limits = staticmethod(normal_limits)
    calls: ClassVar[Mapping[str, Sequence[str]]] = {
        "__init__": ("group",),
        "get_dispatch_layout": ("topk_idx", "num_experts"),
        "dispatch": (
            *("x", "num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"),
            *("topk_idx", "topk_weights"),
        ),
        "combine": ("x", "handle"),
    }

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(
            packed_caps(environment.current_rounds().max_tokens),
            # The package computes RINT127EPS; the two differ only for magnitudes below 2e-5.
            int8_profiles=frozenset({Int8Profile.RINT127, Int8Profile.RINT127EPS}),
        )

    @classmethod
    def lacks_with(cls, machine: Machine, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = super().lacks_with(machine, spec, world_size)
        return (*reasons, *environment.rounds_reasons(machine.environment))

    @classmethod
    def _window_bytes(cls, spec: BufferSpec, world_size: int, rounds: Rounds) -> int:
        return normal_window_bytes(spec, rounds.window_tokens(spec.max_tokens_per_rank))

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        tokens = spec.max_tokens_per_rank
        row, combine_bytes = slot_bytes(spec)
        most = None if tokens is None else tokens * world_size * spec.top_k
        window = cls._window_bytes(spec, world_size, environment.current_rounds())

        return (
            Region(name="window of the process group", max_bytes=window),
            rows_region("received slots", row, per_token=spec.top_k, max_rows=most),
            rows_region("expert results", combine_bytes, per_token=spec.top_k, max_rows=most),
        )

    def prepare(self) -> None:
        self._open(self._process_group)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        ids, _ = self._guard(call)
        sent = self._sent(call, ids)
        per_rank, _, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
            topk_idx=sent.topk_ids, num_experts=self._num_experts
        )
        received, _, _, counts, handle, _ = self._buffer.dispatch(
            x=sent.hidden_states,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=sent.topk_ids,
            topk_weights=sent.topk_weights,
            **self._format_arguments,
        )
        self._raise_own(call)
        num_slots = sum(counts)
        device_counts = torch.tensor(counts, device="cpu").to(ids.device, non_blocking=True)
        exchange_plan = AscendExchangePlan(
            num_tokens=ids.shape[0],
            num_rows=num_slots,
            index=packed_index(device_counts, counts, is_dense=True),
            handle=handle,
            slots_from_rank=slots_from_ranks(handle[5], self._world_size),
            is_empty=has_no_expert(ids),
        )
        # The undefined row of a dispatch that receives no row is left out.
        rows = self._wire(received).part(slice(num_slots))
        return self._dispatched(rows, sent.topk_ids, exchange_plan)

    def _return_rows(self, rows: Tensor, exchange_plan: AscendExchangePlan) -> Tensor:
        if exchange_plan.num_rows == 0:
            # dispatch() has returned one undefined row, and combine() expects the same number.
            rows = rows.new_zeros(1, rows.shape[1])
        return self._buffer.combine(x=rows.contiguous(), handle=exchange_plan.handle)[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class AscendLowLatencyExchangePlan(AscendExchangePlan):
    """The plan of a low-latency dispatch, with the tensors that combine takes.

    topk_ids, topk_weights: [T, K] as sent; weights are float32, 0 for masked entries.
    has_failed: bool scalar on the device: the call was refused.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    has_failed: Tensor


class AscendLowLatencyBuffer(AscendBuffer):
    """Low latency with static sizes and no host sync."""

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.LOW_LATENCY})
    dispatching: ClassVar[str] = "low_latency_dispatch"
    limits = staticmethod(low_latency_limits)
    calls: ClassVar[Mapping[str, Sequence[str]]] = {
        "__init__": ("group", "low_latency_mode"),
        "low_latency_dispatch": (
            *("x", "topk_idx", "topk_weights"),
            *("num_max_dispatch_tokens_per_rank", "num_experts"),
        ),
        "low_latency_combine": ("x", "topk_idx", "topk_weights", "handle"),
    }

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(
            packed_caps(low_latency_limits(current_soc()).max_tokens),
            is_static=True,
            has_slot_budget=False,
            int8_profiles=frozenset({Int8Profile.RINT127}),
        )

    @classmethod
    def _window_bytes(cls, spec: BufferSpec, world_size: int, rounds: Rounds) -> int | None:
        has_limit = spec.max_tokens_per_rank is not None
        return low_latency_window_bytes(spec, world_size) if has_limit else None

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = super().lacks(mode, spec, world_size)
        rows = spec.num_local_experts * world_size
        if rows <= MAX_LOCAL_EXPERTS_TIMES_RANKS:
            return reasons
        most = MAX_LOCAL_EXPERTS_TIMES_RANKS
        return (*reasons, f"experts of one rank * ranks is {rows}, at most {most}")

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        num_slots, (row, combine_bytes) = _num_slots(spec, world_size), slot_bytes(spec)
        sizes = {
            "window of the process group": low_latency_window_bytes(spec, world_size),
            "received slots": num_slots * row,
            "expert results": num_slots * combine_bytes,
        }
        return tuple(Region(name=name, max_bytes=size) for name, size in sizes.items())

    def prepare(self) -> None:
        self._open(self._process_group, low_latency_mode=True)
        self._max_slots = _num_slots(self._spec, self._world_size)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        ids, fault = self._guard_on_device(call)
        has_failed = self._record(call, fault)
        sent = self._sent(call, ids)
        received, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            x=sent.hidden_states,
            topk_idx=sent.topk_ids,
            num_max_dispatch_tokens_per_rank=self._spec.max_tokens_per_rank,
            num_experts=self._num_experts,
            topk_weights=sent.topk_weights,
            **self._format_arguments,
        )
        exchange_plan = AscendLowLatencyExchangePlan(
            num_tokens=ids.shape[0],
            num_rows=self._max_slots,
            index=packed_index(counts),
            handle=handle,
            topk_ids=sent.topk_ids,
            topk_weights=sent.topk_weights,
            slots_from_rank=slots_from_ranks(handle[1], self._world_size),
            # After a fault all elements of y are NaN.
            is_empty=has_no_expert(ids) & ~has_failed,
            has_failed=has_failed,
        )
        return self._dispatched(self._wire(received), sent.topk_ids, exchange_plan)

    def _return_rows(self, rows: Tensor, exchange_plan: AscendExchangePlan) -> Tensor:
        assert isinstance(exchange_plan, AscendLowLatencyExchangePlan), "a plan of this buffer"
        y, _, _ = self._buffer.low_latency_combine(
            x=rows.contiguous(),
            topk_idx=exchange_plan.topk_ids,
            topk_weights=exchange_plan.topk_weights,
            handle=exchange_plan.handle,
        )
        return y.masked_fill(exchange_plan.has_failed, float("nan"))


def _num_slots(spec: BufferSpec, world_size: int) -> int:
    """Return the number of rows that the package allocates."""
    assert spec.max_tokens_per_rank is not None, "low latency has a limit"
    return spec.max_tokens_per_rank * world_size * min(spec.top_k, spec.num_local_experts)
