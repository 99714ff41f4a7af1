"""Compute FP8 experts by DeepGEMM's grouped products, where that package is installed.

ROWS: rows are gathered into slots, the slots of an expert start at a multiple of 128, and the
package gets the end of each expert; releases up to 2.1 get the expert of each slot, -1 for padding.
MASKED: rows are read where they are, and the capacity of an expert is a multiple of 128, because
the package stores whole tiles. Counts stay on the device. Both products return bfloat16; one kernel
between them activates the rows in use and quantises them to the format of the rows.

Source: DeepGEMM's README and argument checks (deepseek-ai/DeepGEMM). sm_90 takes float32 scales in
aligned columns. sm_100 takes exponents, four to an int32, and derives them from float32 scales by
cutting the fraction off, so this runner gives it only powers of two. Tests use an imitation of the
package. On one H200 the package itself gave the results of quantized_reference within 2% (2026-11);
sm_100 is untested.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.ops.activation import activate
from epcomm.ops.slots import expert_of_used_slot, gather_rows
from epcomm.platforms.cuda import cuda_reasons, temporary
from epcomm.platforms.deep_gemm import BUILD, DeepGemm, deep_gemm_reasons, load_deep_gemm
from epcomm.platforms.machine import Machine, this_machine
from epcomm.quantization import arrange_scales, quantizer_for
from epcomm.quantization.scale_layout import SCALES_PER_WORD, to_column_major
from epcomm.records import MaskedDispatchOutput, RowsDispatchOutput, SlotIndex
from epcomm.runners.base import ExpertRunner, size_reasons, slot_weights_to_apply, weight_slots
from epcomm.spec import Availability
from epcomm.types import (
    QUANTIZABLE_DTYPES,
    Layout,
    RowReading,
    ScaleLayout,
    WireFormat,
    WireTensor,
    align_up,
)
from epcomm.weights.quantized import BLOCK, Fp8BlockWeights
from epcomm.weights.unquantized import ExpertTensors

# 4 elements of float32 or int32 are 16 B: the tensor memory access unit reads columns that begin
# at multiples of 16 B.
COLUMNS = ScaleLayout(column_major=True, alignment=4)
PACKED_COLUMNS = ScaleLayout(column_major=True, alignment=4, packed=True)
# Rows of DeepGEMM's largest tiles; run() checks the value of the package.
EXPERT_ALIGNMENT = 128
_HOPPER, _BLACKWELL = 9, 10
# Codes and scales, as the package takes them.
_Operand = tuple[Tensor, Tensor | None]


class DeepGemmRunner(ExpertRunner):
    """Runs FP8 experts without gradients; plans prefer fp8_triton unless users name it.

    Results of slots that no expert computes are undefined.
    """

    name: ClassVar[str] = "deep_gemm"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (Fp8BlockWeights,)
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)
    expert_alignment: ClassVar[int] = EXPERT_ALIGNMENT
    has_limit: ClassVar[bool] = True

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        return Availability.judge(
            missing=deep_gemm_reasons(machine),
            command="" if machine.has_module("deep_gemm") else BUILD,
            absent=cuda_reasons(machine),
            needs="an NVIDIA GPU of compute capability (9, 0) or (10, 0)",
        )

    @classmethod
    def _reasons(cls, weights: ExpertTensors, machine: Machine) -> list[str]:
        assert isinstance(weights, Fp8BlockWeights), "of its kinds"
        reasons = size_reasons(weights, multiple=BLOCK)
        if weights.dtype is not torch.bfloat16:
            reasons.append(f"hidden states are {weights.dtype}, expected torch.bfloat16")
        return reasons + _device_reasons(weights, machine) + deep_gemm_reasons(machine)

    @classmethod
    def readings(cls, weights: ExpertTensors, layout: Layout) -> tuple[RowReading, ...]:
        # ROWS have columns of scales too: gathering slots from columns gives columns, in one pass.
        assert isinstance(weights, Fp8BlockWeights), "supports() said so"
        plain = (RowReading(format=WireFormat(dtype=each)) for each in sorted(QUANTIZABLE_DTYPES))
        wanted = RowReading(format=weights.wire_format, scale_layout=_scale_layout(weights))
        return (*plain, wanted)

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        assert isinstance(weights, Fp8BlockWeights), "supports() said so"
        package, index, num_slots = self._package, dispatched.index, dispatched.num_slots
        alignment = package.expert_alignment()
        if index.expert_alignment % alignment:
            raise ConfigError(
                f"deep_gemm: slots of experts start at multiples of {index.expert_alignment}, "
                f"expected multiples of {alignment}; dispatch with a plan made for runner deep_gemm"
            )
        rows = dispatched.hidden_states
        if num_slots == 0 or rows.data.shape[0] == 0:
            return rows.data.new_zeros(num_slots, weights.hidden_size, dtype=weights.hidden_dtype)
        # A slot budget need not be a multiple of a tile.
        num_padding = -num_slots % alignment
        # The package finds an expert's start from the end before it, by its own alignment.
        takes_ends = package.takes_ends and index.expert_alignment == alignment
        layout = _ends(index) if takes_ends else expert_of_used_slot(index, num_slots + num_padding)
        options = {"use_psum_layout": True} if takes_ends else {}

        def multiply(operand: _Operand, matrices: _Operand, out: Tensor) -> None:
            with self._limited():
                package.multiply_contiguous(operand, matrices, out, layout, **options)

        slots = _gather(_quantized(rows, weights), index, num_padding)
        slot_weights = slot_weights_to_apply(dispatched, self.name)
        if slot_weights is not None and num_padding:
            slot_weights = F.pad(slot_weights, (0, num_padding))
        counts, first_slot = index.num_tokens_per_expert, index.first_slot
        return _experts(multiply, slots, weights, counts, first_slot, slot_weights)[:num_slots]

    def _compute_masked(self, dispatched: MaskedDispatchOutput, weights: ExpertTensors) -> Tensor:
        assert isinstance(weights, Fp8BlockWeights), "supports() said so"
        package, rows = self._package, dispatched.hidden_states
        num_experts, capacity = rows.data.shape[:2]
        if capacity == 0:
            shape = (num_experts, 0, weights.hidden_size)
            return rows.data.new_zeros(shape, dtype=weights.hidden_dtype)
        # Whole tiles are stored, so that the last tile of an expert must not reach into the next
        # one. Tiles of this layout have up to 128 rows, whatever the package says of the other
        # layout.
        alignment = max(EXPERT_ALIGNMENT, package.expert_alignment())
        if capacity % alignment:
            raise ConfigError(
                f"deep_gemm: experts have capacity for {capacity} rows, expected a multiple of "
                f"{alignment}; dispatch with a plan made for runner deep_gemm"
            )
        counts = dispatched.num_tokens_per_expert
        # This number chooses the tiles.
        expected = min(capacity, dispatched.mean_tokens_per_expert or capacity)

        def multiply(operand: _Operand, matrices: _Operand, out: Tensor) -> None:
            with self._limited():
                package.multiply_masked(operand, matrices, out, counts, expected)

        operand = _quantized(rows, weights)
        operand = replace(operand, data=operand.data.contiguous(), scales=_as_read(operand.scales))
        slot_weights = slot_weights_to_apply(dispatched, self.name)
        return _experts(multiply, operand, weights, counts, None, slot_weights)

    def _limited(self) -> AbstractContextManager[None]:
        get, limit = self._package.get_num_sms, self.product_sms
        # The package refuses more SMs than there are.
        return temporary(limit and min(limit, get()), get, self._package.set_num_sms)

    @cached_property
    def _package(self) -> DeepGemm:
        return load_deep_gemm()


def _device_reasons(weights: Fp8BlockWeights, machine: Machine) -> list[str]:
    device, major = machine.device_of(weights.gate_up_proj), _architecture(weights, machine)
    if major is None:
        return [f"the experts are on {device}, expected cuda"]
    if major not in (_HOPPER, _BLACKWELL):
        return [f"{device} is sm_{major}x, expected sm_{_HOPPER}x or sm_{_BLACKWELL}x"]
    if major == _BLACKWELL and weights.wire_format.scale_dtype == torch.float32:
        return [
            f"{device} is sm_{major}x, which takes power-of-two scales alone, but the experts have "
            "float32 ones"
        ]
    return []


def _architecture(weights: Fp8BlockWeights, machine: Machine) -> int | None:
    """Return the major number of the compute capability; None where there is none."""
    device = machine.device_of(weights.gate_up_proj)
    return machine.capability(device)[0] if device.type == "cuda" else None


def _scale_layout(weights: Fp8BlockWeights) -> ScaleLayout:
    is_power_of_two = weights.wire_format.scale_dtype == torch.float8_e8m0fnu
    return (
        PACKED_COLUMNS
        if is_power_of_two and _architecture(weights, this_machine()) != _HOPPER
        else COLUMNS
    )


def _experts(
    multiply: Callable[[_Operand, _Operand, Tensor], None],
    rows: WireTensor,
    weights: Fp8BlockWeights,
    counts: Tensor,
    first_slot: Tensor | None,
    slot_weights: Tensor | None,
) -> Tensor:
    """Compute both products, and weight the results; padding is undefined.

    multiply: writes the product of rows and matrices to memory.
    rows: [C, H] with first_slot [L + 1], or [L, C, H] with None.   slot_weights: [C] or [L, C].
    """

    def product(operand: WireTensor, name: str) -> Tensor:
        tensors = weights.tensors()
        codes = tensors[f"{name}_proj"]
        shape = (*operand.data.shape[:-1], codes.shape[1])
        out = operand.data.new_empty(shape, dtype=torch.bfloat16)
        # sm_100 packs float32 scales of matrices itself.
        matrices = codes, tensors[f"{name}_scale"].float()
        multiply((operand.data, operand.scales), matrices, out)
        return out

    # Router weights multiply the scales of the second operand, at no cost. Exponents have no
    # fraction, so with them the results are multiplied.
    is_packed = _scale_layout(weights).packed
    in_scales = None if is_packed else slot_weights
    between = _between_on_gpu if rows.data.is_cuda else _between
    # The package launches on the current device.
    with torch.cuda.device_of(rows.data):
        gate_up = product(rows, "gate_up")
        results = product(between(gate_up, weights, counts, first_slot, in_scales), "down")
    if slot_weights is None or not is_packed:
        return results
    return weight_slots(results.flatten(0, -2), slot_weights.flatten()).view(results.shape)


def _quantized(rows: WireTensor, weights: Fp8BlockWeights) -> WireTensor:
    """Return rows in the wire format of the experts, with scales in the layout of the product."""
    if rows.format.dtype.is_quantized:
        return rows
    *batch, hidden_size = rows.data.shape
    flat = rows.data.reshape(-1, hidden_size)
    found = quantizer_for(flat.device)(flat, weights.wire_format)
    assert found.scales is not None, "quantised rows have scales"
    layout, scales = _scale_layout(weights), found.scales.unflatten(0, batch)
    return WireTensor(
        data=found.data.view(rows.data.shape),
        format=weights.wire_format,
        scales=arrange_scales(scales, layout),
        scale_layout=layout,
    )


def _between(
    gate_up: Tensor,
    weights: Fp8BlockWeights,
    counts: Tensor,
    first_slot: Tensor | None,
    slot_weights: Tensor | None,
) -> WireTensor:
    """Activate [..., 2I], bfloat16, and quantise it to the left operand of the second product."""
    hidden = activate(gate_up.float(), weights.format)
    quantized = _quantized(WireTensor(data=hidden, format=WireFormat.of(hidden.dtype)), weights)
    scales = _as_read(quantized.scales)
    if slot_weights is not None:
        scales = to_column_major(scales * slot_weights.unsqueeze(-1), COLUMNS.alignment)
    return replace(quantized, scales=scales)


def _between_on_gpu(
    gate_up: Tensor,
    weights: Fp8BlockWeights,
    counts: Tensor,
    first_slot: Tensor | None,
    slot_weights: Tensor | None,
) -> WireTensor:
    """Do what _between() does by one kernel over the counts."""
    from epcomm.kernels.gemm.fp8_hidden import hidden_fp8

    layout, wire_format = _scale_layout(weights), weights.wire_format
    *batch, num_rows, width = gate_up.shape
    codes = gate_up.new_empty(*batch, num_rows, width // 2, dtype=torch.float8_e4m3fn)
    num_scales = width // 2 // BLOCK
    columns = (*batch, -(-num_scales // SCALES_PER_WORD) if layout.packed else num_scales)
    # Missing exponents of a word are 0.
    scales = torch.zeros if layout.packed and num_scales % SCALES_PER_WORD else torch.empty
    found = scales(
        *columns,
        align_up(num_rows, layout.alignment),
        dtype=torch.int32 if layout.packed else torch.float32,
        device=gate_up.device,
    ).transpose(-1, -2)[..., :num_rows, :]
    hidden_fp8(
        gate_up,
        counts,
        first_slot,
        slot_weights=None if slot_weights is None else slot_weights.contiguous(),
        out_codes=codes,
        out_scales=found,
        is_power_of_two=wire_format.scale_dtype == torch.float8_e8m0fnu,
    )
    return WireTensor(data=codes, format=wire_format, scales=found, scale_layout=layout)


def _gather(rows: WireTensor, index: SlotIndex, num_padding: int) -> WireTensor:
    """Return the row of each slot, [C, H], with columns of scales; padding slots get any row."""
    assert rows.scales is not None, "quantised rows have scales"
    row_of_slot = index.row_of_slot
    if row_of_slot is None:
        if num_padding == 0:
            return replace(rows, data=rows.data.contiguous(), scales=_as_read(rows.scales))
        num_rows = rows.data.shape[0]
        row_of_slot = torch.arange(num_rows, dtype=torch.int32, device=rows.data.device)
    if num_padding:
        row_of_slot = F.pad(row_of_slot, (0, num_padding), value=-1)
    padded = replace(index, row_of_slot=row_of_slot, is_dense=index.is_dense and not num_padding)
    codes = gather_rows(rows.data.view(torch.uint8), padded).contiguous().view(rows.data.dtype)
    picked = row_of_slot if padded.is_dense else row_of_slot.clamp(min=0)
    columns = rows.scales.transpose(0, 1)
    if columns.itemsize == 1:
        # torch cannot index 8-bit floats.
        columns = columns.view(torch.uint8)
    # The number of slots is a multiple of the alignment of columns.
    gathered = torch.index_select(columns, 1, picked).view(rows.scales.dtype)
    if gathered.dtype == torch.float8_e8m0fnu:
        gathered = gathered.float()
    return replace(rows, data=codes, scales=gathered.transpose(0, 1))


def _as_read(scales: Tensor | None) -> Tensor:
    """Return scales in columns, float32 or packed: sm_90 has no products with exponents."""
    assert scales is not None, "quantised rows have scales"
    if scales.dtype == torch.float8_e8m0fnu:
        return to_column_major(scales.float(), COLUMNS.alignment)
    return scales


def _ends(index: SlotIndex) -> Tensor:
    """Return the end of the slots of each expert, [L], int32; the next one starts aligned."""
    return index.first_slot[:-1] + index.num_tokens_per_expert
