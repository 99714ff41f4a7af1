"""The suites fail when an adapter over deep_ep makes one mistake."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import EPGroup, EPTimeout
from epcomm.buffers.base import Buffer, Combined, Dispatched
from epcomm.buffers.deep_ep.normal import DeepEPExchangePlan, Received
from epcomm.buffers.deep_ep.rows import ElasticHandle, LegacyHandle, Rows
from epcomm.buffers.deep_ep.v1 import DeepEPV1Buffer, DeepEPV1StaticBuffer, LegacyPackage
from epcomm.buffers.deep_ep.v1_low_latency import DeepEPV1LowLatencyBuffer, LowLatencyExchangePlan
from epcomm.buffers.deep_ep.v2 import DeepEPV2Buffer, DeepEPV2StaticBuffer, ElasticPackage
from epcomm.buffers.deep_ep.v2_low_latency import DeepEPV2LowLatencyBuffer
from epcomm.calls.call import DispatchCall
from epcomm.calls.order import Calls
from epcomm.quantization.scale_layout import pack_scales
from epcomm.records import ExchangePlan, Pending
from epcomm.registry import buffer_class
from epcomm.spec import BufferSpec
from epcomm.testing import buffer_suite, layer_suite
from epcomm.types import ROW_MAJOR, RowsPer, WireTensor
from fakes.deep_ep import install
from fakes.deep_ep.strict_v1 import buffer as strict_buffer
from tests.buffers.deep_ep.test_deep_ep import CASES, buffer_env, layer_env

NUM_RANKS = 2
# Seconds that a rank waits for ranks that have left the call.
PATIENCE_S = 3


class _WeighsInCombine(Buffer):
    """slot_weights on their way to combine, multiplied `times` times in all."""

    times = 1

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        weights = None if slot_weights is None else slot_weights**self.times
        return super().combine(
            rows, exchange_plan, rows_per=rows_per, slot_weights=weights, row_scalars=row_scalars
        )


class V1WeighsTwice(_WeighsInCombine, DeepEPV1Buffer):
    """Weighs the rows before a sum that weighs them again."""

    times = 2


class V1WeighsNever(_WeighsInCombine, DeepEPV1Buffer):
    """Never weighs, and expects deep_ep to do so."""

    times = 0


class V2LowLatencyWeighsTwice(_WeighsInCombine, DeepEPV2LowLatencyBuffer):
    """Applies router weights twice."""

    times = 2


class V2LowLatencyWeighsNever(_WeighsInCombine, DeepEPV2LowLatencyBuffer):
    """Never applies router weights."""

    times = 0


class _WeighsAtHome(DeepEPV1LowLatencyBuffer):
    times = 1

    def combine_async(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
    ) -> Pending[Combined]:
        assert isinstance(exchange_plan, LowLatencyExchangePlan)
        other = replace(exchange_plan, topk_weights=exchange_plan.topk_weights**self.times)
        return super().combine_async(rows, other, rows_per=rows_per, slot_weights=slot_weights)


class LowLatencyWeighsTwice(_WeighsAtHome):
    """The runner's weights, and those of the kernel."""

    times = 2


class LowLatencyWeighsNever(_WeighsAtHome):
    """The kernel gets ones."""

    times = 0


class _LegacyUnusedRows(LegacyPackage):
    def dispatch(self, rows: Rows, ids: Tensor, weights: Tensor, *, is_static: bool) -> Received:
        received = super().dispatch(rows, ids, weights, is_static=is_static)
        num_rows = received.handle[0][-1, self._rank]
        is_unused = torch.arange(len(received.local_ids)) >= num_rows
        return replace(
            received, local_ids=received.local_ids.masked_fill(is_unused.unsqueeze(1), 0)
        )


class V1StaticReadsUnusedRows(DeepEPV1StaticBuffer):
    """The rows that nobody sent belong to expert 0."""

    package = _LegacyUnusedRows


class _ElasticUnusedRows(ElasticPackage):
    @staticmethod
    def _ids_received(local_ids: Tensor, handle: ElasticHandle) -> Tensor:
        num_local = handle.psum_num_recv_tokens_per_expert.numel()
        return torch.where(local_ids < num_local, local_ids, -1)


