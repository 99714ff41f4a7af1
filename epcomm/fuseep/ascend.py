"""Call the fused operators of the Ascend deep_ep: dispatch, W8A8 experts and combine in one.

A call takes at most 256 tokens of a rank (mega_moe: 4096). Every rank makes the number of calls
that the longest batch needs; without tokens it passes one row of weight 0. The operators have no
backward and do not report unsuitable sizes, so limits are checked before the first call.
Source: sgl-kernel-npu, its documentation and the tiling of its operators; sizes of
dispatch_ffn_combine and mega_moe: vllm-ascend. This code has not run on an NPU.
"""

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from epcomm.buffers.ascend.calls import AscendCalls, slot_bytes, slots_to_ranks
from epcomm.buffers.fused import FusedBackend, FuseEPResult, check_packed
from epcomm.buffers.sizes import Region
from epcomm.buffers.vendor import COMBINE, DISPATCH
from epcomm.calls.call import DispatchCall
from epcomm.config import Mode
from epcomm.fuseep.weights import (
    TILE,
    DispatchFFNCombineWeights,
    FusedDeepMoEWeights,
    MegaMoEWeights,
    PackedWeights,
)
from epcomm.ops.masked_entries import fill_masked_entries, has_no_expert
from epcomm.platforms.ascend.chip import Soc, current_soc
from epcomm.platforms.ascend.environment import variable_reasons, window_reasons
from epcomm.platforms.ascend.formats import TILE_ROWS, nz_reasons
from epcomm.platforms.ascend.limits import MAX_EXPERTS, Limits
from epcomm.platforms.machine import Machine
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import Int8Profile, Layout, WireDtype
from epcomm.weights.quantized import Int8ChannelWeights

AscendPackedT = TypeVar("AscendPackedT", bound=PackedWeights)
# The window of mode 1 holds the rows of dispatch and of combine, with 2 bytes an element.
_MODE_1_COPIES, _MODE_1_ELEMENT_BYTES = 2, 2
# The window of mode 2 holds 3 bytes for each element of a row, 1 in dispatch (INT8) and 2 in
# combine, and 10 MB more; an MB is 2**20 bytes, as in HCCL_BUFFSIZE.
_MODE_2_ELEMENT_BYTES, _MODE_2_EXTRA_BYTES = 3, 10 * 2**20
_CALLS: Mapping[str, Sequence[str]] = {
    "__init__": ("group", "low_latency_mode"),
    "fused_deep_moe": (
        *("x", "topk_idx", "topk_weights", "gmm1_permuted_weight", "gmm1_permuted_weight_scale"),
        *("gmm2_weight", "gmm2_weight_scale", "num_max_dispatch_tokens_per_rank", "num_experts"),
        "fuse_mode",
    ),
}
# Tokens of a rank in one call of an operator: the documented limit of mode 1. Mode 2 gets no more,
# which bounds its window and its rows.
MAX_CALL_TOKENS = 256


