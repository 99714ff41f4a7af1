"""The backends of epcomm as contenders, planned as for a layer."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from epcomm.bench.contenders.base import Contender, Grouped
from epcomm.buffers.traffic import BufferTraffic
from epcomm.config import EPConfig
from epcomm.experts import PhaseDispatchers
from epcomm.group import EPGroup
from epcomm.ops.slots import pack
from epcomm.planning.plan import plan
from epcomm.planning.plans import PhasePlan
from epcomm.quantization import ROW_ERRORS, dequantize
from epcomm.records import DispatchOutput, MaskedDispatchOutput
from epcomm.spec import MoESpec
from epcomm.testing.data import RankBatch
from epcomm.types import RowsPer, WeightsAppliedBy


class Epcomm(Contender[DispatchOutput]):
    """A dispatcher of epcomm, whose backend is reported with the format of quantised sums.

    combine applies the router weights, as it does for the alternatives. For training the runner of
    a layer applies them, to I columns instead of H, and combine has less to do.
    """

    def __init__(self, group: EPGroup, spec: MoESpec, config: EPConfig) -> None:
        """Plan and open the buffer. Collective: yes."""
        self._dtype = spec.dtype
        found = plan(config, spec, group)
        phase = replace(found.prefill, weights_applied_by=WeightsAppliedBy.COMBINE)
        chosen = replace(found, prefill=phase, decode=phase)
        self.plan: PhasePlan = phase
        sums = phase.buffer_spec.combine_format
        self.mode, self.backend = phase.mode.value, phase.backend + (f", {sums}" if sums else "")
        self.name = f"{self.mode} {self.backend}"
        self.is_capturable = phase.is_capturable
        # Roundings: the sum of a (token, rank) before it is sent, the sum of a host between hosts,
        # and y.
        self.num_roundings = 2 if phase.buffer_spec.hosts is None else 3
        formats = (phase.buffer_spec.dispatch_format, sums)
        growth = math.prod(1 + ROW_ERRORS.get(each.dtype, 0.0) for each in formats if each)
        if growth > 1:
            self.row_error = growth - 1 + torch.finfo(spec.dtype).eps / 2
        self._dispatcher = PhaseDispatchers(group, spec, config, chosen).prefill

    def dispatch(self, batch: RankBatch) -> DispatchOutput:
        return self._dispatcher.dispatch(batch.x, batch.topk)

    def group(self, dispatched: DispatchOutput) -> Grouped:
        counts = dispatched.num_tokens_per_expert
        wire = dispatched.hidden_states
        rows = dequantize(wire, self._dtype) if wire.format.dtype.is_quantized else wire.data
        if isinstance(dispatched, MaskedDispatchOutput):
            capacity = rows.shape[1]
            first_row = counts.new_ones(counts.shape).cumsum(0).sub(1).mul(capacity)
            return Grouped(rows=rows.flatten(0, 1), num_rows_per_expert=counts, first_row=first_row)
        return Grouped(
            rows=pack(rows, dispatched.index),
            num_rows_per_expert=counts,
            first_row=dispatched.index.first_slot[:-1],
        )

    def combine(self, results: Tensor, dispatched: DispatchOutput) -> Tensor:
        if isinstance(dispatched, MaskedDispatchOutput):
            results = results.view(dispatched.hidden_states.data.shape)
            return self._dispatcher.combine(dispatched.combine_input(results))
        return self._dispatcher.combine(dispatched.combine_input(results, rows_per=RowsPer.SLOT))

    def check(self) -> None:
        self._dispatcher.check()

    def sent_bytes(self, batch: RankBatch) -> BufferTraffic:
        before = self._dispatcher.traffic()
        dispatched = self.dispatch(batch)
        self.combine(self.group(dispatched).rows.contiguous(), dispatched)
        return self._dispatcher.traffic() - before