class V2StaticReadsUnusedRows(DeepEPV2StaticBuffer):
    """Ids behind the last row are taken where they look valid."""

    package = _ElasticUnusedRows


class LowLatencyCountsRooms(DeepEPV1LowLatencyBuffer):
    """Every expert has as many slots as there is capacity for."""

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(call)
        counts = torch.full_like(out.index.num_tokens_per_expert, self._expert_capacity)
        return replace(out, index=replace(out.index, num_tokens_per_expert=counts))


class V2LowLatencyCountsPrefixSums(DeepEPV2LowLatencyBuffer):
    """psum_num_recv_tokens_per_expert is named like counts."""

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(call)
        assert isinstance(out.exchange_plan, DeepEPExchangePlan)
        counts = out.exchange_plan.handle.psum_num_recv_tokens_per_expert
        return replace(out, index=replace(out.index, num_tokens_per_expert=counts))


class _PrefixSumsOfRanks(ElasticPackage):
    def _rows_from_ranks(self, handle: ElasticHandle) -> Tensor:
        return handle.psum_num_recv_tokens_per_scaleup_rank.to(torch.int64)


class V2CountsPrefixSumsOfRanks(DeepEPV2Buffer):
    """Takes the end of the rows of a rank for their number."""

    package = _PrefixSumsOfRanks


class LowLatencyReadsScalesByRows(DeepEPV1LowLatencyBuffer):
    """The memory of the scales, as if those of a row lay together."""

    def _wire(self, received: Rows) -> WireTensor:
        wire = super()._wire(received)
        assert wire.scales is not None
        by_row = wire.scales.transpose(1, 2).reshape(wire.scales.shape)
        return replace(wire, scales=by_row, scale_layout=ROW_MAJOR)


class _KeepsWords(Buffer):
    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(call)
        assert out.rows.scales is not None
        return replace(out, rows=replace(out.rows, scales=pack_scales(out.rows.scales)))


class V1KeepsWords(_KeepsWords, DeepEPV1Buffer):
    """Four scales in an int32, as they travelled."""


class V2KeepsWords(_KeepsWords, DeepEPV2Buffer):
    """The same."""


class LowLatencyKeepsWords(DeepEPV1LowLatencyBuffer):
    """The same, silently about it."""

    def _wire(self, received: Rows) -> WireTensor:
        return replace(super()._wire(received), scale_layout=ROW_MAJOR)


class ThirdBatchEndsNone(DeepEPV1LowLatencyBuffer):
    """A batch whose memory is taken may be combined."""

    def _check_in_flight(self, batch: object, function: str) -> None:
        del batch, function


class _KeepsFirstHandle(Buffer):
    """One handle for all batches; sizes are static, so that it fits."""

    first: LegacyHandle | ElasticHandle | None = None

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(call)
        assert isinstance(out.exchange_plan, DeepEPExchangePlan)
        self.first = out.exchange_plan.handle if self.first is None else self.first
        return replace(out, exchange_plan=replace(out.exchange_plan, handle=self.first))


class V1StaticKeepsFirstHandle(_KeepsFirstHandle, DeepEPV1StaticBuffer):
    """See above."""


class V2StaticKeepsFirstHandle(_KeepsFirstHandle, DeepEPV2StaticBuffer):
    """See above."""


class _KeepsFaults(Buffer):
    """Ranks do not compare their calls, though they are asked to."""

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        super().__init__(calls, replace(spec, compares_calls=False))


class V1KeepsFaults(_KeepsFaults, DeepEPV1Buffer):
    """See above."""


class V1LowLatencyKeepsFaults(_KeepsFaults, DeepEPV1LowLatencyBuffer):
    """See above."""


class _InAnyOrder(ElasticPackage):
    is_trainable = False


class V2InAnyOrder(DeepEPV2Buffer):
    """Rows of a rank as they come, which another dispatch does not repeat."""

    package = _InAnyOrder


@dataclass(frozen=True, kw_only=True)
class Case:
    """A broken adapter, a scenario of a suite, and what the failure tells.

    ranks: those that notice.   error: of the stand-in, if it refuses what the real one does not.
    """

    buffer: type[Buffer]
    scenario: str
    tells: str
    suite: str = "buffer"
    wire: str = "bf16"
    ranks: tuple[int, ...] = (0, 1)
    error: type[Exception] = AssertionError

    @property
    def id(self) -> str:
        return f"{self.buffer.__name__} in {self.suite} suite, {self.scenario}"