class AscendFused(AscendCalls, FusedBackend[AscendPackedT]):
    """The base of the operators, which have static sizes: check() raises the faults.

    kind: the record of packed experts that the operator reads.
    limits: the sizes that it takes, some of which it does not check itself.
    soc: the chip that it serves.   on_a5: why it does not serve A5.
    has_slot_budget: max_recv_slots limits the rows that a rank receives.
    """

    name: ClassVar[str]
    calls: ClassVar[Mapping[str, Sequence[str]]] = _CALLS
    kind: ClassVar[type[PackedWeights]]
    limits: ClassVar[Limits]
    soc: ClassVar[Soc] = Soc.A3
    on_a5: ClassVar[str]
    has_slot_budget: ClassVar[bool] = False

    @classmethod
    def pack(cls, weights: Int8ChannelWeights) -> AscendPackedT:
        # A class variable cannot name the type variable.
        return cls.kind.pack(weights)  # pyright: ignore[reportReturnType]

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return BufferCaps(
            layout=Layout.ROWS,
            trainable=False,
            ordered=True,
            wire_dtypes=frozenset({WireDtype.INT8}),
            is_static=True,
            has_slot_budget=cls.has_slot_budget,
            reports_faults=False,
        )

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = []
        if spec.hidden_format.dtype is not WireDtype.BF16:
            reasons.append(f"returns bf16, not {spec.hidden_format}")
        if spec.dispatch_format.dtype is WireDtype.INT8 and spec.dispatch_format != INT8_PER_TOKEN:
            reasons.append(f"quantises to {INT8_PER_TOKEN}, not {spec.dispatch_format}")
        if spec.intermediate_size is None:
            reasons.append("has limits for the experts' sizes; plan with their weights")
        return tuple(reasons)

    @classmethod
    def lacks_with(cls, machine: Machine, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        if spec.intermediate_size is None or spec.max_tokens_per_rank is None:
            return ()
        # An unknown chip gives no reasons.
        soc, environment, reasons = current_soc(), machine.environment, []
        refused = {Soc.A2: "FuseEP is not built for it", Soc.A5: cls.on_a5}
        if soc is not None and soc in refused:
            reasons.append(f"the chip is {soc}, expected {cls.soc}: {refused[soc]}")
        reasons += cls.limits.reasons(spec, world_size)
        budget, rows = spec.max_recv_slots, cls.max_received_rows(spec, world_size)
        if cls.has_slot_budget and budget is not None and budget < rows:
            reasons.append(
                f"max_recv_slots is {budget}, but a rank may receive {rows} rows "
                f"({cls.max_call_tokens(spec)} tokens * {world_size} ranks * "
                f"{min(spec.top_k, spec.num_local_experts)} experts of a rank), and rows beyond it "
                f"would vanish silently; set it to {rows} or leave it None"
            )
        window = cls.window_bytes(spec, world_size)
        if window is not None:
            reasons += window_reasons(window, environment)
        return (*reasons, *variable_reasons(environment, soc))

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        inner_size = spec.intermediate_size
        assert inner_size is not None, "a plan with weights knows it"
        packed = cls.kind.num_bytes(spec.num_local_experts, spec.hidden_size, inner_size)
        window = cls.window_bytes(spec, world_size)
        regions = {"window of the process group": window, "packed experts": packed}
        return tuple(
            Region(name=name, max_bytes=size) for name, size in regions.items() if size is not None
        )

    @classmethod
    def window_bytes(cls, spec: BufferSpec, world_size: int) -> int | None:
        """Return the bytes of the HCCL window; None if its size is not documented."""
        return None

    @classmethod
    def max_call_tokens(cls, spec: BufferSpec) -> int:
        """Return the most tokens of this rank in one call; a longer batch takes several calls."""
        assert spec.max_tokens_per_rank is not None, "static sizes have a limit"
        return min(spec.max_tokens_per_rank, cls.limits.max_tokens or MAX_CALL_TOKENS)

    @classmethod
    def max_received_rows(cls, spec: BufferSpec, world_size: int) -> int:
        """Return the most rows that a rank can receive in one call: max_output_size of mode 2.

        The experts of a token are distinct, so a rank of L experts receives a token at most
        min(K, L) times, and each of W ranks has max_call_tokens() tokens. (Upstream passes
        M * W * K, which is too much if L < K.) The kernel drops further rows and reports nothing.
        """
        return cls.max_call_tokens(spec) * world_size * min(spec.top_k, spec.num_local_experts)

    @abstractmethod
    def _call_operator(self, chunk: DispatchCall, experts: AscendPackedT) -> tuple[Tensor, Tensor]:
        """Run N tokens, one or more; return y [N, H] and the slots of each expert, int32 [L]."""

    def prepare(self) -> None:
        self._open(self._process_group, low_latency_mode=True)
        # The package exports its modes only in this module.
        self._fuse_modes: Any = sys.modules[type(self._buffer).__module__].FuseMode

    def _raise_reasons(self, reasons: Sequence[str]) -> None:
        """Raise these reasons, and those why this device cannot pack weights.

        Weights are packed in the first call, where a failing rank would leave others waiting.
        """
        super()._raise_reasons([*reasons, *nz_reasons(self._device)])

    def run(self, call: DispatchCall, experts: AscendPackedT) -> FuseEPResult:
        check_packed(experts, self.kind, self.name)
        self._check_open()
        ids, fault = self._guard_on_device(call)
        has_failed = self._record(call, fault)
        is_empty = has_no_expert(ids)
        ids, weights = fill_masked_entries(ids, call.topk_weights, self._num_experts)
        chunks = list(self._chunks(replace(call, topk_ids=ids, topk_weights=weights)))
        outputs = [self._call_operator(chunk, experts) for chunk in chunks]
        counts = torch.stack([counts for _, counts in outputs]).sum(0).to(torch.int32)
        self._count(chunks, counts)
        # Dummy tokens follow the tokens of the call.
        y = torch.cat([y for y, _ in outputs])[: call.num_tokens].masked_fill(is_empty, 0.0)
        most = len(chunks) * self.max_received_rows(self._spec, self._world_size)
        return FuseEPResult(
            y=y.masked_fill(has_failed, float("nan")),
            num_tokens_per_expert=counts,
            num_slots=most,
            num_rows=most,
        )

    def _fused(
        self,
        chunk: DispatchCall,
        experts: PackedWeights,
        most: int,
        fuse_mode: object,
        form: Callable[[Tensor], Tensor | list[Tensor]] = lambda tensor: tensor,
    ) -> tuple[Tensor, Tensor]:
        """Call the operator of the package.

        most: limit of the tokens of a rank in modes 1 and 3, and of the rows of a rank in mode 2.
        form: converts tensors of experts to the form that the operator takes.
        """
        return self._buffer.fused_deep_moe(
            x=chunk.unquantized,
            topk_idx=chunk.topk_ids,
            topk_weights=chunk.topk_weights,
            gmm1_permuted_weight=form(experts.gate_up_proj),
            gmm1_permuted_weight_scale=form(experts.gate_up_scale),
            gmm2_weight=form(experts.down_proj),
            gmm2_weight_scale=form(experts.down_scale),
            num_max_dispatch_tokens_per_rank=most,
            num_experts=self._num_experts,
            fuse_mode=fuse_mode,
        )

    def _chunks(self, call: DispatchCall) -> Iterator[DispatchCall]:
        """Yield the same number of chunks on every rank, because each call waits for all ranks."""
        most = self.limits.max_tokens or MAX_CALL_TOKENS
        for start in range(0, self._spec.max_tokens_per_rank or 0, most):
            own = slice(start, start + most)
            if start >= call.num_tokens:
                yield self._dummy(call)
                continue
            yield replace(
                call,
                hidden_states=call.unquantized[own].contiguous(),
                topk_ids=call.topk_ids[own].contiguous(),
                topk_weights=call.topk_weights[own].contiguous(),
            )

    def _count(self, chunks: list[DispatchCall], counts: Tensor) -> None:
        ids = torch.cat([chunk.topk_ids for chunk in chunks])
        to_rank = slots_to_ranks(ids, self._num_experts, self._world_size)
        out, combine_bytes = slot_bytes(self._spec)
        self._count_bytes(DISPATCH, to_rank, out)
        # The operators do not return the sources of rows, but this rank knows its own rows.
        from_others = counts.sum() - to_rank[self._rank]
        self._sent_bytes[COMBINE] += from_others * combine_bytes


class FusedDeepMoE(AscendFused[FusedDeepMoEWeights]):
    """The operator of mode 1: float32 between the products, so that nothing overflows."""

    name: ClassVar[str] = "fused_deep_moe"
    kind: ClassVar[type[PackedWeights]] = FusedDeepMoEWeights
    limits: ClassVar[Limits] = Limits(
        max_tokens=MAX_CALL_TOKENS,
        hidden=(512, 7168),
        # The weights of mode 1 are in NZ, whose rows are counted in whole tiles.
        hidden_multiple=TILE_ROWS,
        gate_up_columns=(1024, 6144),
        gate_up_multiple=TILE,
        top_k=12,
        experts=MAX_EXPERTS,
        # 24 is half of the 48 vector cores of A3.
        local_experts=24,
    )
    on_a5: ClassVar[str] = "fused_deep_moe takes MX weights there, not INT8"

    @classmethod
    def window_bytes(cls, spec: BufferSpec, world_size: int) -> int:
        # The rows of all ranks at every local expert.
        slots = world_size * cls.max_call_tokens(spec) * spec.num_local_experts
        return slots * spec.hidden_size * _MODE_1_ELEMENT_BYTES * _MODE_1_COPIES

    def _call_operator(
        self, chunk: DispatchCall, experts: FusedDeepMoEWeights
    ) -> tuple[Tensor, Tensor]:
        most = self.max_call_tokens(self._spec)
        y, counts = self._fused(chunk, experts, most, self._fuse_modes.FUSED_DEEP_MOE)
        # Counts are ordered by expert, then source rank.
        return y, counts.view(-1, self._world_size).sum(1)


class MegaMoE(AscendFused[MegaMoEWeights]):
    """The operator of mode 3, of cann_ops_transformer, which deep_ep calls.

    The operator itself checks the size of its window.
    """

    name: ClassVar[str] = "mega_moe"
    kind: ClassVar[type[PackedWeights]] = MegaMoEWeights
    limits: ClassVar[Limits] = Limits(
        max_tokens=4096,
        hidden=(1024, 8192),
        hidden_multiple=512,
        gate_up_columns=(1024, 6144),
        gate_up_multiple=1024,
        ranks=(2, 128),
        top_k=16,
        experts=1024,
        local_experts=128,
    )
    on_a5: ClassVar[str] = "mega_moe of deep_ep is documented for A3 alone"

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        found = super().probe(machine)
        package, reasons = machine.find_deep_ep(), []
        if found.ok and package is not None and not package.has_mega_moe:
            reasons.append("the installed deep_ep has no MEGA_MOE; install a newer release")
        is_stand_in = package is not None and package.is_stand_in
        if not is_stand_in and not machine.has_module("cann_ops_transformer"):
            reasons.append("cann_ops_transformer is not installed, which has the operator")
        return found.also(reasons)

    def _call_operator(self, chunk: DispatchCall, experts: MegaMoEWeights) -> tuple[Tensor, Tensor]:
        most = self.max_call_tokens(self._spec)
        return self._fused(
            chunk, experts, most, self._fuse_modes.MEGA_MOE, lambda tensor: list(tensor.unbind())
        )


class DispatchFFNCombine(AscendFused[DispatchFFNCombineWeights]):
    """The operator of mode 2: float16 between the products, which overflows beyond 65504.

    If the row of a token overflows at one of its experts, or at the substitute for a masked entry
    (see ops/masked_entries.py), its y is not finite.
    """

    name: ClassVar[str] = "dispatch_ffn_combine"
    deprecated: ClassVar[str] = "CANN does not maintain it from 9.1 on; mega_moe replaces it"
    int8_profile: ClassVar[Int8Profile] = Int8Profile.DIVTRUNC16
    kind: ClassVar[type[PackedWeights]] = DispatchFFNCombineWeights
    limits: ClassVar[Limits] = Limits(
        max_tokens=MAX_CALL_TOKENS,
        hidden=(1024, 8192),
        hidden_multiple=512,
        gate_up_columns=(2048, 6144),
        gate_up_multiple=1024,
        ranks=(1, 64),
    )
    on_a5: ClassVar[str] = "dispatch_ffn_combine does not exist there"
    has_slot_budget: ClassVar[bool] = True

    @classmethod
    def window_bytes(cls, spec: BufferSpec, world_size: int) -> int:
        # The operator refuses a smaller window; its message says 3 MB.
        rows = cls.max_call_tokens(spec) * spec.top_k
        return _MODE_2_ELEMENT_BYTES * rows * spec.hidden_size + _MODE_2_EXTRA_BYTES

    def _call_operator(
        self, chunk: DispatchCall, experts: DispatchFFNCombineWeights
    ) -> tuple[Tensor, Tensor]:
        # In this mode the argument limits the rows that a rank receives, although its name says
        # tokens of a rank, and the operator drops rows beyond it.
        most = self.max_received_rows(self._spec, self._world_size)
        most = max(most, self._spec.max_recv_slots or 0)
        return self._fused(chunk, experts, most, self._fuse_modes.DISPATCH_FFN_COMBINE)
