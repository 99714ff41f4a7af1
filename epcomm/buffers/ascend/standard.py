"""Serve standard mode on Ascend: gather all tokens, and sort and sum with the vendor's operators.

AllGatherBuffer exchanges the tokens. npu_moe_init_routing_v2 writes the rows of this rank's
experts, packed by (expert, source rank, token). npu_moe_finalize_routing multiplies the results of
a token by its weights and sums them, in float32 and k order. Masked entries, and padding rows of
ranks with fewer tokens, get an additional expert that no rank computes. Entries of other ranks
have the position -1, which the operator accepts only in its modes with a capacity, so results are
passed as [K, C / K, H], like K experts with a capacity of C / K rows.
Source: the documentation of the operators; this code has not run on an NPU.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.ascend.calls import NEEDS, device_types
from epcomm.buffers.base import Dispatched
from epcomm.buffers.collective.all_gather import AllGatherBuffer, Gathered, GatheredExchangePlan
from epcomm.buffers.collective.base import COLLECTIVE_CAPS
from epcomm.buffers.sizes import Region, max_slots_of, rows_region
from epcomm.calls.call import DispatchCall
from epcomm.calls.header import ANY_BATCH, CallKind
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.ops.slots import packed_index, sum_parts
from epcomm.platforms.ascend.operators import has_kernel
from epcomm.platforms.machine import Machine
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.records import ExchangePlan, SlotIndex, Steps
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import RowsPer, WireDtype, WireTensor, align_up

_OPERATORS = ("npu_moe_init_routing_v2", "npu_moe_finalize_routing")
# Limit of npu_moe_init_routing_v2, minus the additional expert of masked entries.
MAX_EXPERTS = 10240 - 1
WIRE_DTYPES = frozenset({WireDtype.BF16, WireDtype.FP32, WireDtype.INT8})
# Arguments of npu_moe_init_routing_v2: do not quantise rows; return one count per expert; return
# the row of each entry.
_NOT_QUANTISED, _COUNTS, _POSITIONS = -1, 1, 0
# drop_pad_mode of npu_moe_finalize_routing: positions are ordered by token, then k; entries of -1
# are skipped; rows are [experts, capacity, H], with at least K experts.
_BY_TOKEN_WITH_CAPACITY = 3
# Dtypes of rows that npu_moe_finalize_routing multiplies by float32 weights.
_COMBINE_DTYPES = (WireDtype.BF16, WireDtype.FP32)
# Bytes of the id, weight and position of an entry; and bytes of two scales of a packed row: the
# operator allocates one that is not used, and this buffer allocates another.
_ENTRY_BYTES, _SCALE_BYTES = 12, 8


@dataclass(frozen=True, kw_only=True, eq=False)
class AscendStandardExchangePlan(GatheredExchangePlan):
    """The plan of a dispatch, with the packed row of each gathered entry.

    positions: [W * max T * K], int32, the row of each entry, -1 if another rank computes it.
    topk_weights: [W * max T, K], float32, 0 for masked entries.
    """

    positions: Tensor
    topk_weights: Tensor


class AscendStandardBuffer(AllGatherBuffer):
    """Inference with exact sizes; the host waits for the counts once per dispatch."""

    name: ClassVar[str] = "ascend"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.STANDARD})

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        (device_type,) = device_types()
        missing = [name for name in _OPERATORS if not has_kernel(name, device_type)]
        reason = f"{', '.join(missing)} not on {device_type}; import torch_npu before epcomm plans"
        return Availability.judge(absent=[reason] if missing else [], needs=NEEDS)

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(
            COLLECTIVE_CAPS,
            trainable=False,
            wire_dtypes=WIRE_DTYPES,
            combine_dtypes=frozenset(),
            device_types=device_types(),
        )

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = []
        if spec.hidden_format.dtype not in _COMBINE_DTYPES:
            reasons.append(f"multiplies bf16 and fp32 rows by weights, not {spec.hidden_format}")
        num_experts = spec.num_local_experts * world_size
        if num_experts > MAX_EXPERTS:
            reasons.append(f"{num_experts} experts, at most {MAX_EXPERTS}")
        if spec.expert_alignment > 1:
            reasons.append("packs its rows, so expert_alignment must be 1")
        if spec.dispatch_format.dtype is WireDtype.INT8 and spec.dispatch_format != INT8_PER_TOKEN:
            reasons.append(f"sends one scale a row, {INT8_PER_TOKEN}, not {spec.dispatch_format}")
        return tuple(reasons)

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        shared = super().region_bytes(spec, world_size)
        max_tokens, top_k = spec.max_tokens_per_rank, spec.top_k
        max_rows = None if max_tokens is None else max_tokens * world_size
        # The packed rows are rounded up to a multiple of K.
        max_slots = None if max_rows is None else align_up(max_slots_of(spec, max_rows), top_k)
        data_bytes = spec.dispatch_format.data_bytes(spec.hidden_size)
        result_bytes = spec.hidden_format.data_bytes(spec.hidden_size)
        entries = world_size * top_k
        # The operator allocates a row for each entry, whichever rank computes it.
        max_entries = None if max_rows is None else max_rows * top_k
        named = {region.name: region for region in shared}
        return (
            *(named[name] for name in ("headers", "sent rows", "received rows")),
            rows_region("whole rows", data_bytes, per_token=world_size, max_rows=max_rows),
            rows_region("entry map", _ENTRY_BYTES, per_token=entries, max_rows=max_entries),
            rows_region(
                "packed slots", data_bytes + _SCALE_BYTES, per_token=entries, max_rows=max_entries
            ),
            rows_region("expert results", result_bytes, per_token=top_k, max_rows=max_slots),
            *(named[name] for name in ("partial sums", "returned rows")),
        )

    def dispatch_steps(self, call: DispatchCall) -> Steps[Dispatched]:
        gathered = yield from self._gather_call(call)
        ids, weights = self._without_masked_entries(gathered)
        rows, positions, index = self._pack(gathered, ids)
        return Dispatched(
            rows=rows,
            index=index,
            slot_weights=None,
            exchange_plan=AscendStandardExchangePlan(
                num_tokens=call.topk_ids.shape[0],
                num_rows=rows.data.shape[0],
                index=index,
                tokens_of_rank=gathered.counts.rows_from_rank,
                row_of_token=gathered.row_of_token,
                call=gathered.batch,
                positions=positions,
                topk_weights=weights,
            ),
            any_flags=gathered.counts.any_flags,
        )

    def _without_masked_entries(self, gathered: Gathered) -> tuple[Tensor, Tensor]:
        """Return ids [R, K], int32, and weights, with the additional expert for masked entries."""
        used, no_expert = gathered.row_of_token, self._num_experts
        ids = torch.full_like(gathered.topk_ids, no_expert, dtype=torch.int32)
        found = gathered.topk_ids[used]
        ids[used] = found.masked_fill(found < 0, no_expert)
        return ids, gathered.topk_weights.masked_fill(ids == no_expert, 0.0)

    def _pack(self, gathered: Gathered, ids: Tensor) -> tuple[WireTensor, Tensor, SlotIndex]:
        """Return packed rows of this rank's experts, a multiple of K, their positions and index."""
        wire, host_counts = gathered.rows, gathered.counts.tokens_per_expert
        rows, positions, counts = self._sort(wire.data, ids)
        num_rows = align_up(sum(host_counts), self._spec.top_k)
        packed = WireTensor(
            data=rows[:num_rows],
            format=wire.format,
            scales=None if wire.scales is None else _placed(wire.scales, positions, num_rows),
        )
        return packed, positions, packed_index(counts, host_counts)

    def _sort(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort rows by expert; return one row per entry, used first, positions and counts [L]."""
        num_local = self._spec.num_local_experts
        if ids.numel() == 0:
            # It is not documented that the operator accepts no token.
            return rows, ids.flatten(), ids.new_zeros(num_local, dtype=torch.int64)
        first = self._collectives.rank * num_local
        # The operator can move scales too, but for INT8 rows they are undefined.
        sorted_rows, positions, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
            rows.contiguous(),
            ids,
            active_num=ids.numel(),
            expert_num=self._num_experts + 1,
            expert_tokens_num_type=_COUNTS,
            expert_tokens_num_flag=True,
            quant_mode=_NOT_QUANTISED,
            active_expert_range=[first, first + num_local],
            row_idx_type=_POSITIONS,
        )
        return sorted_rows, positions, counts

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        raise NotImplementedError("the operators have no backward (caps.trainable)")

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
        if error is not None:
            self._announce(CallKind.COMBINE, ANY_BATCH, error=error)
            return rows, None
        assert isinstance(exchange_plan, AscendStandardExchangePlan), "a plan of this buffer"
        assert slot_weights is None, "weights do not travel to the slots"
        assert row_scalars is None, "there is no backward"
        sums = self._add_up(rows, exchange_plan)
        return sum_parts(self._send_sums(sums, exchange_plan, CallKind.COMBINE), sums.dtype), None

    def _add_up(self, rows: Tensor, exchange_plan: AscendStandardExchangePlan) -> Tensor:
        """Return this rank's part of y for each gathered token, [W * max T, H]; rows: [C, H]."""
        top_k, (num_rows, hidden_size) = self._spec.top_k, rows.shape
        if num_rows == 0:
            return rows.new_zeros(exchange_plan.topk_weights.shape[0], hidden_size)
        return torch.ops.npu.npu_moe_finalize_routing(
            rows.contiguous().view(top_k, num_rows // top_k, hidden_size),
            *(None, None, None, exchange_plan.topk_weights, exchange_plan.positions, None),
            drop_pad_mode=_BY_TOKEN_WITH_CAPACITY,
        )


def _placed(scales: Tensor, positions: Tensor, num_rows: int) -> Tensor:
    """Return the scales [n, 1] of tokens at their rows, [C, 1]; other rows are undefined."""
    of_entries = scales.repeat_interleave(positions.numel() // max(scales.shape[0], 1))
    # Scales of entries without a row are written to an additional element, which is dropped.
    places = torch.where(positions < 0, num_rows, positions).long()
    return scales.new_empty(num_rows + 1).scatter_(0, places, of_entries)[:num_rows].unsqueeze(1)