CASES_OF_MISTAKES = [
    Case(buffer=V1WeighsTwice, scenario="uneven", tells="combine with weights"),
    Case(buffer=V1WeighsNever, scenario="uneven", tells="combine with weights"),
    Case(buffer=V2LowLatencyWeighsTwice, scenario="uneven", tells="combine with weights"),
    Case(buffer=V2LowLatencyWeighsNever, scenario="uneven", tells="combine with weights"),
    Case(buffer=V2LowLatencyWeighsNever, suite="layer", scenario="uneven", tells="y is off by"),
    Case(buffer=LowLatencyWeighsTwice, scenario="uneven", tells="combine with weights"),
    Case(buffer=LowLatencyWeighsNever, scenario="uneven", tells="combine with weights"),
    Case(buffer=LowLatencyWeighsTwice, suite="layer", scenario="uneven", tells="y is off by"),
    Case(buffer=V1StaticReadsUnusedRows, scenario="uneven", tells="num_tokens_per_expert"),
    Case(buffer=V2StaticReadsUnusedRows, scenario="uneven", tells="num_tokens_per_expert"),
    Case(buffer=LowLatencyCountsRooms, scenario="uneven", tells="num_tokens_per_expert"),
    Case(buffer=V2LowLatencyCountsPrefixSums, scenario="uneven", tells="num_tokens_per_expert"),
    Case(buffer=V2CountsPrefixSumsOfRanks, scenario="traffic", tells="traffic is", ranks=(0,)),
    Case(buffer=LowLatencyReadsScalesByRows, scenario="uneven", wire="fp8", tells="slot 0"),
    Case(buffer=V1KeepsWords, scenario="uneven", wire="fp8_powers_of_two", tells="width of scales"),
    Case(buffer=V2KeepsWords, scenario="uneven", wire="fp8_powers_of_two", tells="width of scales"),
    Case(
        buffer=LowLatencyKeepsWords,
        scenario="uneven",
        wire="fp8_powers_of_two",
        tells="width of scales",
    ),
    Case(
        buffer=ThirdBatchEndsNone,
        scenario="stand_alone",
        tells="handle is undefined",
        error=RuntimeError,
    ),
    Case(buffer=V1StaticKeepsFirstHandle, scenario="stand_alone", tells=" is "),
    Case(buffer=V2StaticKeepsFirstHandle, scenario="stand_alone", tells=" is "),
    Case(buffer=V1KeepsFaults, scenario="faults", tells="got None", ranks=(0,)),
    Case(buffer=V1LowLatencyKeepsFaults, scenario="faults", tells="", ranks=(0,)),
    Case(buffer=V2InAnyOrder, suite="layer", scenario="checkpointing", tells="is off by"),
]


def registered_name(mutant: type[Buffer]) -> str:
    """Return the name of the class that a broken adapter takes the place of."""
    return next(kind.__name__ for kind in mutant.__mro__ if kind.__name__ in CASES)


def run(case: Case, group: EPGroup) -> None:
    backend = registered_name(case.buffer)
    if case.suite == "buffer":
        buffer_suite.run_scenario(case.scenario, buffer_env(backend, group, case.wire))
    else:
        layer_suite.run_scenario(case.scenario, layer_env(backend, group))


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("case", CASES_OF_MISTAKES, ids=lambda case: case.id)
def test_mistake_fails(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_buffer, "_check_torch_deterministic", lambda: None)
    name = registered_name(case.buffer)
    monkeypatch.setattr(import_module(buffer_class(name).__module__), name, case.buffer)
    failure, is_left_alone = None, False
    with install(CASES[name].package):
        group = EPGroup(dist.new_group())
        group.limit_waits(PATIENCE_S)
        try:
            run(case, group)
        except case.error as error:
            failure = str(error)
        except EPTimeout:
            is_left_alone = True
        if len(case.ranks) == NUM_RANKS:
            # Together: where one rank alone has failed, the other is somewhere else.
            group.close()
    notices = dist.get_rank() in case.ranks
    assert (failure is not None) == notices, failure
    assert failure is None or case.tells in failure
    assert not (is_left_alone and notices)
